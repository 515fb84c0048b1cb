"""KV blocks on demand: rows get them as they fill them, and when none is left somebody gives way
(vLLM; Kwon et al., SOSP 2023, section 4.5: preemption by recomputation).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from scheduling.inference import Inference
from scheduling.policies.base import Account, Plan, View, tokens_to_compute

Victim = Literal["newest", "least_computed", "most_computed"]
# whom to take from rows in order; of equals the newest
VICTIMS: dict[Victim, Callable[[Sequence[Inference]], Inference]] = {
    "newest": lambda rows: rows[-1],
    "least_computed": lambda rows: min(reversed(rows), key=lambda row: row.computed),
    "most_computed": lambda rows: max(reversed(rows), key=lambda row: row.computed),
}


def _standing(inference: Inference, view: View) -> tuple[Any, ...]:
    """Where one that runs is in the order, its rank first: with those that have waited for too long
    before all others, so that nobody who came later takes their blocks.
    """
    if view.order.is_overdue(inference, view.now):
        return (False,), inference.id
    rank, *others = inference.standing.key
    return (True, rank), *others


def _victim_of(rows: Sequence[Inference], victim: Victim, view: View) -> Inference:
    """Who of them, in order, gives way: one of the last rank (of the lowest priority)."""
    last, *_ = _standing(rows[-1], view)
    return VICTIMS[victim]([row for row in rows if _standing(row, view)[0] == last])


def tokens_held(inference: Inference, n: int, view: View) -> int:
    """Tokens that it has KV blocks for once n more are computed."""
    return inference.computed + n + (0 if inference.decodes else view.cached(inference))


def on_demand(view: View, victim: Victim, watermark: float, counts_decoded: bool) -> Plan:
    """Compute every row, the first in order first, and let requests join where blocks are left.

    A row whose next tokens need a block when none is free takes those of a victim, which may be
    itself. The first row in order is never one, so that somebody always progresses. Nobody joins in
    an iteration in which somebody gave way; else the head of the queue does if all that is known of
    it, prompt and what it had generated, fits besides the `watermark`, a share of all blocks that
    admission leaves free while anything runs. `counts_decoded`: see share_budget.
    """
    limits, plan, account = view.limits, Plan(), Account(view)
    rows = sorted(view.running, key=lambda inference: _standing(inference, view))
    run: dict[int, tuple[Inference, int]] = {}  # by id: tokens to compute
    gone: set[int] = set()
    budget = limits.token_budget

    def charged(inference: Inference) -> bool:
        return counts_decoded or not inference.decodes

    for inference in rows:
        while inference.id not in gone:
            n = tokens_to_compute(inference, view, budget) if charged(inference) else 1
            if not n:
                break
            tokens = tokens_held(inference, n, view)
            if tokens > len(inference.blocks) * limits.block_size:
                account.take(inference, tokens)
            if account.free >= 0:
                run[inference.id] = (inference, n)
                budget -= n if charged(inference) else 0
                break
            account.undo(inference, tokens)
            loser = _victim_of([row for row in rows[1:] if row.id not in gone], victim, view)
            if loser.id in run:
                _, its = run.pop(loser.id)
                account.undo(loser, tokens_held(loser, its, view))
                budget += its if charged(loser) else 0
            account.give_up(loser)
            gone.add(loser.id)
            plan.preempt.append(loser)
    spare = int(watermark * view.n_blocks)
    may_join = not plan.preempt and len(rows) < limits.max_batch_size
    for inference in view.waiting if may_join else ():
        joined = len(rows) + len(plan.admit)
        if joined == limits.max_batch_size or not budget:
            break
        account.take(inference, inference.uncomputed)
        fits = account.free >= (spare if joined else 0)
        account.undo(inference, inference.uncomputed)
        if not fits:
            break
        n = tokens_to_compute(inference, view, budget)
        account.take(inference, tokens_held(inference, n, view))
        plan.admit.append((inference, tokens_held(inference, n, view)))
        if n:
            run[inference.id] = (inference, n)
            budget -= n
    plan.run = list(run.values())
    plan.reason = "join" if plan.admit else ""
    return plan
