"""Orders that pause rows: every iteration those are computed whose turn it is, and the others keep
their KV blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from scheduling.policies.base import Account, Plan, View, setting, tokens_to_compute
from scheduling.policies.demand import VICTIMS, Victim, tokens_held
from scheduling.policies.orders import Bounded, ByWork

if TYPE_CHECKING:
    from scheduling.inference import Inference
    from scheduling.queue import Queue


@dataclass(frozen=True)
class Srpt(ByWork):
    """Shortest remaining processing time: by predicted completion tokens that are left, at least
    one, and by what is left of the prompt; after a preemption that is all that it took. A long
    request may starve.
    """

    in_order: ClassVar[bool] = False
    preemptive: ClassVar[bool] = True

    def key(self, inference: Inference) -> float:
        if inference.admitted_at is None:
            return self.work(inference)
        left = max(1, inference.standing.predicted_tokens - len(inference.tokens))
        return left + (0 if inference.decodes else self.prefill_weight * inference.uncomputed)


@dataclass(slots=True)
class Level:
    """Level of an inference, with the tokens computed there, and since when."""

    number: int
    since: float
    tokens: int = 0


@dataclass(frozen=True)
class Mlfq(Bounded):
    """Skip-join multi-level feedback queue (FastServe; Wu et al., arXiv 2305.05920, section 4.1),
    which knows no lengths.

    Level i has a quantum of mlfq_quantum · 2^i tokens. A request enters the first level whose
    quantum holds its prompt, falls a level when it has computed its quantum there, and returns to
    the first one when it was not computed for `max_wait_s`. Recomputed tokens use nothing up, so
    that who is preempted progresses.
    """

    preemptive: ClassVar[bool] = True
    mlfq_quantum: int = setting(
        8, "tokens of the first level; the next one has twice as many", ge=1
    )
    mlfq_levels: int = setting(6, "levels", ge=1, le=32)

    def arrive(self, group: Sequence[Inference], processed: int) -> None:
        prompt = max(len(member.prompt_ids) for member in group)
        fitting = (i for i in range(self.mlfq_levels) if self.quantum(i) >= prompt)
        level = next(fitting, self.mlfq_levels - 1)
        for member in group:
            member.standing.state = Level(level, since=member.arrived_at)

    def key(self, inference: Inference) -> tuple[int, float]:
        level: Level = inference.standing.state
        return level.number, level.since

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        return self._others(queue, view)  # who has waited for long has the first level's turn

    @property
    def promote_after_s(self) -> float | None:
        return self.max_wait_s

    def quantum(self, level: int) -> int:
        return self.mlfq_quantum << level

    def computed(self, inference: Inference, tokens: int, now: float) -> None:
        level: Level = inference.standing.state
        level.tokens += tokens
        last = level.number == self.mlfq_levels - 1
        if not last and level.tokens >= self.quantum(level.number):
            inference.standing.state = Level(level.number + 1, since=now)

    def promote(self, inference: Inference, now: float) -> None:
        if inference.standing.state.number:  # in the first level it is ahead of later arrivals
            inference.standing.state = Level(0, since=now)


def by_turns(
    view: View, on_demand: bool, victim: Victim, watermark: float, counts_decoded: bool
) -> Plan:
    """Compute the max_batch_size whose turn it is, of those that run and of those that wait; the
    others are paused.

    Who waits joins when its turn comes and its KV blocks are free: those of its whole life, or, on
    demand, of what is known of it besides the `watermark`; nobody who waits overtakes one that does
    not fit, or gave way. On demand, whoever needs blocks takes those of a victim among those that
    run and whose turn comes later, as in `demand`; who finds none is paused. `counts_decoded`: see
    share_budget.
    """
    turns, turn = _Turns(view, on_demand, victim, watermark, counts_decoded), view.order.turn
    running = heapq.merge(sorted(view.rows, key=turn), view.paused, key=turn)
    waiting = iter(view.waiting)
    runs, waits = next(running, None), next(waiting, None)
    while len(turns.plan.run) < view.limits.max_batch_size:
        if not turns.budget:
            waits = None
        if waits is not None and (runs is None or turn(waits) < turn(runs)):
            waits = next(waiting, None) if turns.join(waits) else None
        elif runs is not None:
            turns.compute(runs)
            runs = next(running, None)
        else:
            break
    return turns.plan


class _Turns:
    """A plan while it is made, in the order of turns."""

    def __init__(
        self, view: View, on_demand: bool, victim: Victim, watermark: float, counts_decoded: bool
    ):
        self.plan = Plan()
        self.budget = view.limits.token_budget
        self._view, self._account = view, Account(view)
        self._on_demand, self._victim, self._counts_decoded = on_demand, victim, counts_decoded
        self._spare = int(watermark * view.n_blocks) if on_demand else 0
        self._passed: set[int] = set()  # of those that run, who had its turn or gave way

    def join(self, inference: Inference) -> bool:
        """Admit one that waits, if there are blocks for it."""
        view, account = self._view, self._account
        turn = view.order.turn
        if any(turn(loser) < turn(inference) for loser in self.plan.preempt):
            return False
        needed = inference.uncomputed if self._on_demand else inference.total_tokens
        account.take(inference, needed)
        if not self._make_room(self._spare if self.plan.run or view.running else 0):
            account.undo(inference, needed)
            return False
        n = tokens_to_compute(inference, view, self.budget)
        if self._on_demand:
            account.undo(inference, needed)
            needed = tokens_held(inference, n, view)
            account.take(inference, needed)
        self.plan.admit.append((inference, needed))
        self.plan.reason = "join"
        if n:
            self.plan.run.append((inference, n))
            self.budget -= n
        return True

    def compute(self, inference: Inference) -> None:
        """Compute one that runs, if it did not give way, and there are budget and blocks for it."""
        if inference.id in self._passed:
            return
        self._passed.add(inference.id)
        view, account = self._view, self._account
        charged = self._counts_decoded or not inference.decodes
        n = tokens_to_compute(inference, view, self.budget) if charged else 1
        if not n:
            return
        tokens = tokens_held(inference, n, view)
        if tokens > len(inference.blocks) * view.limits.block_size:
            account.take(inference, tokens)
            if not self._make_room(0):
                account.undo(inference, tokens)
                return
        self.plan.run.append((inference, n))
        self.budget -= n if charged else 0

    def _make_room(self, least: int) -> bool:
        """See to so many free blocks, by those of rows whose turn comes later if that suffices."""
        account = self._account
        if account.free >= least:
            return True
        if not self._on_demand:
            return False
        later = [row for row in self._view.running if row.id not in self._passed]
        trial = account.copy()  # blocks that they share are not free before all have given them up
        for row in later:
            trial.give_up(row)
            if trial.free >= least:
                break
        else:
            return False
        later.sort(key=self._view.order.turn)
        while account.free < least:
            loser = VICTIMS[self._victim](later)
            later.remove(loser)
            account.give_up(loser)
            self.plan.preempt.append(loser)
            self._passed.add(loser.id)
        return True
