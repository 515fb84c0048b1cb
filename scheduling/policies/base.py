"""The interface between deciding and doing: a policy is given a `View` and returns a `Plan`.

A policy is a pure function of the view: it reads no clock, holds no lock and keeps no state, so the
same code runs in the server, in tests in virtual time, and in a simulator. The `Scheduler` checks
each plan, and carries it out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any, ClassVar, NamedTuple

from scheduling.adapters import Adapters
from scheduling.history import Memory
from scheduling.inference import Inference
from scheduling.ledger import Ledger
from scheduling.prefix_cache import Account, Find, PrefixCache
from scheduling.queue import Queue
from scheduling.speculation import Speculation


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of every plan, and of what may be in flight."""

    max_batch_size: int  # rows
    token_budget: int  # tokens an iteration, of those that the policy charges
    block_size: int  # tokens in a KV block
    max_in_flight: int = 10**9  # requests, waiting ones too
    # decode rows alone are filled up with padding rows to the smallest of these that holds them
    decoder_batch_sizes: Sequence[int] = ()  # ascending
    padded: str = ""  # rectangles of rows that are filled up: see `padding.rectangles`

    def blocks(self, tokens: int) -> int:
        """Return how many KV blocks hold so many tokens."""
        return -(-tokens // self.block_size)


class View(NamedTuple):
    """Everything a policy may know. Time is in seconds on the scheduler's clock."""

    now: float
    queues: Sequence[Queue]  # waiting requests; one queue, or one for each bin
    running: Collection[Inference]  # in admission order; in a request-level batch, held ones too
    pool: PrefixCache
    find: Find  # cached KV blocks of what an inference would compute next
    limits: Limits
    order: Order
    victim: Victim
    request_level: bool = False
    rows: Collection[Inference] = ()  # running ones that are not paused
    paused: Collection[Inference] = ()  # running ones that are, in the order
    processed: int = 0  # prompt and completion tokens since the start
    ledger: Ledger | None = None  # service of each user, for orders by user
    memories: Mapping[type[Memory], Any] = {}  # what rules remember of earlier iterations
    speculation: Speculation | None = None  # adds draft tokens to rows of the plan
    adapters: Adapters | None = None  # which have the slots of the engine

    @property
    def waiting(self) -> Iterator[Inference]:
        """Waiting requests in the order, bin by bin in modes that have several."""
        ordered = (self.order.ordered(queue, self) for queue in self.queues)
        return self.joining(chain.from_iterable(ordered))

    def joining(self, waiting: Iterator[Inference]) -> Iterator[Inference]:
        """Return those that get a slot for their adapter if all before them join."""
        if self.adapters is None:
            return waiting
        return self.adapters.joining(waiting, self.running, self.now)

    def account(self) -> Account:
        """Return an account of the KV blocks, to plan with."""
        return Account(self.pool, self.find)

    def cached_tokens(self, inference: Inference) -> int:
        """Return how many tokens an inference need not compute, since they are cached."""
        return len(self.find(inference)) * self.limits.block_size

    def own_blocks(self, inference: Inference) -> int:
        """Return how many KV blocks it has that no other inference shares."""
        return [self.pool.references[block] for block in inference.blocks].count(1)


@dataclass(slots=True)
class Plan:
    """Preemptions, admissions and rows, carried out in this order; and when to plan again."""

    preempt: list[Inference] = field(default_factory=list)  # wait again, to be recomputed
    # (inference, tokens to reserve KV blocks for)
    admit: list[tuple[Inference, int]] = field(default_factory=list)
    # (inference, tokens to compute); a row with too few KV blocks for them gets more
    run: list[tuple[Inference, int]] = field(default_factory=list)
    wake_at: float | None = None  # if there is nothing to do
    reason: str = ""  # why this batch was formed; empty when none was admitted
    short_of_blocks: bool = False  # rows were free for waiting requests, and KV blocks were not


# limits of a setting in seconds, say
POSITIVE: dict[str, Any] = {"gt": 0, "le": 1e9, "allow_inf_nan": False}
NOT_NEGATIVE: dict[str, Any] = {"ge": 0, "le": 1e9, "allow_inf_nan": False}


def setting(
    default: Any,
    meaning: str,
    shown: str | None = None,
    needs: tuple[str, Any] | None = None,
    **limits: Any,
) -> Any:
    """Return a field of a policy that is a setting of the server.

    shown: the default in words. needs: another setting and the value of it without which this one
    has no meaning. limits: pydantic's.
    """
    metadata = {"meaning": meaning, "shown": shown or str(default), "needs": needs}
    return field(default=default, metadata=metadata | {"limits": limits})


class Rule:
    """A policy, an order or a victim. Its fields are settings."""

    @property
    def remembers(self) -> Sequence[type[Memory]]:
        """What it reads in the view's `memories`."""
        return ()


@dataclass(frozen=True)
class Policy(Rule):
    """Which inferences run in the next iteration, and which may join.

    `request_level`: a batch is answered as a whole, so that rows which have all their tokens are
    held until the longest is done; the prompts of one request are never split over two batches.
    """

    request_level: ClassVar[bool] = False
    in_order: ClassVar[bool] = True  # no request overtakes an earlier one in the order

    @property
    def repeats(self) -> bool:
        """Whether plans compute what runs, a token each, until a row ends, a request joins, which
        none does in a batch, or no KV block is free for a row that is `on_demand`. Not inherited: a
        class that does not say so is simulated step by step.
        """
        return False

    @property
    def on_demand(self) -> bool:
        """True if rows get KV blocks as they fill them."""
        return False

    @property
    def by_turn(self) -> bool:
        """True if running rows are computed in the order of their turns, and not as they joined."""
        return self.on_demand

    @property
    def n_bins(self) -> int:
        """Number of queues, into which requests are put by their predicted length."""
        return 1

    def max_rows(self, max_batch_size: int) -> int:
        """Return the most rows that a batch can have."""
        return max_batch_size

    def warnings(self, max_batch_size: int) -> list[str]:
        """Return sentences that a user who chose these settings should read."""
        return []

    @property
    def counts_decoded(self) -> bool:
        """True if decoded tokens count against `token_budget`, too."""
        return False

    def plan(self, view: View) -> Plan:
        raise NotImplementedError


@dataclass(frozen=True)
class Order(Rule):
    """Waiting requests go by `turn`, smallest first, which does not change while they wait, unless
    `ordered` says otherwise. Fields are settings.

    `in_order`: no request is admitted before an earlier one. `preemptive`: rows go by their turn,
    too, and those beyond max_batch_size are paused. `by_user`: it goes by the view's ledger.
    `by_length`: by predicted lengths. `by_service`: by what the server has computed, so that each
    iteration may change it.
    """

    in_order: ClassVar[bool] = True
    preemptive: ClassVar[bool] = False
    by_user: ClassVar[bool] = False
    by_length: ClassVar[bool] = False
    by_service: ClassVar[bool] = False

    @property
    def queue_policies(self) -> Mapping[int, Any]:
        """Policies of the levels that have one."""
        return {}

    @property
    def weights(self) -> Mapping[str, float]:
        """Weights of users, 1 for all others."""
        return {}

    @property
    def promote_after_s(self) -> float | None:
        """Time without being computed after which an inference is promoted."""
        return None

    def check(self, group: Sequence[Inference]) -> None:
        """Raise InvalidRequest for a request that the order cannot place."""

    def arrive(self, group: Sequence[Inference], processed: int) -> None:
        """Note what the order needs of an arriving request. processed: all tokens so far."""

    def turn(self, inference: Inference) -> tuple[Any, ...]:
        """Return rank, key and id: of equals the first goes first, and groups stay together."""
        return self.rank(inference), self.key(inference), inference.id

    def place(self, inference: Inference) -> tuple[Any, ...]:
        """Return the turn, to sort by. Raises ValueError if it has a NaN, which sorts nowhere."""
        if _has_nan(turn := self.turn(inference)):
            raise ValueError(f"the key of a request is {turn}; NaN has no place in an order")
        return turn

    def rank(self, inference: Inference) -> Any:
        """Return what counts before the key; where blocks run out, the last rank is preempted."""
        return 0

    def key(self, inference: Inference) -> Any:
        return inference.arrived_at

    def is_overdue(self, inference: Inference, now: float) -> bool:
        """Return whether it has waited so long that only earlier arrivals go before it."""
        return False

    def computed(self, inference: Inference, tokens: int, now: float) -> None:
        """Note so many new tokens; may change its turn. Called for `preemptive` orders alone."""

    def delay(self, inference: Inference) -> None:
        """Put an inference behind all others of its level."""

    def promote(self, inference: Inference, now: float) -> None:
        """Give another turn to an inference that was not computed for `promote_after_s`."""

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        """Return the inferences of a queue, in the order."""
        return iter(queue.by_key.values())


@dataclass(frozen=True)
class Victim(Rule):
    """Which row is preempted where no KV block is free. A function of what it is given."""

    def choose(self, rows: Sequence[Inference], view: View) -> Inference:
        """Return one of these rows, one or more, which are in the order and of its last rank."""
        raise NotImplementedError


def _has_nan(key: Any) -> bool:
    return any(map(_has_nan, key)) if isinstance(key, tuple) else key != key


def prefills(inference: Inference) -> bool:
    """Return whether it computes a prompt, or recomputes after a preemption; else it decodes."""
    return not (inference.decodes or inference.is_over)


def tokens_to_compute(
    inference: Inference, view: View, budget: int, joining: Iterable[Inference]
) -> int:
    """Return how many tokens to compute, cached ones aside, as far as the budget goes; 0 while it
    waits for the first completion of its prompt. joining: what the plan admits.
    """
    if inference.awaits_leader(view.limits.block_size, joining):
        return 0
    return min(inference.uncomputed - view.cached_tokens(inference), budget)


def share_budget(rows: Iterable[Inference], view: View) -> list[tuple[Inference, int]]:
    """Give rows that decode, or are idle, their one token, and share the token budget among prompts
    in row order.

    A prompt longer than the rest of the budget is computed in chunks; a row that gets nothing sits
    this iteration out. So a long prompt cannot stall the rows that decode.
    """
    run, budget, rows = [], view.limits.token_budget, list(rows)
    for inference in rows:
        if inference.decodes or inference.is_over:
            run.append((inference, 1))
        elif n := tokens_to_compute(inference, view, budget, rows):
            run.append((inference, n))
            budget -= n
    return run


def start(admit: Iterable[Inference], view: View, reason: str) -> Plan:
    """Admit these, each with blocks for all its tokens (Orca), and compute all that run."""
    admitted = list(admit)
    return Plan(
        admit=[(inference, inference.total_tokens) for inference in admitted],
        run=share_budget(chain(view.running, admitted), view),
        reason=reason if admitted else "",
    )


def whole_groups(
    view: View, rows: int, queue: Queue | None = None, first: Sequence[Inference] = ()
) -> list[Inference]:
    """Take `first`, if given, and then waiting requests, or those of one queue, in the order; never
    split a group, and stop at the first that does not fit.
    """
    taken: list[Inference] = []
    account = view.account()
    chosen = {inference.id for inference in first}
    waiting = view.waiting if queue is None else view.order.ordered(queue, view)
    others = (inference for inference in waiting if inference.id not in chosen)
    for _, members in groupby(view.joining(chain(first, others)), key=lambda each: each.group):
        group = list(members)
        if len(taken) + len(group) > rows:
            break
        for inference in group:
            account.take(inference, inference.total_tokens)
        if account.free < 0:
            break
        taken += group
    return taken
