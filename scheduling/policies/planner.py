"""The planner of `dynamic`: which rows are computed, and which requests join them."""

from __future__ import annotations

from collections.abc import Callable

from scheduling.inference import Inference
from scheduling.policies.base import Plan, View, tokens_to_compute
from scheduling.policies.prefill import BOTH, Prefill


class Planner:
    """A plan in the making.

    needed: returns for how many tokens KV blocks must be free before a request joins: all that it
    may come to (Orca), or those known so far (vLLM). prefill: whether prompts, decode rows or both
    are computed. counts_decoded: decoded tokens use the budget, too. `on_demand` and `spare`: of
    `PlannerOnDemand` and `PlannerByTurns`.
    """

    def __init__(
        self,
        view: View,
        needed: Callable[[Inference], int],
        prefill: Prefill,
        counts_decoded: bool = False,
        on_demand: bool = False,
        spare: int = 0,
    ):
        self.view = view
        self.account = view.account()
        self.share = BOTH
        self.budget, self.prompt_budget = view.limits.token_budget, prefill.budget(view)
        self.run: dict[int, tuple[Inference, int]] = {}  # by id, with its tokens
        self.admit: list[tuple[Inference, int]] = []
        self.preempted: dict[int, Inference] = {}  # by id
        self.prompts = 0  # in `run`
        self.short_of_blocks = False
        self._needed, self._prefill, self._counts_decoded = needed, prefill, counts_decoded
        self._on_demand, self._spare = on_demand, spare

    def plan(self) -> Plan:
        for share in self._prefill.shares(self.view):
            self.share = share
            self.compute_share()
            if self.run:
                break
        reason, short = "join" if self.admit else "", self.short_of_blocks or bool(self.preempted)
        preempt, run = [*self.preempted.values()], [*self.run.values()]
        return Plan(preempt, self.admit, run, reason=reason, short_of_blocks=short)

    def compute_share(self) -> None:
        """Compute the rows of the share; let requests join in the order, until one does not fit."""
        self.compute_rows()
        if not self.share.prompts:
            return
        free_rows = self.view.limits.max_batch_size - len(self.view.running)
        if free_rows and any(self.view.queues) and not self.preempted:
            for inference in self.view.waiting:
                if not self.join(inference) or len(self.admit) == free_rows:
                    break

    def compute_rows(self) -> None:
        run, free = self.run, self.share.decodes and not self._counts_decoded
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
        if not self.make_room(inference):
            self.account.undo(inference, tokens)
            self.short_of_blocks = True
            return False
        n = self.prompt_tokens(inference)
        self.admit.append((inference, self.reserve(inference, n)))
        if n:
            self.spend(inference, n)
        return True

    def make_room(self, inference: Inference) -> bool:
        """Return whether the blocks of a joining request, which are taken already, were free."""
        return self.account.free >= 0

    def reserve(self, inference: Inference, n: int) -> int:
        """Return for how many tokens a joining request gets blocks, when it computes n at first."""
        return self._needed(inference)

    def in_share(self, inference: Inference) -> bool:
        return self.share.decodes if inference.decodes else self.share.prompts

    def tokens(self, inference: Inference) -> int:
        """Return how many tokens of a row share and budget allow."""
        if not self.in_share(inference):
            return 0
        if not inference.decodes:
            return self.prompt_tokens(inference)
        return min(1, self.budget) if self._counts_decoded else 1

    @property
    def prompts_left(self) -> int:
        """Prompt tokens that the budget has left."""
        return min(self.budget, self.prompt_budget)

    def prompt_tokens(self, inference: Inference) -> int:
        """Return how many prompt tokens the budget allows. Without decode rows, for which chunks
        are made, a prompt that does not fit whole beside others waits, and so do those behind it.
        """
        joining = (each for each, _ in self.admit)
        whole = tokens_to_compute(inference, self.view, inference.uncomputed, joining)
        most = self._prefill.chunk(self.view, inference, self.prompts, self.prompts_left)
        n = min(whole, most)
        if n < whole and self.run and not self.share.decodes:
            n = self.prompt_budget = 0
        return n

    def spend(self, inference: Inference, n: int) -> None:
        self.run[inference.id] = inference, n
        self.charge(inference, n)

    def charge(self, inference: Inference, n: int) -> None:
        """Take tokens off the budget; of a negative number, give them back."""
        if not inference.decodes:
            self.prompt_budget -= n
            self.prompts += 1 if n > 0 else -1
        if not inference.decodes or self._counts_decoded:
            self.budget -= n
