"""Our orders as the waiting queue of your vLLM 0.30 to 0.33, with the recorder of vllm_recorder.py:

    cp -r CHECKOUT/scheduling CHECKOUT/simulate/vllm/vllm_* . && pip install sortedcontainers
    ORDER=sjf PYTHONPATH=. vllm serve MODEL … --scheduler-cls vllm_order.OrderedScheduler

ORDER and PREDICTOR: see vllm_order_settings.py. A request may say more by `vllm_xargs`:
expected_tokens, user (of fair; else its cache_salt), priority (a level, 1 first), ttft_ms and
tpot_ms (limits, for edf). vllm_order_queue.py is the queue.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm_order_queue import OrderedQueue
from vllm_order_settings import OrderError, order_of, predictor_of, recorded
from vllm_recorder import AsyncRecordingScheduler, RecordingScheduler


class _Skipped(FCFSRequestQueue):
    """vLLM 0.30's queue of requests that it skipped: here they return to their places."""

    def __init__(self, queue: OrderedQueue):
        super().__init__()
        self.add_request, self.prepend_request = queue.add_request, queue.prepend_request
        self.prepend_requests = queue.prepend_requests


class _Ordered(RecordingScheduler):
    """What both schedulers do."""

    def __init__(self, *args: Any, **kwargs: Any):
        text = os.environ.get("ORDER", "fcfs")
        order, predict = order_of(text), predictor_of(os.environ.get("PREDICTOR", ""))
        self.order = recorded(text, order)
        super().__init__(*args, **kwargs)
        if self.scheduler_config.policy != "fcfs":
            self._file.close()
            raise OrderError(
                f"--scheduling-policy {self.scheduler_config.policy} is an order, too; leave it "
                "out, or OrderedScheduler"
            )
        self.waiting = OrderedQueue(self, order, predict)
        if hasattr(self, "skipped_waiting"):
            self.skipped_waiting = _Skipped(self.waiting)

    def number(self, request: Any) -> int:
        return self._known[request.request_id][0]

    def stated(self, number: int, request: Any, at: float) -> list[Any]:
        """Return what a recording says of a request, of the order's; it gets its mirror."""
        mirror = self.waiting.mirror(number, request, at)
        return [mirror.standing.predicted_tokens, mirror.user, mirror.priority, *mirror.slo[:2]]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.waiting.begin_pass()
        steps = len(self._steps)
        output = super().schedule(*args, **kwargs)
        if len(self._steps) > steps:
            self.waiting.planned(self._steps[-1])
        else:
            self.waiting.end_pass()
            self.waiting.forget(self._aborted)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        step = self._steps[0] if scheduler_output.num_scheduled_tokens else None
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        if step is not None:
            self.waiting.sampled(step)
        return outputs


class SyncOrderedScheduler(_Ordered, RecordingScheduler):
    """Scheduler for a vLLM that was started with --no-async-scheduling."""


class OrderedScheduler(_Ordered, AsyncRecordingScheduler):
    """Scheduler for vLLM's default, in which an iteration is planned while the last is computed."""
