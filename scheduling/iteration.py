"""The rows of a plan, or the rule that it breaks; rows without a plan, where a policy goes on with
what runs; and tokens that an engine computes for no request.
"""

from __future__ import annotations

from collections.abc import Container, KeysView, Sequence

from scheduling.inference import Row
from scheduling.policies import Limits, Order, Plan, Policy, View
from scheduling.speculation import Reservations, Speculation


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


def plans_repeat(policy: Policy, order: Order, speculation: Speculation | None) -> bool:
    """Return whether plans go on with rows that decode until one ends or a request joins."""
    says_so = "repeats" in vars(type(policy)) and policy.repeats
    # a batch that is answered as a whole is paused by no order; but some change by each iteration
    changes = type(order).computed is not Order.computed or order.promote_after_s is not None
    pauses = order.preemptive and (changes or not policy.request_level)
    return says_so and not pauses and speculation is None


def same_rows(view: View) -> list[Row]:
    """Return a row for each running inference if all decode, the budget allows them and no request
    can join; else nothing. Equal to a plan where `plans_repeat`.
    """
    running, limits = view.running, view.limits
    if view.request_level or (any(view.queues) and len(running) < limits.max_batch_size):
        return []
    if len(running) > limits.token_budget:  # the budget may count decode rows
        return []
    row = tuple.__new__  # as above
    rows = [
        row(Row, (i, i.computed, 1, i.blocks, True, False, 0, ())) for i in running if i.decodes
    ]
    return rows if len(rows) == len(running) else []


def padding(rows: Sequence[Row], limits: Limits) -> int:
    """Return how many tokens fill up the rectangles of an iteration, or its decode rows a size."""
    n, sizes = len(rows), limits.decoder_batch_sizes
    if limits.padded:
        return sum(
            max(rows[i].n_tokens for i in rectangle) - rows[i].n_tokens
            for rectangle in rectangles(rows, limits.padded)
            for i in rectangle
        )
    if n and sizes and all(row.decodes for row in rows):
        return next((size for size in sizes if size >= n), n) - n
    return 0


def rectangles(rows: Sequence[Row], padded: str) -> list[list[int]]:
    """Return the rows of each rectangle: all (`together`), or decode rows and prompts (`apart`)."""
    every = range(len(rows))
    if padded == "together":
        return [[*every]]
    kinds = [[i for i in every if rows[i].decodes is decodes] for decodes in (True, False)]
    return [indices for indices in kinds if indices]
