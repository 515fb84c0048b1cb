"""Orders that pause rows: those whose turn it is are computed, and the others keep their blocks."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from scheduling.inference import Inference
from scheduling.policies.base import View, setting
from scheduling.policies.demand import PlannerOnDemand
from scheduling.policies.orders import Bounded, ByWork
from scheduling.queue import Queue


@dataclass(frozen=True)
class Srpt(ByWork):
    """Shortest remaining processing time: remaining predicted tokens, at least one, and what is
    uncomputed of the prompt, or of what a preemption took. A long request may starve.
    """

    in_order: ClassVar[bool] = False
    preemptive: ClassVar[bool] = True

    def key(self, inference: Inference) -> float:
        if inference.admitted_at is None:
            return self.work(inference)
        remaining = max(1, inference.standing.predicted_tokens - len(inference.tokens))
        return remaining + (0 if inference.decodes else self.prefill_weight * inference.uncomputed)


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
    that a preempted one progresses.
    """

    preemptive: ClassVar[bool] = True
    mlfq_quantum: int = setting(
        8, "tokens that a request gets in the first level; twice as many in each next one", ge=1
    )
    levels: ClassVar[int] = 6

    def arrive(self, group: Sequence[Inference], processed: int) -> None:
        prompt = max(len(member.prompt_ids) for member in group)
        fitting = (i for i in range(self.levels) if self.quantum(i) >= prompt)
        level = next(fitting, self.levels - 1)
        for member in group:
            member.standing.state = Level(level, since=member.arrived_at)

    def key(self, inference: Inference) -> tuple[int, float]:
        level: Level = inference.standing.state
        return level.number, level.since

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        return self._others(queue, view)  # overdue ones are in the first level

    @property
    def promote_after_s(self) -> float | None:
        return self.max_wait_s

    def quantum(self, level: int) -> int:
        return self.mlfq_quantum << level

    def computed(self, inference: Inference, tokens: int, now: float) -> None:
        level: Level = inference.standing.state
        level.tokens += tokens
        last = level.number == self.levels - 1
        if not last and level.tokens >= self.quantum(level.number):
            inference.standing.state = Level(level.number + 1, since=now)

    def promote(self, inference: Inference, now: float) -> None:
        if inference.standing.state.number:  # in the first level it is ahead of later arrivals
            inference.standing.state = Level(0, since=now)


class PlannerByTurns(PlannerOnDemand):
    """Planner of the max_batch_size inferences that are first in the order, running or waiting; the
    other running ones are paused.

    A waiting request joins when its turn comes and its KV blocks are free; none overtakes one that
    does not fit, or was preempted. On demand, a row that needs blocks takes those of a victim whose
    turn is later; if there are not enough it is paused.
    """

    def compute_share(self) -> None:
        view, turn = self.view, self.view.order.turn
        self._passed: set[int] = set()  # running ones whose turn has come
        merged = heapq.merge(sorted(view.rows, key=turn), view.paused, key=turn)
        running = (row for row in merged if row.id not in self.preempted)
        waiting = view.waiting if self.share.prompts else iter(())
        row, request = next(running, None), next(waiting, None)
        left_out = 0  # rows whose turn it is, but not in the share
        while len(self.run) + left_out < view.limits.max_batch_size:
            if request is not None and (row is None or turn(request) < turn(row)):
                request = next(waiting, None) if self.join(request) else None
            elif row is not None:
                self._passed.add(row.id)
                self.compute(row)
                left_out += not (self.in_share(row) or self.awaits_leader(row))
                row = next(running, None)
            else:
                break

    def join(self, inference: Inference) -> bool:
        turn = self.view.order.turn
        if any(turn(victim) < turn(inference) for victim in self.preempted.values()):
            return False
        return super().join(inference)

    def make_room(self, inference: Inference) -> bool:
        """Preempt later rows for a joining request, unless it awaits its leader: it would compute
        nothing with their blocks, and one of them may be the leader's.
        """
        awaits = self.awaits_leader(inference)
        while not super().make_room(inference):
            victim = None if awaits else self._later_victim(self.least)
            if victim is None:
                return False
            self.preempt(victim)
        return True

    def awaits_leader(self, inference: Inference) -> bool:
        """Return whether it computes nothing in this iteration, so that it takes no row."""
        joining = (each for each, _ in self.admit)
        return inference.awaits_leader(self.view.limits.block_size, joining)

    def victim_of_row(self) -> Inference | None:
        return self._later_victim(0)

    def _later_victim(self, least: int) -> Inference | None:
        """Return a later row to preempt, if the blocks of all later ones suffice."""
        if not self._on_demand:
            return None
        aside = self._passed | self.preempted.keys()
        later = [row for row in self.view.running if row.id not in aside]
        trial = self.account.copy()  # shared blocks are not free before all have given them up
        for row in later:
            trial.release(row)
            if trial.free >= least:
                later.sort(key=self.view.order.turn)
                return self.choose(later)
        return None
