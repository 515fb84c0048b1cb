"""The planner of `dynamic`: which rows are computed, and which requests join them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from scheduling.inference import Inference
from scheduling.policies.base import Plan, View, tokens_to_compute

Victim = Literal["newest", "least_computed", "most_computed"]


class Planner:
    """A plan in the making.

    needed: returns for how many tokens KV blocks must be free before a request joins: all that it
    may come to (Orca), or those known so far (vLLM). counts_decoded: decoded tokens use the budget,
    too. `victim` and `spare`: of `PlannerOnDemand` and `PlannerByTurns`.
    """

    def __init__(
        self,
        view: View,
        needed: Callable[[Inference], int],
        counts_decoded: bool = False,
        victim: Victim | None = None,
        spare: int = 0,
    ):
        self.view = view
        self.account = view.account()
        self.budget = view.limits.token_budget
        self.run: dict[int, tuple[Inference, int]] = {}  # by id, with its tokens
        self.admit: list[tuple[Inference, int]] = []
        self.preempted: list[Inference] = []
        self._needed, self._counts_decoded = needed, counts_decoded
        self._victim, self._spare = victim, spare

    def plan(self) -> Plan:
        """Compute all rows, and let waiting requests join, the first in the order first, until one
        does not fit.
        """
        self.compute_rows()
        free_rows = self.view.limits.max_batch_size - len(self.view.running)
        if free_rows and len(self.view.queues[0]) and not self.preempted:
            for inference in self.view.waiting:
                if not self.join(inference) or len(self.admit) == free_rows:
                    break
        return self.result()

    def result(self) -> Plan:
        reason = "join" if self.admit else ""
        return Plan(self.preempted, self.admit, list(self.run.values()), reason=reason)

    def compute_rows(self) -> None:
        run, free = self.run, not self._counts_decoded
        for inference in self.view.running:
            if free and inference.decodes:
                run[inference.id] = inference, 1  # most rows
            else:
                self.compute(inference)

    def compute(self, inference: Inference) -> None:
        """Compute a running inference, as far as the budget goes."""
        if n := self.tokens(inference):
            self.spend(inference, n)

    def join(self, inference: Inference) -> bool:
        """Admit a waiting inference, if there are blocks for it; return whether there were."""
        tokens = self._needed(inference)
        self.account.take(inference, tokens)
        if not self.make_room():
            self.account.undo(inference, tokens)
            return False
        n = tokens_to_compute(inference, self.view, self.budget)
        self.admit.append((inference, self.reserve(inference, n)))
        if n:
            self.spend(inference, n)
        return True

    def make_room(self) -> bool:
        """Return whether the blocks of a joining request are free."""
        return self.account.free >= 0

    def reserve(self, inference: Inference, n: int) -> int:
        """Return for how many tokens a joining request gets blocks, when it computes n at first."""
        return self._needed(inference)

    def tokens(self, inference: Inference) -> int:
        """Return how many tokens of a row the budget allows."""
        if inference.decodes and not self._counts_decoded:
            return 1
        return tokens_to_compute(inference, self.view, self.budget)

    def spend(self, inference: Inference, n: int) -> None:
        self.run[inference.id] = inference, n
        self.budget -= self.charge(inference, n)

    def charge(self, inference: Inference, n: int) -> int:
        return 0 if inference.decodes and not self._counts_decoded else n
