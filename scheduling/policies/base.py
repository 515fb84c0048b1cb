"""The seam between deciding and doing: what a policy may know (`View`), and what it says (`Plan`).

A policy is a pure function of a `View`: it reads no clock, holds no lock and keeps no state, so the
same code runs in the server, in tests in virtual time, and in a simulator. What it returns the
`Scheduler` checks, and carries out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from scheduling.inference import Inference
    from scheduling.ledger import Ledger
    from scheduling.policies.orders import Order
    from scheduling.queue import Queue


@dataclass(frozen=True, slots=True)
class Limits:
    """What no plan may go beyond."""

    max_batch_size: int  # rows
    token_budget: int  # tokens an iteration, of those that the policy charges
    block_size: int  # tokens in a KV block

    def blocks(self, tokens: int) -> int:
        """KV blocks that hold so many tokens."""
        return -(-tokens // self.block_size)


class Waiting(Iterable["Inference"]):
    """Those of a queue that wait, in the order; looked for when somebody iterates, since most
    iterations have no row free.
    """

    def __init__(self, queue: Queue, view: View):
        self._queue, self._view = queue, view

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Inference]:
        return self._view.order.ordered(self._queue, self._view)

    @property
    def oldest(self) -> list[Inference]:
        """The request that came first, whatever the order; none if nobody waits."""
        return self._queue.oldest


class View(NamedTuple):
    """What a policy may know. Time is in seconds on the scheduler's clock, KV is
    counted in blocks.
    """

    now: float
    queues: Sequence[Queue]  # who waits; one, or one a bin
    running: Collection[Inference]  # in admission order; in a request-level batch, held ones too
    free_blocks: int
    n_blocks: int  # in the pool
    limits: Limits
    order: Order
    request_level: bool = False
    rows: Collection[Inference] = ()  # of those that run, who is not paused
    paused: Collection[Inference] = ()  # who is, in the order
    processed: int = 0  # prompt and completion tokens since the start
    ledger: Ledger | None = None  # what each user was served, for an order that goes by it
    # KV blocks that hold what an inference would compute next
    found: Callable[[Inference], Sequence[int]] = lambda inference: ()
    references: Sequence[int] = ()  # how many inferences have each block

    @property
    def waiting(self) -> Waiting:
        """Those that wait, in the order; in modes with bins those of the first."""
        return Waiting(self.queues[0], self)

    @property
    def bins(self) -> list[Waiting]:
        """Those that wait in each bin."""
        return [Waiting(queue, self) for queue in self.queues]

    def cached(self, inference: Inference) -> int:
        """Tokens that it need not compute, since they are found."""
        return len(self.found(inference)) * self.limits.block_size


class Account:
    """What a plan takes from the pool of KV blocks and gives back, reckoned before it is done."""

    def __init__(self, view: View):
        self.free = view.free_blocks  # below 0: the plan cannot be done
        self._view = view
        self._change: defaultdict[int, int] = defaultdict(int)  # of references, by block

    def copy(self) -> Account:
        other = Account(self._view)
        other.free, other._change = self.free, self._change.copy()
        return other

    def take(self, inference: Inference, tokens: int) -> None:
        """It gets the blocks that are found for it, and blocks of its own for the rest of so many
        tokens.
        """
        found, swapped, own = self._needs(inference, tokens)
        self._refer(found)
        self._drop(swapped)
        self.free -= own

    def undo(self, inference: Inference, tokens: int) -> None:
        """Take that back."""
        found, swapped, own = self._needs(inference, tokens)
        self.free += own
        self._refer(swapped)
        self._drop(found)

    def give_up(self, inference: Inference) -> None:
        """It gives back what it has."""
        self._drop(inference.blocks)

    def _needs(self, inference: Inference, tokens: int) -> tuple[Sequence[int], Sequence[int], int]:
        """What is found, which of its own blocks that replaces, and how many more it needs."""
        found, held = self._view.found(inference), len(inference.blocks)
        end = inference.num_cached_blocks + len(found) if found else 0
        own = max(0, self._view.limits.blocks(tokens) - max(held, end))
        return found, inference.blocks[inference.num_cached_blocks : end] if found else (), own

    def _refer(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.free -= self._view.references[block] + self._change[block] == 0
            self._change[block] += 1

    def _drop(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._change[block] -= 1
            self.free += self._view.references[block] + self._change[block] == 0


@dataclass(slots=True)
class Plan:
    """What to do next, in this order: who gives way, whom to admit, what to compute; and when to
    look again.
    """

    # they wait again, and their KV is computed again
    preempt: list[Inference] = field(default_factory=list)
    # (inference, tokens to reserve KV blocks for)
    admit: list[tuple[Inference, int]] = field(default_factory=list)
    # (inference, tokens to compute); a row that has too few KV blocks for them gets more
    run: list[tuple[Inference, int]] = field(default_factory=list)
    wake_at: float | None = None  # if there is nothing to do
    reason: str = ""  # why this batch was formed; empty when nobody was admitted
    # if all of its rows get a token, the next plans compute the same ones, a token each, whatever
    # the time, until somebody ends, leaves or comes; with `closed` also if somebody comes
    holds: bool = False
    closed: bool = False


def setting(
    default: Any,
    meaning: str,
    shown: str | None = None,
    needs: tuple[str, Any] | None = None,
    **limits: Any,
) -> Any:
    """A field of a policy, which is a setting of the server: its default, its meaning, and
    pydantic's limits of it.

    shown: the default in words. needs: another setting, and the value of it without which this one
    has no meaning.
    """
    told = {"meaning": meaning, "shown": shown or str(default), "needs": needs, "limits": limits}
    return field(default=default, metadata=told)


@dataclass(frozen=True)
class Policy:
    """Which inferences run in the next iteration, and who may join. Its fields are settings of the
    modes that have them.

    `request_level`: a batch is answered as a whole, so that rows which have all their tokens are
    held until the longest is done; the prompts of one request are never split over two batches.
    """

    request_level: ClassVar[bool] = False
    in_order: ClassVar[bool] = True  # admits nobody before one that goes before in the order

    @property
    def n_bins(self) -> int:
        """Queues that those who wait are put into, by the length that is predicted for them."""
        return 1

    def max_rows(self, max_batch_size: int) -> int:
        """Rows of a batch at most."""
        return max_batch_size

    def warnings(self, max_batch_size: int) -> list[str]:
        """What a user who chose these settings should know."""
        return []

    @property
    def counts_decoded(self) -> bool:
        """Whether decoded tokens count against `token_budget`, too; the scheduler checks that plans
        keep to it.
        """
        return False

    def plan(self, view: View) -> Plan:
        raise NotImplementedError


def prefills(inference: Inference) -> bool:
    """It computes a prompt, or what preemption took; else a token at a time."""
    return not (inference.decodes or inference.is_over)


def tokens_to_compute(inference: Inference, view: View, token_budget: int) -> int:
    """What is uncomputed and not found, as far as the budget goes; nothing while it waits for the
    first completion of its prompt.
    """
    if inference.awaits_leader(view.limits.block_size):
        return 0
    return min(inference.uncomputed - view.cached(inference), token_budget)


def share_budget(
    rows: Iterable[Inference], view: View, counts_decoded: bool = False
) -> list[tuple[Inference, int]]:
    """Give rows that decode, or are idle, their one token, and share the token budget among prompts
    in row order; with `counts_decoded` among all.

    A prompt longer than what is left is computed in chunks; a row that gets nothing sits this
    iteration out. So a long prompt cannot stall the rows that decode.
    """
    run, budget = [], view.limits.token_budget
    for inference in rows:
        if not counts_decoded and (inference.decodes or inference.is_over):
            run.append((inference, 1))
        elif n := tokens_to_compute(inference, view, budget):
            run.append((inference, n))
            budget -= n
    return run


def start(
    admit: Iterable[Inference], view: View, reason: str, counts_decoded: bool = False
) -> Plan:
    """Admit these, each with blocks for its whole life (Orca), and compute all that run, which
    nobody joins before one of them ends.
    """
    admitted = [(inference, inference.total_tokens) for inference in admit]
    rows = chain(view.running, (inference for inference, _ in admitted))
    run = share_budget(rows, view, counts_decoded)
    everybody = len(run) == len(view.running) + len(admitted)
    return Plan(
        admit=admitted,
        run=run,
        reason=reason if admitted else "",
        holds=everybody,
        closed=everybody,
    )


def go_on(rows: Iterable[Inference], view: View) -> Plan:
    """Compute these, which nobody joins."""
    return Plan(run=share_budget(rows, view), holds=True, closed=True)


def whole_groups(
    view: View,
    rows: int,
    waiting: Iterable[Inference] | None = None,
    first: Sequence[Inference] = (),
) -> list[Inference]:
    """Take `first`, if it is given, and then from the head of those that wait, or of a bin of them,
    never splitting a group; stop at the first that does not fit.
    """
    taken: list[Inference] = []
    account = Account(view)
    mine = {inference.id for inference in first}
    queue = view.waiting if waiting is None else waiting
    queue = chain(first, (inference for inference in queue if inference.id not in mine))
    for _, members in groupby(queue, key=lambda inference: inference.group):
        group = list(members)
        if len(taken) + len(group) > rows:
            break
        for inference in group:
            account.take(inference, inference.total_tokens)
        if account.free < 0:
            break
        taken += group
    return taken
