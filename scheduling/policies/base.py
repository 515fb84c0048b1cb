"""The seam between deciding and doing: what a policy may know (`View`), and what it says (`Plan`).

A policy is a pure function of a `View`: it reads no clock, holds no lock and keeps no state, so the
same code runs in the server, in tests in virtual time, and in a simulator. What it returns the
`Scheduler` checks, and carries out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from scheduling.inference import Inference


@dataclass(frozen=True, slots=True)
class Limits:
    """What no plan may go beyond."""

    max_batch_size: int  # rows
    token_budget: int  # tokens an iteration, of those that the policy charges
    block_size: int  # tokens in a KV block

    def blocks(self, tokens: int) -> int:
        """KV blocks that hold so many tokens."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class View:
    """What a policy may know. Time is in seconds on the scheduler's clock, KV is
    counted in blocks.
    """

    now: float
    waiting: Collection[Inference]  # by the order's key
    running: Collection[Inference]  # in admission order; in a request-level batch, held ones too
    free_blocks: int
    n_blocks: int  # in the pool
    limits: Limits
    oldest_arrival: float | None  # of those that wait, whatever their order


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

    def most_rows(self, max_batch_size: int) -> int:
        """Rows of a batch at most."""
        return max_batch_size

    def warnings(self, max_batch_size: int) -> list[str]:
        """What a user who chose these settings should know."""
        return []

    def charged(self, inference: Inference) -> bool:
        """Whether its next tokens count against `token_budget`; the scheduler checks that they keep
        to it.
        """
        return prefills(inference)

    def plan(self, view: View) -> Plan:
        raise NotImplementedError


def prefills(inference: Inference) -> bool:
    """It computes a prompt, or what preemption took; else a token at a time."""
    return not (inference.decodes or inference.is_over)


def share_budget(
    rows: Iterable[Inference],
    token_budget: int,
    charged: Callable[[Inference], bool] = prefills,
) -> list[tuple[Inference, int]]:
    """Share `token_budget` among those that it is charged for, in row order: prompts, so that a
    long one cannot stall the rows that decode, which get their one token each.

    A prompt longer than what is left is computed in chunks; a row that gets nothing sits this
    iteration out.
    """
    run = []
    for inference in rows:
        if not charged(inference):
            run.append((inference, 1))
        elif token_budget:
            n = min(inference.uncomputed, token_budget)
            token_budget -= n
            run.append((inference, n))
    return run


def start(
    admit: Iterable[Inference],
    view: View,
    reason: str,
    charged: Callable[[Inference], bool] = prefills,
) -> Plan:
    """Admit these, each with blocks for its whole life (Orca), and compute all that run."""
    admitted = [(inference, inference.whole_life) for inference in admit]
    rows = chain(view.running, (inference for inference, _ in admitted))
    run = share_budget(rows, view.limits.token_budget, charged)
    return Plan(admit=admitted, run=run, reason=reason if admitted else "")


def whole_groups(view: View, rows: int) -> list[Inference]:
    """Take from the head of the queue, never splitting a group; stop at the first that does not
    fit.
    """
    taken: list[Inference] = []
    blocks = view.free_blocks
    for _, members in groupby(view.waiting, key=lambda inference: inference.group):
        group = list(members)
        needed = sum(view.limits.blocks(inference.whole_life) for inference in group)
        if len(taken) + len(group) > rows or needed > blocks:
            break
        blocks -= needed
        taken += group
    return taken
