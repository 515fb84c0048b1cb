"""KV blocks on demand: rows get them as they fill them, and when none is left somebody gives way
(vLLM; Kwon et al., SOSP 2023, section 4.5: preemption by recomputation).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from scheduling.inference import Inference
from scheduling.policies.base import Plan, View

Victim = Literal["newest", "least_computed", "most_computed"]
# whom to take from rows in order; of equals the newest
VICTIMS: dict[Victim, Callable[[Sequence[Inference]], Inference]] = {
    "newest": lambda rows: rows[-1],
    "least_computed": lambda rows: min(reversed(rows), key=lambda row: row.computed),
    "most_computed": lambda rows: max(reversed(rows), key=lambda row: row.computed),
}


def on_demand(
    view: View, victim: Victim, watermark: float, charged: Callable[[Inference], bool]
) -> Plan:
    """Compute every row, the first in order first, and let requests join where blocks are left.

    A row whose next tokens need a block when none is free takes those of a victim, which may be
    itself. The first row in order is never one, so that somebody always progresses. Nobody joins in
    an iteration in which somebody gave way; else the head of the queue does if all that is known of
    it, prompt and what it had generated, fits besides the `watermark`, a share of all blocks that
    admission leaves free while anything runs. `charged`: whose tokens the budget bounds.
    """
    limits, plan = view.limits, Plan()
    rows = sorted(view.running, key=lambda inference: inference.key)
    run: dict[int, tuple[Inference, int, int]] = {}  # by id: tokens to compute, blocks for them
    budget, free = limits.token_budget, view.free_blocks
    i = 0
    while i < len(rows):
        inference = rows[i]
        n = min(inference.uncomputed, budget) if charged(inference) else 1
        needed = limits.blocks(inference.computed + n) - len(inference.blocks) if n else 0
        if needed > free:
            loser = VICTIMS[victim](rows[1:])
            i -= rows.index(loser) < i
            rows.remove(loser)
            plan.preempt.append(loser)
            _, tokens, blocks = run.pop(loser.id, (loser, 0, 0))
            free += blocks + len(loser.blocks)
            budget += tokens if charged(loser) else 0
            continue
        if n:
            run[inference.id] = (inference, n, needed)
            free -= needed
            budget -= n if charged(inference) else 0
        i += 1
    spare = int(watermark * view.n_blocks)
    for inference in view.waiting if not plan.preempt else ():
        known, joined = inference.uncomputed, len(rows) + len(plan.admit)
        fits = limits.blocks(known) <= free - (spare if joined else 0)
        if joined == limits.max_batch_size or not budget or not fits:
            break
        n = min(known, budget)
        plan.admit.append((inference, n))
        run[inference.id] = (inference, n, limits.blocks(n))
        free -= limits.blocks(n)
        budget -= n
    plan.run = [(inference, n) for inference, n, _ in run.values()]
    plan.reason = "join" if plan.admit else ""
    return plan
