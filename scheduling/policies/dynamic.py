"""Iteration-level scheduling (Orca, OSDI 2022, section 3): join and leave between iterations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar, Literal

from scheduling.history import Memory
from scheduling.policies.base import Plan, Policy, View, setting
from scheduling.policies.demand import PlannerAsJoined, PlannerOnDemand
from scheduling.policies.planner import Planner
from scheduling.policies.preemptive import PlannerByTurns
from scheduling.policies.prefill import Prefill, read_prefill

DEMAND = ("kv_reservation", "demand")


@dataclass(frozen=True)
class Dynamic(Policy):
    """Orca's algorithm 1, or vLLM's.

    whole: an inference joins as soon as a row is free and KV blocks for all its tokens can be
    reserved, so nothing is ever preempted. demand: it gets blocks as it fills them. Either way none
    overtakes the head of the queue if that does not fit.
    """

    kv_reservation: Literal["whole", "demand"] = setting(
        "whole",
        "KV blocks of a request: whole (reserved for its longest answer before it runs) or demand "
        "(taken as it fills them; where none is free, a running request is preempted)",
    )
    victim: str = setting(
        "newest",
        "running request that is preempted: newest, least_computed or most_computed, or "
        "FILE.py:NAME",
        needs=DEMAND,
    )
    watermark: float = setting(
        0.01, "share of the KV blocks that admission leaves free", needs=DEMAND, ge=0, lt=1
    )
    row_order: Literal["turn", "joined", "vllm_priority", "vllm_priority_0.32"] = setting(
        "turn",
        "rows are computed in turn (as waiting requests are ordered); joined: as they joined, the "
        "last is preempted, and no order pauses any (vLLM); vllm_priority: as they joined, and the "
        "last in the order is preempted (vLLM's priorities; up to 0.32 a row that preempts itself "
        "ends the iteration's rows)",
        needs=DEMAND,
    )
    budget_counts: Literal["prefill", "all"] = setting(
        "prefill",
        "what token_budget limits: prefill (tokens of prompts, and those computed again after a "
        "preemption) or all (decoded tokens too, as in vLLM)",
    )

    prefill: str = setting(
        "mixed",
        "prompts and decode rows: mixed (in one iteration), first (prompts alone, while any fits), "
        "last:K (while fewer than K rows decode; last: of 1), every:K (after K iterations of "
        "decode rows) or adaptive:MS (mixed, with gaps between tokens of at most MS milliseconds; "
        "adaptive: of 50)",
    )

    repeats: ClassVar[bool] = True

    @property
    def on_demand(self) -> bool:
        return self.kv_reservation == "demand"

    @property
    def by_turn(self) -> bool:
        return self.on_demand and self.row_order == "turn"

    @property
    def counts_decoded(self) -> bool:
        return self.budget_counts == "all"

    @cached_property
    def prefill_rule(self) -> Prefill:
        """The value of `prefill`; a policy of one's own may have another rule."""
        return read_prefill(self.prefill)

    @property
    def remembers(self) -> Sequence[type[Memory]]:
        return self.prefill_rule.remembers

    def plan(self, view: View) -> Plan:
        on_demand = self.on_demand
        kind: Callable[..., Planner] = PlannerOnDemand if on_demand else Planner
        if on_demand and self.row_order != "turn":
            kind = partial(PlannerAsJoined, self.row_order)
        elif view.order.preemptive:
            kind = PlannerByTurns
        return kind(
            view,
            needed=(lambda i: i.computed + i.uncomputed if on_demand else i.total_tokens),
            prefill=self.prefill_rule,
            counts_decoded=self.counts_decoded,
            on_demand=on_demand,
            spare=int(self.watermark * view.pool.n_blocks) if on_demand else 0,
        ).plan()
