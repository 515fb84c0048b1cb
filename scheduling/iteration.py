"""What a plan comes to: the rows of an iteration, or the rule that it breaks."""

from __future__ import annotations

from collections.abc import Container, KeysView, Sequence

from scheduling.inference import Inference, Row
from scheduling.policies import Account, Plan, Policy, View

Holds = list[tuple[Inference, int]]  # who gets KV blocks for how many tokens


def rows_of(
    plan: Plan, view: View, policy: Policy, running: KeysView[int], waiting: Container[int]
) -> tuple[list[Row], Holds]:
    """The rows of a plan, and what they hold; nothing has moved yet.

    running, waiting: ids. Raises ValueError, naming the policy and the rule, if the plan cannot be
    carried out.
    """

    def impossible(rule: str) -> ValueError:
        return ValueError(f"the plan of {policy} is impossible: {rule}")

    limits, account, preemptive = view.limits, Account(view), view.order.preemptive
    gone: set[int] = set()
    for inference in plan.preempt:
        if policy.request_level:
            raise impossible("a row cannot leave a batch that is answered as a whole")
        if inference.id not in running or inference.id in gone:
            raise impossible("only what runs can be preempted, and once")
        gone.add(inference.id)
        account.give_up(inference)
    holds: dict[int, tuple[Inference, int]] = {}
    for inference, tokens in plan.admit:
        if inference.id not in waiting or inference.id in holds:
            raise impossible("only what waits can be admitted, and once")
        holds[inference.id] = (inference, tokens)
    admitted = set(holds)
    n_rows = len(plan.run) if preemptive else len(running) - len(gone) + len(admitted)
    if n_rows > limits.max_batch_size:
        raise impossible(f"{n_rows} rows are more than max_batch_size {limits.max_batch_size}")
    computed = {inference.id for inference, _ in plan.run}
    if computed & gone or not computed - admitted <= running:
        raise impossible("only what runs can be computed")
    if len(computed) < len(plan.run):
        raise impossible("no inference has two rows")
    rows: list[Row] = []
    size = limits.block_size
    charged, counts_decoded = 0, policy.counts_decoded
    row = tuple.__new__  # a Row is made for each row of each iteration, and its own way is slow
    for inference, n in plan.run:
        start, mine = inference.computed, inference.blocks
        # its last token once more: its cache does not grow, and the block is nobody else's
        if inference.is_over:
            rows.append(row(Row, (inference, start, 1, mine, True, True, 0)))
            continue
        uncomputed, cached, again = 1, 0, 0
        if not inference.decodes:
            uncomputed = inference.uncomputed
            if uncomputed > 1 and inference.keys is not None:  # its last token is always computed
                cached = view.cached(inference)
                start, uncomputed = start + cached, uncomputed - cached
            again = max(0, min(n, inference.interruptions.recompute_until - start))
            charged += n
        elif counts_decoded:
            charged += n
        if not 1 <= n <= uncomputed:
            raise impossible(f"{n} tokens of {uncomputed} uncomputed ones cannot be computed")
        if cached or start + n > len(mine) * size:
            _, held = holds.get(inference.id, (inference, len(mine) * size))
            holds[inference.id] = (inference, max(held, start + n))
        rows.append(row(Row, (inference, start, n, mine, n == uncomputed, False, again)))
    for inference, tokens in holds.values():
        account.take(inference, tokens)
    if account.free < 0:
        raise impossible(f"it needs {-account.free} KV blocks more than are free")
    if charged > limits.token_budget:
        raise impossible(
            f"{charged} charged tokens are more than token_budget {limits.token_budget}"
        )
    return rows, list(holds.values())


def padding(rows: Sequence[Row], decoder_batch_sizes: Sequence[int]) -> int:
    """Rows of nobody that fill an iteration of decode rows up to the smallest size, of ascending
    ones, that holds it.
    """
    n = len(rows)
    if n and decoder_batch_sizes and all(row.decodes for row in rows):
        return next((size for size in decoder_batch_sizes if size >= n), n) - n
    return 0
