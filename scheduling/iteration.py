"""The rows of a plan, or the rule that it breaks."""

from __future__ import annotations

from collections.abc import Container, KeysView

from scheduling.inference import Row
from scheduling.policies import Plan, Policy, View
from scheduling.speculation import Reservations


def rows_of(
    plan: Plan, view: View, policy: Policy, running: KeysView[int], waiting: Container[int]
) -> tuple[list[Row], Reservations]:
    """Return the rows of a plan, and for how many tokens inferences get KV blocks; running and
    waiting are ids. Changes nothing.

    Raises ValueError, naming the policy and the rule, if the plan cannot be carried out.
    """

    def impossible(rule: str) -> ValueError:
        return ValueError(f"the plan of {policy} is impossible: {rule}")

    limits, account, preemptive = view.limits, view.account(), view.order.preemptive
    preempted, reserved = set[int](), Reservations()
    for inference in plan.preempt:
        if policy.request_level:
            raise impossible("a row cannot leave a batch that is answered as a whole")
        if inference.id not in running or inference.id in preempted:
            raise impossible("only a running inference can be preempted, and only once")
        preempted.add(inference.id)
        account.release(inference)
    for inference, tokens in plan.admit:
        if inference.id not in waiting or inference.id in reserved:
            raise impossible("only a waiting inference can be admitted, and only once")
        reserved[inference.id] = (inference, max(tokens, inference.computed))
    n_rows = len(plan.run) if preemptive else len(running) - len(preempted) + len(reserved)
    if n_rows > limits.max_batch_size:
        raise impossible(f"{n_rows} rows are more than max_batch_size {limits.max_batch_size}")
    if view.adapters is not None and reserved:
        left = [inference for inference in view.running if inference.id not in preempted]
        if excess := view.adapters.excess([*left, *(inference for inference, _ in plan.admit)]):
            raise impossible(excess)
    computed = {inference.id for inference, _ in plan.run}
    if computed & preempted or not computed - reserved.keys() <= running:
        raise impossible("only a running inference can be computed")
    if len(computed) < len(plan.run):
        raise impossible("no inference has two rows")
    rows, charged = list[Row](), 0
    size, counts_decoded = limits.block_size, policy.counts_decoded
    row = tuple.__new__  # much faster than Row(…), and there are many
    for inference, n in plan.run:
        start, blocks = inference.computed, inference.blocks
        if inference.is_over:  # its last token once more: no block is added or shared
            if inference.prompt_only:  # that one has no slot: its prompt's last token, alone
                start, blocks = min(start, len(inference.prompt_ids) - 1), []
            rows.append(row(Row, (inference, start, 1, blocks, True, True, 0, ())))
            continue
        uncomputed, cached, recomputed = 1, 0, 0
        if not inference.decodes:
            uncomputed = inference.uncomputed
            if uncomputed > 1 and inference.prefix is not None:  # its last token is always computed
                cached = view.cached_tokens(inference)
                start, uncomputed = start + cached, uncomputed - cached
            recomputed = max(0, min(n, inference.interruptions.recompute_until - start))
            charged += n
        elif counts_decoded:
            charged += n
        if not 1 <= n <= uncomputed:
            raise impossible(f"{n} tokens of {uncomputed} uncomputed ones cannot be computed")
        if cached or start + n > len(blocks) * size:
            _, tokens = reserved.get(inference.id, (inference, len(blocks) * size))
            reserved[inference.id] = (inference, max(tokens, start + n))
        rows.append(row(Row, (inference, start, n, blocks, n == uncomputed, False, recomputed, ())))
    for inference, tokens in reserved.values():
        account.take(inference, tokens)
    if account.free < 0:
        raise impossible(f"it needs {-account.free} KV blocks more than are free")
    if charged > limits.token_budget:
        raise impossible(
            f"{charged} charged tokens are more than token_budget {limits.token_budget}"
        )
    if view.speculation is not None:
        view.speculation.add(rows, reserved, account, limits.token_budget - charged)
    return rows, reserved
