"""Iteration-level scheduling (Orca, OSDI 2022, section 3.1): join and leave between iterations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduling.inference import Inference
from scheduling.policies.base import Account, Plan, Policy, View, setting, start
from scheduling.policies.demand import Victim, on_demand
from scheduling.policies.preemptive import by_turns

DEMAND = ("kv_reservation", "demand")


@dataclass(frozen=True)
class Dynamic(Policy):
    """Orca's algorithm 1, or vLLM's.

    whole: an inference joins as soon as a row is free and KV blocks for its whole life can be
    reserved, so nothing is ever preempted. demand: it gets blocks as it fills them (`on_demand`).
    Either way nobody overtakes a head of queue that does not fit.
    """

    kv_reservation: Literal["whole", "demand"] = setting(
        "whole",
        "KV blocks of a request: whole (for its whole life, before it joins) or demand (as it "
        "fills them; when none is left a victim waits again and recomputes)",
    )
    victim: Victim = setting(
        "newest", "who gives way: newest, least_computed or most_computed", needs=DEMAND
    )
    watermark: float = setting(
        0.01, "share of the KV blocks that admission leaves free", needs=DEMAND, ge=0, lt=1
    )
    budget_counts: Literal["prefill", "all"] = setting(
        "prefill",
        "tokens that token_budget bounds: prefill (of prompts, and of what preemption took) or all "
        "(decoded ones too, as in vLLM)",
    )

    @property
    def counts_decoded(self) -> bool:
        return self.budget_counts == "all"

    def plan(self, view: View) -> Plan:
        if view.order.preemptive:
            demand = self.kv_reservation == "demand"
            return by_turns(view, demand, self.victim, self.watermark, self.counts_decoded)
        if self.kv_reservation == "demand":
            return on_demand(view, self.victim, self.watermark, self.counts_decoded)
        admit: list[Inference] = []
        rows, waiting = view.limits.max_batch_size - len(view.running), view.waiting
        account = Account(view)
        for inference in waiting if rows and waiting else ():
            account.take(inference, inference.total_tokens)
            if account.free < 0:
                break
            admit.append(inference)
            if len(admit) == rows:
                break
        plan = start(admit, view, "join", self.counts_decoded)
        plan.closed = len(admit) == rows  # who comes finds none free
        if not plan.closed and len(waiting) > len(admit):
            plan.holds = False  # who waits may find blocks
        return plan
