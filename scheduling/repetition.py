"""Plans that repeat: rows without a plan, where a policy goes on with what runs."""

from __future__ import annotations

from scheduling.inference import Row
from scheduling.policies import Order, Policy, View
from scheduling.policies.demand import BY_TURN
from scheduling.speculation import Reservations, Speculation


def plans_repeat(policy: Policy, order: Order, speculation: Speculation | None) -> bool:
    """Return whether plans go on with rows that decode until one ends or a request joins."""
    says_so = "repeats" in vars(type(policy)) and policy.repeats
    # a batch that is answered as a whole is paused by no order; but some change by each iteration
    changes = type(order).computed is not Order.computed or order.promote_after_s is not None
    pauses = order.preemptive and (changes or not policy.request_level)
    # an overdue row gets its blocks before others
    moves = policy.on_demand and type(order).is_overdue is not Order.is_overdue
    return says_so and not pauses and not moves and speculation is None


def same_rows(view: View, policy: Policy) -> tuple[list[Row], Reservations]:
    """Return a row for each running inference if all decode, budget and KV blocks allow them and no
    request can join, and what is reserved for them; else nothing. Equal to a plan where
    `plans_repeat`.
    """
    running, limits = view.running, view.limits
    nothing = list[Row](), Reservations()
    if view.request_level or (any(view.queues) and len(running) < limits.max_batch_size):
        return nothing
    if len(running) > limits.token_budget:  # the budget may count decode rows
        return nothing
    turns = sorted(running, key=BY_TURN) if policy.by_turn else running
    row = tuple.__new__  # as in `iteration.rows_of`
    rows = [row(Row, (i, i.computed, 1, i.blocks, True, False, 0, ())) for i in turns if i.decodes]
    if len(rows) < len(running):
        return nothing
    reserved, size = Reservations(), limits.block_size
    if policy.on_demand:
        for i in turns:
            if i.computed == len(i.blocks) * size:
                reserved[i.id] = i, i.computed + 1
        if len(reserved) > view.pool.free_blocks:
            return nothing
    return rows, reserved
