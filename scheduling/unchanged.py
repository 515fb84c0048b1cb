"""Rows of the next iteration without a plan, where `dynamic` goes on with what runs."""

from __future__ import annotations

from scheduling.inference import Row
from scheduling.policies import Dynamic, Order, Policy, View
from scheduling.speculation import Speculation


def plans_repeat(policy: Policy, order: Order, speculation: Speculation | None) -> bool:
    """Return whether `dynamic` goes on with rows that decode until one ends or a request joins:
    blocks are reserved for their last tokens, and each computes one token an iteration.
    """
    if type(policy) is not Dynamic or policy.kv_reservation == "demand":
        return False
    return not order.preemptive and speculation is None


def same_rows(view: View) -> list[Row]:
    """Return a row for each running inference if all decode, the budget allows them and no request
    can join; else nothing. Equal to a plan where `plans_repeat`.
    """
    running, limits = view.running, view.limits
    if view.queues[0] and len(running) < limits.max_batch_size:
        return []
    if len(running) > limits.token_budget:  # the budget may count decode rows
        return []
    row = tuple.__new__  # as in scheduling.iteration
    rows = [
        row(Row, (i, i.computed, 1, i.blocks, True, False, 0, ())) for i in running if i.decodes
    ]
    return rows if len(rows) == len(running) else []
