"""When to plan, and for which rows to draft: what the server's thread and virtual time share."""

from __future__ import annotations

from scheduling.inference import Inference, Iteration
from scheduling.scheduler import Scheduler
from scheduling.user_policies import FAULTS


def next_iteration(scheduler: Scheduler, now: float) -> tuple[Iteration, float | None]:
    """Schedule; return the next iteration, and when to schedule again if it has no rows: None if
    nothing that is known now will lead to any.

    A plan without rows that preempted or admitted, or whose `wake_at` has come, is followed by
    another one, once. Raises what the policy raises.
    """
    waited = len(scheduler.waiting)
    iteration, wake_at = scheduler.schedule(now)
    changed = iteration.preempted or len(scheduler.waiting) < waited
    if not iteration.rows and (changed or (wake_at is not None and wake_at <= now)):
        preempted, reason = iteration.preempted, iteration.reason
        iteration, wake_at = scheduler.schedule(now)
        iteration = iteration._replace(
            preempted=preempted + iteration.preempted, reason=iteration.reason or reason
        )
    times = [at for at in (wake_at, scheduler.next_deadline()) if at is not None and at > now]
    return iteration, min(times, default=None)


def nothing_planned(scheduler: Scheduler) -> RuntimeError:
    """Return the error of work that is left without rows, and without a time to plan again."""
    return RuntimeError(
        f"{len(scheduler.waiting)} requests wait and {len(scheduler.running)} run, and the plan "
        "computes none of them and has no wake_at that is still to come"
    )


def rows_to_draft(scheduler: Scheduler, now: float) -> list[Inference]:
    """Return the inferences of which the next iteration has rows, as far as is known now, and drop
    earlier drafts of all that run. None has rows if the policy fails, which its next plan reports.
    """
    for inference in scheduler.running.values():
        inference.drafts.ids = []  # those that were not taken may be too many by now
    try:
        return [inference for inference, _ in scheduler.policy.plan(scheduler.view(now)).run]
    except FAULTS:
        return []
