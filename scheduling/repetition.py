"""Plans that repeat: rows without a plan, where a policy goes on with what runs."""

from __future__ import annotations

from scheduling.inference import Row
from scheduling.policies import Order, Policy, View
from scheduling.speculation import Speculation


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
    row = tuple.__new__  # as in `iteration.rows_of`
    rows = [
        row(Row, (i, i.computed, 1, i.blocks, True, False, 0, ())) for i in running if i.decodes
    ]
    return rows if len(rows) == len(running) else []
