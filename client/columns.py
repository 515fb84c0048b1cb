"""A trace, what became of it, and its answers, as columns: numbers in arrays.

An object of a request is made when it is asked for. Of more than MOST outcomes that were simulated
a SAMPLE is kept as objects; those that were measured are kept, all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from stats import TIMINGS, Answer, Measure, Times, times_from

if TYPE_CHECKING:
    from client.data import Request
    from client.load import Outcome

MOST = 100_000
SAMPLE = 20_000
NOBODY = ""  # the user of requests that name none; no user has an empty name
REFUSED = "429 "  # how such an error begins: the queue is full, or a user beyond a limit
# of an answer's `timings`, what is counted; a server that sets nobody aside need not say so
TOLD = ("arrived_at", *(measure.field for measure in TIMINGS))
UNSAID = {"preempted_s": 0.0, "paused_s": 0.0}
ROW = np.dtype(
    [
        *((name, bool) for name in ("ended", "sent", "answered", "refused")),
        *((name, float) for name in ("scheduled_at", "sent_at", "ended_at")),
        *((name, float) for name in ("first_token_at", "last_token_at")),
        *((name, np.int32) for name in ("prompt_tokens", "completion_tokens")),
        *((f"told_{name}", float) for name in TOLD),
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class Trace(Sequence["Request"]):
    """The requests of a trace, each of which `make` makes of its number; and columns of them."""

    make: Callable[[int], Request]
    id: np.ndarray
    at: np.ndarray  # seconds
    num_tokens: np.ndarray
    user: np.ndarray  # number of its user in `names`
    names: Sequence[str]  # of users, who comes first first
    priority: np.ndarray  # 0: it names none
    after: np.ndarray  # number of the turn before it; -1: it waits for none
    think_s: np.ndarray  # NaN: it waits for none
    users: int | None  # of a closed loop

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Trace:
        if isinstance(requests, Trace):
            return requests
        numbers = {request.id: i for i, request in enumerate(requests)}
        who = [request.user or NOBODY for request in requests]
        names = {name: i for i, name in enumerate(dict.fromkeys(who))}
        return cls(
            requests.__getitem__,
            np.array([request.id for request in requests]),
            np.array([request.at for request in requests], float),
            np.array([request.num_tokens for request in requests]),
            np.array([names[name] for name in who]),
            list(names),
            np.array([request.priority or 0 for request in requests]),
            np.array([-1 if r.after is None else numbers[r.after] for r in requests]),
            np.array([math.nan if r.think_s is None else r.think_s for r in requests], float),
            requests[0].users,
        )

    @property
    def firsts(self) -> np.ndarray:
        """Numbers of the requests that wait for no answer."""
        return np.flatnonzero(self.after < 0)

    def __len__(self) -> int:
        return len(self.at)

    @overload
    def __getitem__(self, i: int) -> Request: ...
    @overload
    def __getitem__(self, i: slice) -> list[Request]: ...
    def __getitem__(self, i: int | slice) -> Request | list[Request]:
        numbers = range(len(self))[i]
        return self.make(numbers) if isinstance(numbers, int) else [self.make(n) for n in numbers]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers as columns, rows of ROW; and by their row those that are kept, with the gaps between
    their tokens.
    """

    rows: np.ndarray
    kept: Mapping[int, Answer]

    @classmethod
    def of(cls, answers: Answers | Iterable[Answer]) -> Answers:
        if isinstance(answers, Answers):
            return answers
        kept = list(answers)
        rows = np.array([_row(answer) for answer in kept], ROW)
        return cls(rows, dict(enumerate(kept)))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> np.ndarray:
        """A column of ROW."""
        column: np.ndarray = self.rows[name]
        return column

    def told(self, name: str) -> np.ndarray:
        """What servers told, one of TOLD; NaN where they did not."""
        return self[f"told_{name}"]

    @property
    def gaps(self) -> np.ndarray:
        """Between tokens, of those that are kept; in seconds, as all that follows."""
        return np.concatenate([[], *(answer.itl_s for answer in self.kept.values())])

    def values(self, measure: Measure) -> np.ndarray:
        """A measure of each answer, as this client saw it; NaN where it has none."""
        if measure.pooled:
            return self.gaps
        return self.told(measure.field) if measure.by_server else measure.of(self.times)

    @property
    def times(self) -> Times:
        """As this client saw them."""
        first, last, end = self["first_token_at"], self["last_token_at"], self["ended_at"]
        return Times(self["sent_at"], np.nan, first, last, end, self["completion_tokens"])

    ttft_s = property(lambda answers: answers.times.ttft_s)
    tpot_s = property(lambda answers: answers.times.tpot_s)
    e2e_s = property(lambda answers: answers.times.e2e_s)

    @property
    def times_at_server(self) -> Times:
        """As servers recorded them; NaN where they did not."""
        timings = {measure.field: self.told(measure.field) for measure in TIMINGS}
        return times_from(timings, self.told("arrived_at"))

    @property
    def lag_s(self) -> np.ndarray:
        return self["sent_at"] - self["scheduled_at"]


class Outcomes:
    """What became of the requests of a trace, by their number: a row of ROW for each."""

    def __init__(self, n: int, whole: bool = False):
        """whole: keep all, however many."""
        self.rows = np.zeros(n, ROW)
        self.errors: Counter[str] = Counter()
        self._sampled = n > MOST and not whole
        self._kept: dict[int, Outcome] = {}
        self._keep = np.full(n, not self._sampled)
        if self._sampled:
            self._keep[np.random.default_rng(0).choice(n, SAMPLE, replace=False)] = True

    @classmethod
    def of(cls, trace: Trace, outcomes: Outcomes | Iterable[Outcome]) -> Outcomes:
        if isinstance(outcomes, Outcomes):
            return outcomes
        found = cls(len(trace), whole=True)
        numbers = {id: i for i, id in enumerate(trace.id.tolist())}
        for outcome in outcomes:
            found.add(numbers[outcome.request.id], outcome)
        return found

    def keeps(self, i: int) -> bool:
        """Whether this one is kept as an object, too."""
        return bool(self._keep[i])

    def add(self, i: int, outcome: Outcome) -> None:
        if (answer := outcome.answer) is not None:
            self.rows[i] = _row(answer)
        else:
            stamps = (outcome.scheduled_at, outcome.sent_at, outcome.ended_at)
            refused = outcome.error.startswith(REFUSED)
            self.rows[i] = (True, outcome.sent, False, refused, *stamps, *_NOTHING)
        if outcome.error:
            self.errors[outcome.error] += 1
        if self._keep[i]:
            self._kept[i] = outcome

    def __iter__(self) -> Iterator[Outcome]:
        """Those that are kept, in the order of the trace."""
        return (self._kept[i] for i in sorted(self._kept))

    @property
    def sample(self) -> int | None:
        """How many are kept, where that is not all that ended."""
        return len(self._kept) if self._sampled else None

    @property
    def ended(self) -> np.ndarray:
        """The rows of all that ended."""
        rows: np.ndarray = self.rows[self.rows["ended"]]
        return rows

    @property
    def answers(self) -> Answers:
        answered = self.rows["answered"]
        numbers = np.cumsum(answered) - 1
        kept = {int(numbers[i]): o.answer for i, o in sorted(self._kept.items()) if o.answer}
        return Answers(self.rows[answered], kept)

    def answers_of(self, numbers: np.ndarray) -> Answers:
        """Of some requests alone; nobody asks for their gaps."""
        rows = self.rows[numbers]
        return Answers(rows[rows["answered"]], {})


_NOTHING = (0.0, 0.0, 0, 0, *(math.nan for _ in TOLD))


def _row(answer: Answer) -> tuple[Any, ...]:
    timings = answer.timings or {}
    unsaid = UNSAID if timings else {}
    return (
        True, True, True, False, answer.scheduled_at, answer.sent_at, answer.answered_at,
        answer.first_token_at, answer.last_token_at,
        answer.prompt_tokens, answer.completion_tokens,
        *(timings.get(name, unsaid.get(name, math.nan)) for name in TOLD),
    )  # fmt: skip
