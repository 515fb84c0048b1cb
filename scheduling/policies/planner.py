"""The planner of `dynamic`: which rows are computed, which requests join, which rows give way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from scheduling.inference import Inference
from scheduling.policies.base import Plan, View, tokens_to_compute

Victim = Literal["newest", "least_computed", "most_computed"]
# of rows in order, the one that gives way; of equals the newest
VICTIMS: dict[Victim, Callable[[Sequence[Inference]], Inference]] = {
    "newest": lambda rows: rows[-1],
    "least_computed": lambda rows: min(reversed(rows), key=lambda row: row.computed),
    "most_computed": lambda rows: max(reversed(rows), key=lambda row: row.computed),
}


class Planner:
    """A plan while it is made.

    needed: tokens for which a request must find KV blocks before it joins: all that it may come to
    (Orca), or, `on_demand`, those known so far (vLLM; Kwon et al., SOSP 2023, section 4.5). Then
    rows get blocks as they fill them, `spare` blocks stay free while anything runs, and a row that
    finds no block takes those of a `victim`, which may be itself.
    """

    def __init__(
        self,
        view: View,
        needed: Callable[[Inference], int],
        *,
        on_demand: bool = False,
        spare: int = 0,
        victim: Victim = "newest",
        counts_decoded: bool = False,
    ):
        self.view = view
        self.account = view.account()
        self.budget = view.limits.token_budget
        self.on_demand = on_demand
        self._needed, self._spare, self._victim = needed, spare, victim
        self._counts_decoded = counts_decoded
        self._run: dict[int, tuple[Inference, int]] = {}
        self._preempted: list[Inference] = []
        self._admit: list[tuple[Inference, int]] = []
        self._gone: set[int] = set()  # ids of preempted ones

    def plan(self) -> Plan:
        """Compute all rows, and let waiting requests join, the first in the order first, until one
        does not fit. None joins in an iteration in which a row gave way.

        On demand the first row in the order is never a victim, so that something always progresses.
        """
        view, size, run = self.view, self.view.limits.block_size, self._run
        free, whole = not self._counts_decoded, not self.on_demand
        self.rows: Collection[Inference] = view.running
        if self.on_demand:
            self.rows = sorted(view.running, key=self._rank_and_turn)
        for inference in self.rows:
            has_block = whole or inference.computed < len(inference.blocks) * size
            if free and has_block and inference.decodes and not self._gone:
                run[inference.id] = inference, 1  # most rows
            else:
                self.compute(inference)
        free_rows = view.limits.max_batch_size - len(view.running)
        waiting = view.waiting
        if free_rows and len(waiting) and not self._preempted:
            for inference in waiting:
                if (self.on_demand and not self.budget) or not self.join(inference):
                    break
                free_rows -= 1
                if not free_rows:
                    break
        return self.result()

    def result(self) -> Plan:
        reason = "join" if self._admit else ""
        return Plan(self._preempted, self._admit, list(self._run.values()), reason=reason)

    def compute(self, inference: Inference) -> None:
        """Compute a running inference, as far as budget and blocks go."""
        account = self.account
        while inference.id not in self._gone:
            n = self._tokens(inference)
            if not n:
                return
            tokens = self._reserved(inference, n)
            if tokens > len(inference.blocks) * self.view.limits.block_size:
                account.take(inference, tokens)
            if account.free >= 0:
                self._run[inference.id] = inference, n
                self.budget -= self._charge(inference, n)
                return
            loser = self.victim_of_row()
            account.undo(inference, tokens)
            if loser is None:
                return
            self.preempt(loser)

    def join(self, inference: Inference) -> bool:
        """Admit a waiting inference, if there are blocks for it; return whether there were."""
        account, tokens = self.account, self._needed(inference)
        least = self._spare if self.view.running or self._admit else 0
        account.take(inference, tokens)
        while account.free < least:
            loser = self.victim_of_join(least)
            if loser is None:
                account.undo(inference, tokens)
                return False
            self.preempt(loser)
        n = tokens_to_compute(inference, self.view, self.budget)
        if self.on_demand:
            account.undo(inference, tokens)
            tokens = self._reserved(inference, n)
            account.take(inference, tokens)
        self._admit.append((inference, tokens))
        if n:
            self._run[inference.id] = inference, n
            self.budget -= n
        return True

    def preempt(self, loser: Inference) -> None:
        """Take the blocks of a row, which may have been planned already."""
        if loser.id in self._run:
            _, n = self._run.pop(loser.id)
            self.account.undo(loser, self._reserved(loser, n))
            self.budget += self._charge(loser, n)
        self.account.release(loser)
        self._gone.add(loser.id)
        self._preempted.append(loser)

    def victim_of_row(self) -> Inference | None:
        """Return the row to preempt for one that finds no block: of the last rank in the order."""
        _, *others = self.rows
        rows = [row for row in others if row.id not in self._gone]
        last, *_ = self._rank_and_turn(rows[-1])
        return VICTIMS[self._victim]([row for row in rows if self._rank_and_turn(row)[0] == last])

    def victim_of_join(self, least: int) -> Inference | None:
        """Return the row to preempt until `least` blocks are free for one that joins: none."""
        return None

    def _tokens(self, inference: Inference) -> int:
        if inference.decodes and not self._counts_decoded:
            return 1
        return tokens_to_compute(inference, self.view, self.budget)

    def _charge(self, inference: Inference, n: int) -> int:
        return 0 if inference.decodes and not self._counts_decoded else n

    def _reserved(self, inference: Inference, n: int) -> int:
        """Return how many tokens it has KV blocks for once n more are computed."""
        found = 0 if inference.decodes else self.view.cached_tokens(inference)
        return inference.computed + n + found

    def _rank_and_turn(self, inference: Inference) -> tuple[Any, ...]:
        """Return the place of a row in the order, its rank first. Overdue ones have the first rank,
        so that no later arrival takes their blocks.
        """
        if self.view.order.is_overdue(inference, self.view.now):
            return (False,), inference.id
        rank, *others = inference.standing.key
        return (True, rank), *others
