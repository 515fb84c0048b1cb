"""Outcomes of a trace's requests as columns, numbers in arrays; and as objects.

Of more than MOST_SAVED outcomes that were simulated, a SAMPLE is kept as objects; those that were
measured are all kept.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from client import traces
from client.results import Json
from client.traces import Request, Trace
from stats import TIMINGS, Measure, Times, measured, times_from

SAMPLE = 20_000
REFUSED = "429 "  # how such an error begins: the queue is full, or a user beyond a limit
# fields of an answer's `timings`
REPORTED = ("arrived_at", *(measure.field for measure in TIMINGS))
# a server of ours that never preempts need not report these
ZERO = {"preempted_s": 0.0, "paused_s": 0.0}
ROW = np.dtype(
    [(name, bool) for name in ("ended", "sent", "answered", "refused")]
    + [(name, float) for name in ("scheduled_at", "sent_at", "ended_at")]
    + [(name, float) for name in ("first_token_at", "last_token_at")]
    + [(name, np.int32) for name in ("prompt_tokens", "completion_tokens")]
    + [(f"reported_{name}", float) for name in REPORTED]
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as the client saw it, in seconds since the run's start; `timings` are the
    server's own, if it gave them. first_token_at, last_token_at: NaN where no event showed a token.
    itl_s: gaps between the arrivals of a stream's events, or of a plain answer between tokens at
    the server.
    """

    id: int
    scheduled_at: float
    sent_at: float
    first_token_at: float
    last_token_at: float
    answered_at: float
    prompt_tokens: int
    completion_tokens: int
    itl_s: Sequence[float] | np.ndarray
    timings: Json | None

    started_at = property(attrgetter("sent_at"))
    ttft_s = measured("ttft")
    tpot_s = measured("tpot")
    e2e_s = measured("e2el")


class Outcome(NamedTuple):
    """The outcome of a request: an answer with its text, or the error in a sentence."""

    request: Request
    scheduled_at: float
    sent_at: float
    ended_at: float  # when it was answered, or failed
    answer: Answer | None = None
    text: str = ""
    error: str = ""
    sent: bool = True  # false where an earlier turn failed, and there was nothing to send
    resent: bool = False  # once more, as the server had closed a kept connection
    warm_up: bool = False  # no measure counts it

    @property
    def row(self) -> tuple[float, ...]:
        stamps = self.scheduled_at, self.sent_at, self.ended_at
        if (answer := self.answer) is not None:
            return _row(answer)
        refused = self.error.startswith(REFUSED)
        return (True, self.sent, False, refused, *stamps, 0, 0, 0, 0, *(math.nan for _ in REPORTED))


def _row(answer: Answer) -> tuple[float, ...]:
    timings = answer.timings or {}
    default = ZERO if timings else {}
    return (
        True, True, True, False, answer.scheduled_at, answer.sent_at, answer.answered_at,
        answer.first_token_at, answer.last_token_at,
        answer.prompt_tokens, answer.completion_tokens,
        *(timings.get(name, default.get(name, math.nan)) for name in REPORTED),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers as columns, rows of ROW. kept: those with the gaps between tokens, by row."""

    rows: np.ndarray
    kept: Mapping[int, Answer]

    @classmethod
    def of(cls, answers: Answers | Iterable[Answer]) -> Answers:
        if isinstance(answers, Answers):
            return answers
        kept = list(answers)
        return cls(np.array([_row(answer) for answer in kept], ROW), dict(enumerate(kept)))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> np.ndarray:
        """Return a column of ROW."""
        column: np.ndarray = self.rows[name]
        return column

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
        return np.concatenate([[], *(answer.itl_s for answer in self.kept.values())])

    @property
    def times(self) -> Times:
        """Stamps that this client saw."""
        first, last, end = self["first_token_at"], self["last_token_at"], self["ended_at"]
        return Times(self["sent_at"], np.nan, first, last, end, self["completion_tokens"])

    @property
    def times_at_server(self) -> Times:
        """Stamps that servers reported; NaN where they did not."""
        timings = {measure.field: self.reported(measure.field) for measure in TIMINGS}
        return times_from(timings, self.reported("arrived_at"))

    ttft_s = property(lambda answers: answers.times.ttft_s)
    e2e_s = property(lambda answers: answers.times.e2e_s)
    lag_s = property(lambda answers: answers["sent_at"] - answers["scheduled_at"])


class Outcomes:
    """Outcomes of the requests of a trace, by their number: a row of ROW for each."""

    def __init__(self, n: int, whole: bool = False):
        """whole: keep all, however many."""
        self.rows = np.zeros(n, ROW)
        self._sentences: dict[str, int] = {}  # sentences of errors, numbered from 1
        self._error = np.zeros(n, np.int32)  # the number of each request's sentence, 0 for none
        self._sampled = n > traces.MOST_SAVED and not whole
        self._kept: dict[int, Outcome] = {}
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

    def without(self, numbers: np.ndarray) -> Outcomes:
        """Return these as if some requests had never been sent."""
        others = copy.copy(self)
        others.rows, others._kept = self.rows.copy(), self._kept.copy()
        others.rows[numbers] = 0
        others._error = self._error.copy()
        others._error[numbers] = 0
        for i in numbers.tolist():
            others._kept.pop(i, None)
        return others

    def keeps(self, i: int) -> bool:
        """Return whether this one is kept as an object, too."""
        return bool(self._keep[i])

    def add(self, i: int, outcome: Outcome) -> None:
        self.rows[i] = outcome.row
        if outcome.error:
            self._error[i] = self._sentences.setdefault(outcome.error, len(self._sentences) + 1)
        if self._keep[i]:
            self._kept[i] = outcome

    def __iter__(self) -> Iterator[Outcome]:
        """Return the kept outcomes, in the order of the trace."""
        return (self._kept[i] for i in sorted(self._kept))

    @property
    def errors(self) -> Counter[str]:
        """Number of failures by their sentences."""
        counts = np.bincount(self._error, minlength=len(self._sentences) + 1).tolist()
        return +Counter({sentence: counts[k] for sentence, k in self._sentences.items()})

    @property
    def sample(self) -> int | None:
        """Number of kept outcomes, if only a sample is kept."""
        return len(self._kept) if self._sampled else None

    @property
    def ended(self) -> np.ndarray:
        """Rows of all requests that ended."""
        rows: np.ndarray = self.rows[self.rows["ended"]]
        return rows

    @property
    def answers(self) -> Answers:
        answered = self.rows["answered"]
        numbers = np.cumsum(answered) - 1
        kept = {int(numbers[i]): o.answer for i, o in sorted(self._kept.items()) if o.answer}
        return Answers(self.rows[answered], kept)

    def answers_of(self, numbers: np.ndarray) -> Answers:
        """Return the answers to some requests, without the gaps between tokens."""
        rows = self.rows[numbers]
        return Answers(rows[rows["answered"]], {})
