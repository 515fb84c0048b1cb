"""Requests that ended lately, and where their time went, for GET /requests/NAME."""

from __future__ import annotations

from collections import deque
from typing import Any

from batching import BatchingManager
from scheduling.inference import Inference
from scheduling.latency import Times, neighbours, parts_of, times_of
from scheduling.records import IterationRecord
from scheduling.scheduler import Scheduler

KEPT = 2000  # requests that ended; each has a dozen numbers
Known = tuple[Times, dict[str, Any]]  # a request, and what is told of it


class RecentRequests:
    """An observer of the manager."""

    def __init__(self, manager: BatchingManager):
        self._manager = manager
        self._ended: deque[Known] = deque(maxlen=KEPT)

    def iteration(self, record: IterationRecord) -> None:
        pass

    def answered(self, inference: Inference) -> None:
        assert inference.answered_at is not None
        self._ended.append(self._known(inference, inference.answered_at))

    def find(self, name: str) -> list[dict[str, Any]]:
        """Return the inferences of a request by its `request_id`, or else the one of this number:
        clients may number their requests, too.
        """

        def look(scheduler: Scheduler) -> list[Known]:
            now, known = self._manager.clock(), [*self._ended]
            for each in scheduler.in_flight():
                asked = each.id in scheduler.running or name in (each.request_id, str(each.id))
                if asked and each.answered_at is None:
                    scheduler.shortage.count(each, now)
                    known.append(self._known(each, now))
            return known

        known = self._manager.inspect(look)
        times = {told["id"]: its for its, told in known}
        named = [each for each in known if each[1]["request_id"] == name]
        named = named or [each for each in known if str(each[1]["id"]) == name]
        return [told | {"neighbours": neighbours(told["id"], times)} for _, told in named]

    def _known(self, inference: Inference, until: float) -> Known:
        i, times = inference, times_of(inference, until)
        return times, {
            "id": i.id, "request_id": i.request_id or None, "state": i.state.value,
            "error": i.error.code if i.error else None,
            "arrived_at": i.arrived_at + self._manager.epoch_offset,
            "latency_s": round(until - i.arrived_at, 6),
            "prompt_tokens": len(i.prompt_ids) if i.leader is None else 0,  # it counts once
            "completion_tokens": len(i.token_times),
            "parts": parts_of(i, times),
        }  # fmt: skip
