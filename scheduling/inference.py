"""The nouns: an inference, a row of it in an iteration, and the engine's seam. Plain data, stdlib
only.

States: WAITING → RUNNING → FINISHED, with the exits FAILED, CANCELLED and EXPIRED from either. In a
request-level batch a row that has all its tokens stays RUNNING (it is *held*) until its batch ends;
one that is streamed is FINISHED with its own last token.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from scheduling.errors import ServingError

if TYPE_CHECKING:
    import threading


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose a token. temperature 0 is greedy; `seed` and the token's index
    decide the draw.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    # what each completion token that is there lowers its logit by: once, and each time
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0  # so many come before any of `stop_ids` may
    stop_ids: tuple[int, ...] = ()  # each once
    # whether any of these four may change a logit: looked up for each row of each iteration
    penalizes: bool = field(init=False)

    def __post_init__(self) -> None:
        ends = bool(self.min_tokens and self.stop_ids)
        penalizes = bool(self.presence_penalty or self.frequency_penalty) or ends
        object.__setattr__(self, "penalizes", penalizes)


class Score(NamedTuple):
    """A token's log-probability after those before it, and the likeliest ids there with theirs."""

    logprob: float
    top: list[tuple[int, float]]  # the likeliest first


@dataclass(slots=True)
class Scores:
    """Log-probabilities that a request wants. The engine appends them, each token's once."""

    top: int  # how many of the likeliest ids
    first: int  # which token of prompt + completion is the first; the one at 0 follows none
    of: list[Score] = field(default_factory=list)

    @property
    def next(self) -> int:
        """The place of the token whose score comes next."""
        return self.first + len(self.of)


class News(NamedTuple):
    """What a stream learns: so many tokens are there, and whether more will come. Consistent,
    unlike the fields themselves, which the handler thread may be changing.
    """

    inference: Inference
    n_tokens: int
    is_over: bool


@dataclass(slots=True, eq=False)
class Inference:
    """One request while it is served. Times are seconds on the manager's clock."""

    prompt_ids: list[int]
    num_tokens: int
    sampling: Sampling = Sampling()
    deadline: float | None = None
    # told each token once; True ends the inference with it
    stop: Callable[[int], bool] | None = None
    listener: Callable[[News], None] | None = None  # called for each token and at the end
    # its caller reads each token at once: in a request-level batch it ends with its own last one
    streamed: bool = False

    user: str | None = None  # on whose behalf it comes
    request_id: str = ""  # what its client calls the request, for the request log
    # its level, 1 first; 0: the default one, which is filled in where levels have a meaning
    priority: int = 0
    # longest wait that it asks of its level's queue policy, which may be shorter
    queue_timeout_s: float | None = None
    # `blocks.block_keys` of its prompt, by which others find its KV blocks and it finds theirs;
    # with its completion's as it comes. None: it shares nothing
    keys: list[bytes] | None = None
    # the first completion of the same prompt: this one waits for it to compute what both share
    leader: Inference | None = None
    scores: Scores | None = None  # None: it wants none

    id: int = -1  # arrival order; given by the scheduler, as are all that follow
    group: int = -1  # the id of the group's first inference
    # completion tokens that an order may reckon with, of a group its longest; never the true number
    predicted_tokens: int = 0
    longest_prompt: int = 0  # tokens; of a group its longest, too
    key: tuple[Any, ...] = ()  # its turn when it began to wait, or was paused
    bin: int = 0  # its queue, in modes with several
    delayed: bool = False  # behind all others of its level, by a queue policy
    processed_before: int = 0  # tokens that the server had when it came
    level: int = 0  # of a multi-level feedback queue, with the tokens it used there, and since when
    level_tokens: int = 0
    level_at: float = 0.0
    batch: int = -1  # counts the times that anyone was admitted
    position: int = -1  # rows in the batch before it when it was admitted
    arrived_at: float = 0.0

    state: State = State.WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose keys and values are in the cache
    named: int = 0  # its first blocks, which are full and have keys; nobody writes to them
    cached_tokens: int = 0  # of its prompt, those that it found computed
    tokens: list[int] = field(default_factory=list)  # completion ids
    token_times: list[float] = field(default_factory=list)
    admitted_at: float | None = None
    answered_at: float | None = None
    preemptions: int = 0  # times that it had to give its KV blocks up and wait again
    preempted_at: float | None = None  # since when it waits again
    preempted_s: float = 0.0  # how long it did
    paused_at: float | None = None  # since when it runs without being computed
    paused_s: float = 0.0  # how long it did; its KV blocks were kept
    reached: int = 0  # tokens computed before it was preempted; up to there it recomputes
    recomputed_tokens: int = 0
    stopped: bool = False  # by `stop`
    error: ServingError | None = None
    # what is left to compute is the token generated last; else it is a prompt, or what preemption
    # took
    decodes: bool = False
    # nothing is left to compute for it: its row, if it still has one, is idle
    is_over: bool = False
    # set when it has its answer; there once a manager has queued it
    done: threading.Event = field(init=False, repr=False)

    @property
    def whole_life(self) -> int:
        """Tokens that it may come to: prompt + num_tokens."""
        return len(self.prompt_ids) + self.num_tokens

    @property
    def uncomputed(self) -> int:
        """Tokens of prompt and completion whose keys and values are not in the cache."""
        return len(self.prompt_ids) + len(self.tokens) - self.computed

    @property
    def left(self) -> int:
        """Tokens that were never computed: of its prompt, which several completions have once, and
        of its completion at most.
        """
        prompt = len(self.prompt_ids) if self.leader is None else 0
        computed = max(self.computed, self.reached)
        return max(0, prompt - computed) + self.num_tokens - len(self.tokens)

    def awaits_leader(self, block_size: int) -> bool:
        """The first completion of its prompt is about to compute full blocks that it will share.
        One that had to give way may be waiting for this one's blocks, and is not waited for.
        """
        leader = self.leader
        if leader is None or leader.answered_at is not None or leader.preempted_at is not None:
            return False
        shared = (len(self.prompt_ids) - 1) // block_size * block_size
        return self.computed < shared and leader.computed < shared

    @property
    def uncomputed_since(self) -> float | None:
        """Since when it waits or is paused; None: it is computed."""
        if self.state is State.WAITING:
            return self.arrived_at if self.preempted_at is None else self.preempted_at
        return self.paused_at

    def resume(self, now: float) -> None:
        """It no longer waits after a preemption, nor is it paused."""
        if self.preempted_at is not None:
            self.preempted_s += now - self.preempted_at
        if self.paused_at is not None:
            self.paused_s += now - self.paused_at
        self.preempted_at = self.paused_at = None

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        """Why a FINISHED inference ended."""
        return "stop" if self.stopped else "length"

    def tell(self) -> None:
        """Tell the listener, if there is one, how far this inference has come."""
        if self.listener is not None:
            self.listener(News(self, len(self.tokens), self.is_over))

    def token(self, position: int) -> int:
        """The id at `position` of prompt + completion."""
        n = len(self.prompt_ids)
        return self.prompt_ids[position] if position < n else self.tokens[position - n]


class Row(NamedTuple):
    """One inference in an iteration: compute tokens start … start + n_tokens − 1.

    `samples`: the engine returns an id for it. `idle`: computed for an inference that is over; the
    id is thrown away. `blocks` is the row's own reference, so that a request cancelled in the
    middle of an iteration cannot pull them from under the engine.
    """

    inference: Inference
    start: int
    n_tokens: int
    blocks: list[int]
    samples: bool
    idle: bool
    recomputed: int = 0  # of its tokens, those that were computed before a preemption

    @property
    def decodes(self) -> bool:
        """It computes the token generated last, or is idle; else a part of a prompt, be it a prompt
        of one token.
        """
        return self.idle or (
            self.samples and self.n_tokens == 1 and self.start >= len(self.inference.prompt_ids)
        )


class Iteration(NamedTuple):
    """One forward pass over a batch: plain integers, no tensors."""

    rows: list[Row]
    running: int  # inferences admitted, whether computed in this iteration or not
    waiting: int
    blocks_used: int
    reason: str = ""
    padding: int = 0  # rows of nobody, computed besides to fill a decoder batch size
    preempted: int = 0  # inferences that gave their KV blocks up before it
    holds: bool = False  # as its plan says; `closed` too
    closed: bool = False


@dataclass(slots=True)
class IterationRecord:
    """What an observer learns of one iteration. `started_at`: seconds on the manager's clock."""

    started_at: float
    seconds: float
    iteration: Iteration
    n: int = 1  # it and those after it, in which its rows compute a token each; `seconds` is of all
    # how many of each kind one of them computed, as `stats.ROW_KINDS` names them
    rows: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        rows, padding = self.iteration.rows, self.iteration.padding
        idle = [row.idle for row in rows].count(True)
        again = len(rows) - [row.recomputed for row in rows].count(0)
        live = len(rows) - idle - again
        self.rows = {"live": live, "idle": idle, "padding": padding, "recomputed": again}


class Observer(Protocol):
    """Told of all that happens. A manager tells it by the handler thread or under its lock: it must
    be quick, and what it raises is logged.
    """

    def iteration(self, record: IterationRecord) -> None:
        """An iteration is over."""

    def answered(self, inference: Inference) -> None:
        """An inference has its answer or its error, and its caller is about to be woken."""


class Generator(Protocol):
    """The engine's seam."""

    # KV blocks that it has, by which the scheduler then goes; None: as many as that has
    n_blocks: int | None = None

    def generate(self, iteration: Iteration) -> list[int]:
        """Compute the iteration; return one id per row with `samples`, in row order."""
        ...
