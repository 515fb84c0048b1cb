"""The nouns: an inference, its row in an iteration, and the engine's interface. Plain data; needs
only the standard library.

States: WAITING → RUNNING → FINISHED, with the exits FAILED, CANCELLED and EXPIRED from either. In a
request-level batch a row that has all its tokens stays RUNNING (it is *held*) until its batch ends;
one that is streamed is FINISHED with its own last token.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from scheduling.errors import ServingError
from scheduling.interruptions import Interruptions
from scheduling.sampling import Sampling, Scores


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class TokenEvent(NamedTuple):
    """Progress of one inference, for its stream: a consistent copy, which no thread changes."""

    inference: Inference
    n_tokens: int
    is_over: bool


@dataclass(slots=True)
class Standing:
    """Place of an inference in the waiting queue and its batch, and its order's record of it."""

    key: tuple[Any, ...] = ()  # to sort by; set when it begins to wait, or is paused
    bin: int = 0  # its queue, in modes with several
    # expected completion tokens, of its group's longest; orders never see the true number
    predicted_tokens: int = 0
    state: Any = None  # the order's own record
    batch: int = -1  # number of its iteration, among those that admitted anything
    position: int = -1  # rows before it when it was admitted
    blocked_s: float = 0.0  # the part of its queue time for want of KV blocks
    blocked_from: float = math.inf  # seconds of any want of them before it arrived


@dataclass(slots=True)
class Drafts:
    """Draft tokens of an inference, and how many were accepted so far."""

    ids: list[int] = field(default_factory=list)  # proposed for its next tokens
    blocks: int = 0  # KV blocks that it would have without those that are verified now
    verified: int = 0  # number of draft tokens verified so far
    accepted: int = 0  # number of draft tokens accepted so far


class Slo(NamedTuple):
    """Limits of a request's time to first token, and per output token after it; None: none."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    name: str | None = None  # its class, whose limits hold where the request states none


@dataclass(slots=True)
class CachedPrefix:
    """What an inference shares with others through the prefix cache."""

    keys: list[bytes]  # `prefix_cache.block_keys` of prompt and completion so far
    n_blocks: int = 0  # its first blocks, full and known to the cache: read-only
    found_tokens: int = 0  # prompt tokens found there


@dataclass(slots=True, eq=False)
class Inference:
    """One request while it is served. Times are seconds on the manager's clock."""

    prompt_ids: list[int]
    num_tokens: int
    sampling: Sampling = Sampling()  # noqa: RUF009  (it is frozen)
    deadline: float | None = None
    stop: Callable[[int], bool] | None = None  # called with each token; True ends the inference
    listener: Callable[[TokenEvent], None] | None = None  # called for each token and at the end
    streamed: bool = False  # in a request-level batch it ends with its own last token
    user: str | None = None
    adapter: str = ""  # LoRA adapter of its model; the base model has none
    request_id: str = ""  # the client's name for it, for the request log
    priority: int = 0  # level, 1 first; 0: the default level
    queue_timeout_s: float | None = None  # shortens the limit of its level's queue policy
    slo: Slo = Slo()  # noqa: RUF009  (it is immutable)
    prefix: CachedPrefix | None = None  # None: its KV blocks are not shared
    # first completion of the same prompt; this one waits until it has computed what both share
    leader: Inference | None = None
    scores: Scores | None = None  # log-probabilities, if wanted
    prompt_only: bool = False  # its one token is not shown, and needs no KV slot
    expected_tokens: int | None = None  # what its answer was taken for, if not num_tokens

    # set by the scheduler
    id: int = -1  # in arrival order
    group: int = -1  # id of the first inference of its request
    arrived_at: float = 0.0
    admitted_at: float | None = None
    answered_at: float | None = None
    standing: Standing = field(default_factory=Standing)
    interruptions: Interruptions = field(default_factory=Interruptions)
    drafts: Drafts = field(default_factory=Drafts)

    state: State = State.WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose keys and values are cached, or come with it
    tokens: list[int] = field(default_factory=list)  # completion ids; the last one may be pending
    token_times: list[float] = field(default_factory=list)
    stopped: bool = False  # by `stop`
    error: ServingError | None = None
    decodes: bool = False  # only its last token is uncomputed
    is_over: bool = False  # nothing is left to compute; if it still has a row, that is idle
    done: Any = field(init=False, repr=False)  # the manager's event, set when it is answered

    @property
    def total_tokens(self) -> int:
        """Tokens of prompt and completion at the end, at most, that need KV slots."""
        return len(self.prompt_ids) + (0 if self.prompt_only else self.num_tokens)

    @property
    def uncomputed(self) -> int:
        """Tokens of prompt and completion whose keys and values are not in the cache."""
        return len(self.prompt_ids) + len(self.tokens) - self.computed

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return self.prefix.found_tokens if self.prefix else 0

    @property
    def remaining_tokens(self) -> int:
        """Tokens never computed so far; a prompt of several completions counts once."""
        prompt = len(self.prompt_ids) if self.leader is None else 0
        computed = max(self.computed, self.interruptions.recompute_until)
        return max(0, prompt - computed) + self.num_tokens - len(self.tokens)

    def awaits_leader(self, block_size: int, joining: Iterable[Inference] = ()) -> bool:
        """Return whether its leader, if it runs or is `joining`, will compute blocks for it."""
        leader = self.leader
        if leader is None or self.prefix is None or leader.answered_at is not None:
            return False
        if leader.interruptions.preempted_at is not None:
            return False
        if leader.state is State.WAITING and leader not in joining:
            return False
        shared = (len(self.prompt_ids) - 1) // block_size * block_size
        return self.computed < shared and leader.computed < shared

    @property
    def uncomputed_since(self) -> float | None:
        """Time at which it began to wait or was paused; None: it is computed."""
        if self.state is State.WAITING:
            preempted_at = self.interruptions.preempted_at
            return self.arrived_at if preempted_at is None else preempted_at
        return self.interruptions.paused_at

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        """OpenAI's reason why a FINISHED inference ended."""
        return "stop" if self.stopped else "length"

    def notify(self) -> None:
        """Call the listener, if there is one, with the progress so far."""
        if (listener := self.listener) is not None:
            self.listener = None if self.is_over else listener  # the listener refers to the answer
            listener(TokenEvent(self, len(self.tokens), self.is_over))

    def token(self, position: int) -> int:
        """Return the id at `position` of prompt + completion."""
        n = len(self.prompt_ids)
        return self.prompt_ids[position] if position < n else self.tokens[position - n]


class Row(NamedTuple):
    """One inference in an iteration: compute tokens start … start + n_tokens − 1, of which the last
    ones are `drafts`.

    `samples`: the engine returns an id for it, and one after each draft. `idle`: computed for an
    inference that is over; the id is thrown away. `blocks` is the row's own reference, which stays
    valid for the engine when the request is cancelled in the middle of an iteration.
    """

    inference: Inference
    start: int
    n_tokens: int
    blocks: list[int]
    samples: bool
    idle: bool
    recomputed: int = 0  # tokens that were computed before a preemption
    drafts: Sequence[int] = ()  # ids of next tokens to verify

    @property
    def new_prompt_tokens(self) -> int:
        """Prompt tokens computed for the first time; of several completions, by the first one."""
        if self.inference.leader is not None:
            return 0
        end = min(self.start + self.n_tokens, len(self.inference.prompt_ids))
        return max(0, end - self.start - self.recomputed)

    @property
    def decodes(self) -> bool:
        """True if it is idle or computes the token generated last; else it computes a prompt."""
        only = self.n_tokens - len(self.drafts) == 1
        return self.idle or (self.samples and only and self.start >= len(self.inference.prompt_ids))


class Iteration(NamedTuple):
    """One forward pass over a batch: plain integers, no tensors."""

    rows: list[Row]
    running: int  # inferences admitted, whether computed in this iteration or not
    waiting: int
    blocks_used: int
    reason: str = ""
    padding: int = 0  # tokens computed for no request, each like a row (`padding.padding`)
    preempted: int = 0  # inferences that gave their KV blocks up before it
    loads: Sequence[tuple[int, str]] = ()  # adapters to load first: slot and name


class Drafter(Protocol):
    """Proposes draft tokens. It decides on speed alone: texts are the same with any."""

    def propose(self, wanted: Sequence[tuple[Inference, int]]) -> list[list[int]]:
        """Return at most so many ids of next tokens for each inference, all of which decode."""
        ...


class Generator(Protocol):
    """The engine's interface."""

    n_blocks: int | None = None  # KV blocks of the engine; None: those of the settings
    drafter: Drafter | None = None
    adapters: Any = None  # generate/lora.py's AdapterStore, if it serves any

    def generate(self, iteration: Iteration) -> list[int]:
        """Compute the iteration; return the ids of rows with `samples`, in row order."""

    def launch(self, iteration: Iteration) -> Callable[[], list[int]]:
        """Begin to compute the iteration, here to the end; return a call that waits for its ids."""
        ids = self.generate(iteration)
        return lambda: ids
