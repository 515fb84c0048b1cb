"""What became of the requests of a trace: each as an object, and all as columns, numbers in arrays.

Of more than MOST_SAVED outcomes that were simulated, a SAMPLE is kept as objects; those that were
measured are all kept.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from client import traces
from client.results import Json
from client.traces import Request, Trace
from scheduling.latency import Times
from stats import MEASURES, TIMINGS, Measure, times_from

SAMPLE = 20_000
REFUSED = "429 "  # how such an error begins: the queue is full, or a user beyond a limit
# fields of an answer's `timings`
REPORTED = ("arrived_at", *(measure.field for measure in TIMINGS))
# a server of ours that never preempts need not report these
ZERO = {"preempted_s": 0.0, "paused_s": 0.0}
SEEN = ("scheduled_at", "sent_at", "ended_at", "first_token_at", "last_token_at")
COLUMNS = np.dtype(
    [(name, bool) for name in ("ended", "sent", "answered", "refused")]
    + [(name, float) for name in SEEN]
    + [(name, np.int32) for name in ("prompt_tokens", "completion_tokens", "error")]
    + [(f"reported_{name}", float) for name in REPORTED]
)


def measured(name: str) -> property:
    """Return a measure as a property of a class that has `times`."""
    return property(lambda seen: MEASURES[name].of(seen.times))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request, as the client saw it, in seconds since the run's start: an answer,
    or an `error` in a sentence.

    ended_at: when it was answered, or failed. first_token_at, last_token_at: NaN where no event
    showed a token. itl_s: gaps between the arrivals of a stream's events, or of a plain answer
    between tokens at the server. timings: the server's own, if it gave them. sent: false where an
    earlier turn failed, and there was nothing to send. resent: once more, as the server had closed
    a kept connection. warm_up: no measure counts it.
    """

    request: Request
    scheduled_at: float
    sent_at: float
    ended_at: float
    first_token_at: float = math.nan
    last_token_at: float = math.nan
    prompt_tokens: int = 0
    completion_tokens: int = 0
    itl_s: Sequence[float] | np.ndarray = ()
    timings: Json | None = None
    text: str = ""
    error: str = ""
    sent: bool = True
    resent: bool = False
    warm_up: bool = False

    @property
    def times(self) -> Times:
        """Instants that this client saw."""
        first, last, n = self.first_token_at, self.last_token_at, self.completion_tokens
        return Times(self.sent_at, math.nan, first, last, self.ended_at, n)

    ttft_s = measured("ttft")
    tpot_s = measured("tpot")
    e2e_s = measured("e2el")


class Outcomes:
    """Outcomes as columns, a row for each request of a trace; and those that are kept as objects,
    by row. Their names are those of COLUMNS; `error`: the number of a sentence, 0 for none.
    """

    def __init__(self, n: int, whole: bool = False):
        """whole: keep all, however many."""
        self.rows = np.zeros(n, COLUMNS)
        self.kept: dict[int, Outcome] = {}
        self._sentences = {"": 0}  # sentences of errors, and their numbers
        self._sampled = n > traces.MOST_SAVED and not whole
        self._keep = np.full(n, not self._sampled)
        if self._sampled:
            self._keep[np.random.default_rng(0).choice(n, SAMPLE, replace=False)] = True

    @classmethod
    def of(cls, trace: Trace, outcomes: Outcomes | Iterable[Outcome]) -> Outcomes:
        if isinstance(outcomes, Outcomes):
            return outcomes
        result = cls(len(trace), whole=True)
        numbers = {id: i for i, id in enumerate(trace.id.tolist())}
        for outcome in outcomes:
            result.add(numbers[outcome.request.id], outcome)
        return result

    def keeps(self, i: int) -> bool:
        """Return whether this one is kept as an object, too."""
        return bool(self._keep[i])

    def add(self, i: int, outcome: Outcome) -> None:
        error, timings = outcome.error, outcome.timings or {}
        default = ZERO if timings else {}
        self.rows[i] = (
            True, outcome.sent, not error, error.startswith(REFUSED),
            outcome.scheduled_at, outcome.sent_at, outcome.ended_at,
            outcome.first_token_at, outcome.last_token_at,
            outcome.prompt_tokens, outcome.completion_tokens,
            self._sentences.setdefault(error, len(self._sentences)),
            *(timings.get(name, default.get(name, math.nan)) for name in REPORTED),
        )  # fmt: skip
        if self._keep[i]:
            self.kept[i] = outcome

    # ---- some of them

    def without(self, numbers: np.ndarray) -> Outcomes:
        """Return these as if some requests had never been sent."""
        rows = self.rows.copy()
        rows[numbers] = 0
        gone = set(numbers.tolist())
        return self._with(rows, {i: each for i, each in self.kept.items() if i not in gone})

    @property
    def answers(self) -> Outcomes:
        """Return the requests that were answered."""
        answered = self["answered"]
        numbers = np.cumsum(answered) - 1
        kept = {int(numbers[i]): each for i, each in sorted(self.kept.items()) if not each.error}
        return self._with(self.rows[answered], kept)

    def only(self, which: np.ndarray) -> Outcomes:
        """Return some, by their numbers or a mask, as columns alone."""
        return self._with(self.rows[which], {})

    def _with(self, rows: np.ndarray, kept: dict[int, Outcome]) -> Outcomes:
        others = copy.copy(self)
        others.rows, others.kept = rows, kept
        return others

    def __iter__(self) -> Iterator[Outcome]:
        """Return the kept outcomes, in the order of the trace."""
        return (self.kept[i] for i in sorted(self.kept))

    # ---- columns

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> np.ndarray:
        """Return a column of COLUMNS."""
        column: np.ndarray = self.rows[name]
        return column

    @property
    def ended(self) -> np.ndarray:
        """Rows of all requests that ended."""
        rows: np.ndarray = self.rows[self["ended"]]
        return rows

    @property
    def errors(self) -> Counter[str]:
        """Number of failures by their sentences."""
        counts = np.bincount(self["error"], minlength=len(self._sentences)).tolist()
        return +Counter({sentence: counts[k] for sentence, k in self._sentences.items() if k})

    @property
    def sample(self) -> int | None:
        """Number of kept outcomes, if only a sample is kept."""
        return len(self.kept) if self._sampled else None

    def reported(self, name: str) -> np.ndarray:
        """Return a field of `timings`, one of REPORTED; NaN where a server did not report it."""
        return self[f"reported_{name}"]

    def values(self, measure: Measure) -> np.ndarray:
        """Return a measure of each answer, as this client saw it; NaN where it has none."""
        if measure.pooled:
            return self.gaps
        return self.reported(measure.field) if measure.by_server else measure.of(self.times)

    @property
    def gaps(self) -> np.ndarray:
        """Seconds between tokens, of the answers that are kept."""
        return np.concatenate([[], *(each.itl_s for each in self.kept.values())])

    @property
    def times(self) -> Times:
        """Instants that this client saw."""
        first, last, end = self["first_token_at"], self["last_token_at"], self["ended_at"]
        return Times(self["sent_at"], np.nan, first, last, end, self["completion_tokens"])

    @property
    def times_at_server(self) -> Times:
        """Instants that servers reported; NaN where they did not."""
        timings = {measure.field: self.reported(measure.field) for measure in TIMINGS}
        return times_from(timings, self.reported("arrived_at"))

    ttft_s = measured("ttft")
    e2e_s = measured("e2el")
    lag_s = property(lambda outcomes: outcomes["sent_at"] - outcomes["scheduled_at"])
