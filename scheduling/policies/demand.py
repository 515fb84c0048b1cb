"""KV blocks on demand: a row gets blocks as it fills them, and when none is free a row is preempted
(vLLM; Kwon et al., SOSP 2023, section 4.5: preemption by recomputation).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from scheduling.inference import Inference
from scheduling.policies.base import Order
from scheduling.policies.planner import Planner

BY_TURN: Callable[[Inference], Any] = attrgetter("standing.key")


class PlannerOnDemand(Planner):
    """Planner of rows that get blocks as they fill them. A row for which none is free takes those
    of a victim, which may be the row itself; the first row in the order is never a victim, so that
    something always progresses.

    No request joins in an iteration in which a row is preempted. Joining leaves `spare` blocks free
    while anything runs.
    """

    def compute_rows(self) -> None:
        never_overdue = type(self.view.order).is_overdue is Order.is_overdue
        turn = BY_TURN if never_overdue else self._rank_and_turn  # the same, but faster
        self.rows = sorted(self.view.running, key=turn)
        size, decodes = self.view.limits.block_size, self.share.decodes
        run, preempted, counted = self.run, self.preempted, int(self._counts_decoded)
        for inference in self.rows:
            has_block = inference.computed < len(inference.blocks) * size
            within = self.budget >= counted
            if decodes and within and has_block and inference.decodes and not preempted:
                run[inference.id] = inference, 1  # most rows
                self.budget -= counted
            else:
                self.compute(inference)

    def compute(self, inference: Inference) -> None:
        """Compute a running inference, as far as budget and blocks go."""
        account, size = self.account, self.view.limits.block_size
        while inference.id not in self.preempted:
            n = self.tokens(inference)
            if not n:
                return
            tokens = self._reserved(inference, n)
            if tokens > len(inference.blocks) * size:
                account.take(inference, tokens)
            if account.free >= 0:
                self.spend(inference, n)
                return
            victim = self.victim_of_row()
            account.undo(inference, tokens)
            if victim is None:
                return
            self.preempt(victim)

    def join(self, inference: Inference) -> bool:
        return bool(self.prompts_left) and super().join(inference)

    def make_room(self, inference: Inference) -> bool:
        return self.account.free >= self.least

    @property
    def least(self) -> int:
        """Blocks that stay free when a request joins."""
        return self._spare if self.view.running or self.admit else 0

    def reserve(self, inference: Inference, n: int) -> int:
        if not self._on_demand:
            return super().reserve(inference, n)
        self.account.undo(inference, self._needed(inference))
        tokens = self._reserved(inference, n)
        self.account.take(inference, tokens)
        return tokens

    def preempt(self, victim: Inference) -> None:
        """Take the blocks of a row, which may have been planned already."""
        if victim.id in self.run:
            _, n = self.run.pop(victim.id)
            self.account.undo(victim, self._reserved(victim, n))
            self.charge(victim, -n)
        self.account.release(victim)
        self.preempted[victim.id] = victim

    def victim_of_row(self) -> Inference | None:
        """Return the row to preempt for one without a block: of the last rank in the order."""
        rows = [row for row in self.rows[1:] if row.id not in self.preempted]
        last, *_ = self._rank_and_turn(rows[-1])
        return self.choose([row for row in rows if self._rank_and_turn(row)[0] == last])

    def choose(self, rows: list[Inference]) -> Inference:
        """Return the victim's choice. Raises ValueError if it is none of the rows."""
        chosen = self.view.victim.choose(rows, self.view)
        if not any(chosen is row for row in rows):
            raise ValueError(f"{self.view.victim} chose {chosen!r:.60}; it returns one of the rows")
        return chosen

    def _reserved(self, inference: Inference, n: int) -> int:
        """Return how many tokens it has KV blocks for once n more are computed."""
        cached = 0 if inference.decodes else self.view.cached_tokens(inference)
        return inference.computed + n + cached

    def _rank_and_turn(self, inference: Inference) -> tuple[Any, ...]:
        """Return the place of a row in the order, its rank first. Overdue rows have the first rank,
        so that no later arrival takes their blocks.
        """
        if self.view.order.is_overdue(inference, self.view.now):
            return (False,), inference.id
        rank, *others = inference.standing.key
        return (True, rank), *others
