"""One JSON line for every inference that ended, in the order in which they ended.

Those of a batch come in the order of its rows.
"""

from __future__ import annotations

import json

from scheduling.inference import Inference, State
from scheduling.latency import parts_of, times_of
from scheduling.records import IterationRecord
from server.observers.line_writer import LineWriter


class RequestLog:
    """An observer of the manager that appends to a file. Raises OSError if it cannot open it.

    `epoch_offset`: the manager's clock + this = seconds since the epoch. At most `backlog`
    inferences wait to be written.
    """

    def __init__(self, path: str, mode: str, epoch_offset: float, backlog: int = 100_000):
        self._mode, self._epoch_offset = mode, epoch_offset
        self._lines = LineWriter(path, "request log", self._line, backlog)

    def iteration(self, record: IterationRecord) -> None:
        pass

    def answered(self, inference: Inference) -> None:
        self._lines.put(inference)

    def close(self) -> None:
        """Write waiting lines, for 10 s at most."""
        self._lines.close()

    def _line(self, i: Inference) -> str:
        def epoch(seconds: float | None) -> float | None:
            return None if seconds is None else round(seconds + self._epoch_offset, 6)

        assert i.answered_at is not None
        admitted, interruptions = i.admitted_at is not None, i.interruptions
        entry = {
            "id": i.id, "group": i.group,
            "leader": i.leader.id if i.leader else None,  # whose prompt this one shares
            "request_id": i.request_id or None, "user": i.user, "adapter": i.adapter or None,
            "priority": i.priority, "predicted_tokens": i.standing.predicted_tokens,
            "mode": self._mode, "state": i.state.value,
            "finish_reason": i.finish_reason if i.state is State.FINISHED else None,
            "error": i.error.code if i.error else None,
            "batch_id": i.standing.batch if admitted else None,
            "position": i.standing.position if admitted else None,
            "prompt_tokens": len(i.prompt_ids) if i.leader is None else 0,  # it counts once
            "cached_tokens": i.cached_tokens if i.leader is None else 0,
            "num_tokens": i.num_tokens, "completion_tokens": len(i.tokens),
            "preemptions": interruptions.preemptions,
            "preempted_s": round(interruptions.preempted_s, 6),
            "paused_s": round(interruptions.paused_s, 6),
            "parts": parts_of(i, times_of(i)),
            "recomputed_tokens": interruptions.recomputed_tokens,
            "draft_tokens": i.drafts.verified, "accepted_tokens": i.drafts.accepted,
            "arrived_at": epoch(i.arrived_at), "admitted_at": epoch(i.admitted_at),
            "token_times": [epoch(seconds) for seconds in i.token_times],
            "answered_at": epoch(i.answered_at),
        }  # fmt: skip
        return json.dumps(entry)
