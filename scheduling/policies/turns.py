"""Orders that pause rows: every iteration those are computed whose turn it is, and the others keep
their KV blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from scheduling.policies.base import Account, Plan, View, setting, tokens_to_compute
from scheduling.policies.demand import Victim, held, victim_of
from scheduling.policies.orders import Bounded, Order

if TYPE_CHECKING:
    from scheduling.inference import Inference
    from scheduling.queue import Queue


@dataclass(frozen=True)
class Srpt(Order):
    """Shortest remaining processing time: by predicted completion tokens that are left, at least
    one. A long request may starve.
    """

    in_order: ClassVar[bool] = False
    preemptive: ClassVar[bool] = True
    by_length: ClassVar[bool] = True

    def key(self, inference: Inference) -> int:
        return max(1, inference.predicted_tokens - len(inference.tokens))


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

    def arrive(self, group: Sequence[Inference]) -> None:
        prompt = max(len(member.prompt_ids) for member in group)
        fitting = (i for i in range(self.mlfq_levels) if self.quantum(i) >= prompt)
        level = next(fitting, self.mlfq_levels - 1)
        for member in group:
            member.level, member.level_at = level, member.arrived_at

    def key(self, inference: Inference) -> tuple[int, float]:
        return inference.level, inference.level_at

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        return self._others(queue, view)  # who has waited for long has the first level's turn

    @property
    def promote_after_s(self) -> float | None:
        return self.max_wait_s

    def quantum(self, level: int) -> int:
        return self.mlfq_quantum << level

    def computed(self, inference: Inference, tokens: int, now: float) -> None:
        inference.level_tokens += tokens
        last = inference.level == self.mlfq_levels - 1
        if not last and inference.level_tokens >= self.quantum(inference.level):
            inference.level += 1
            inference.level_tokens, inference.level_at = 0, now

    def promote(self, inference: Inference, now: float) -> None:
        if inference.level == 0:  # it is there, and before those that come now
            return
        inference.level, inference.level_tokens, inference.level_at = 0, 0, now


def by_turns(
    view: View, on_demand: bool, victim: Victim, watermark: float, counts_decoded: bool
) -> Plan:
    """Compute the max_batch_size whose turn it is, of those that run and of those that wait; the
    others are paused.

    Who waits joins when its turn comes and its KV blocks are free: those of its whole life, or, on
    demand, of what is known of it besides the `watermark`; nobody who waits overtakes one that does
    not fit. On demand, whoever needs blocks takes those of a victim among those that run and whose
    turn comes later, as in `demand`; who finds none is paused. `counts_decoded`: see share_budget.
    """
    limits, plan, account, turn = view.limits, Plan(), Account(view), view.order.turn
    budget = limits.token_budget
    spare = int(watermark * view.n_blocks)
    passed: set[int] = set()  # had their turn, or gave way
    rows = sorted(view.rows, key=turn)
    running = (i for i in heapq.merge(rows, view.paused, key=turn) if i.id not in passed)
    waiting = iter(view.waiting)

    def make_room(least: int) -> bool:
        """Take blocks of those whose turn comes later, if they have enough."""
        if account.free >= least:
            return True
        later = sorted((i for i in view.running if i.id not in passed), key=turn)
        trial = account.copy()  # blocks that they share are not free before all have given them up
        for loser in later if on_demand else ():
            trial.give_up(loser)
        if trial.free < least:
            return False
        while account.free < least and later:
            loser = victim_of(later, victim)
            later.remove(loser)
            account.give_up(loser)
            plan.preempt.append(loser)
            passed.add(loser.id)
        return account.free >= least

    next_running, next_waiting = next(running, None), next(waiting, None)
    while len(plan.run) < limits.max_batch_size:
        if next_waiting is not None and not budget:
            next_waiting = None
        if next_running is not None and next_running.id in passed:
            next_running = next(running, None)
        elif next_waiting is not None and (
            next_running is None or turn(next_waiting) < turn(next_running)
        ):
            inference, known = next_waiting, next_waiting.uncomputed
            needed = known if on_demand else inference.whole_life
            account.take(inference, needed)
            fits = make_room(spare if on_demand and (plan.run or view.running) else 0)
            if not fits:
                account.undo(inference, needed)
                next_waiting = None
                continue
            n = tokens_to_compute(inference, view, budget)
            if on_demand:
                account.undo(inference, needed)
                needed = held(inference, n, view)
                account.take(inference, needed)
            plan.admit.append((inference, needed))
            if n:
                plan.run.append((inference, n))
                budget -= n
            next_waiting = next(waiting, None)
        elif next_running is not None:
            inference = next_running
            passed.add(inference.id)
            charged = counts_decoded or not inference.decodes
            n = tokens_to_compute(inference, view, budget) if charged else 1
            if n:
                tokens = held(inference, n, view)
                grows = tokens > len(inference.blocks) * limits.block_size
                if grows:
                    account.take(inference, tokens)
                if not grows or make_room(0):
                    plan.run.append((inference, n))
                    budget -= n if charged else 0
                else:
                    account.undo(inference, tokens)
            next_running = next(running, None)
        else:
            break
    plan.reason = "join" if plan.admit else ""
    return plan
