"""One JSON line for every inference that ended, in the order in which they ended.

Those of a batch come in the order of its rows.

A thread of its own writes, so that neither a slow nor a full disk disturbs serving: lines that
cannot be written are lost, counted, and spoken of in the server's log. No line is ever half there:
of a file the half is taken back, and the next reader of a pipe gets the rest.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
from typing import Any

from scheduling.inference import Inference, IterationRecord, State

log = logging.getLogger("effective_batching")


def open_log(path: str) -> int:
    """A file descriptor to append by.

    Raises OSError, also for a pipe without a reader, for which it does not wait. Writing waits: a
    pipe without room takes a part of a line longer than 4,096 bytes and refuses the rest.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)
    os.set_blocking(file, True)
    return file


class RequestLog:
    """An observer of the manager that appends to a file. Raises OSError if it cannot open it.

    `epoch_offset`: the manager's clock + this = seconds since the epoch. At most `backlog`
    inferences wait to be written.
    """

    def __init__(self, path: str, mode: str, epoch_offset: float, backlog: int = 100_000):
        self._file = open_log(path)
        self._mode = mode
        self._epoch_offset = epoch_offset
        self._lost = 0
        self._rest = b""  # of a line, of which a pipe took the beginning before its reader went
        self._queue: queue.Queue[Inference | None] = queue.Queue(backlog)
        self._thread = threading.Thread(target=self._run, name="request log", daemon=True)
        self._thread.start()

    def iteration(self, record: IterationRecord) -> None:
        pass

    def answered(self, inference: Inference) -> None:
        try:
            self._queue.put_nowait(inference)
        except queue.Full:
            self._lose("the disk is too slow")

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what waits, for so long at most, and end the thread."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)
        if self._lost:
            log.warning("request log: %d lines were lost", self._lost)

    def _run(self) -> None:
        while (inference := self._queue.get()) is not None:
            self._write(json.dumps(self._entry(inference)).encode() + b"\n")
        os.close(self._file)

    def _entry(self, i: Inference) -> dict[str, Any]:
        def epoch(seconds: float | None) -> float | None:
            return None if seconds is None else round(seconds + self._epoch_offset, 6)

        admitted = i.admitted_at is not None
        return {
            "id": i.id,
            "group": i.group,
            "leader": i.leader.id if i.leader else None,  # whose prompt this one shares
            "user": i.user,
            "priority": i.priority,
            "predicted_tokens": i.predicted_tokens,
            "mode": self._mode,
            "state": i.state.value,
            "finish_reason": i.finish_reason if i.state is State.FINISHED else None,
            "error": i.error.code if i.error else None,
            "batch_id": i.batch if admitted else None,
            "position": i.position if admitted else None,
            "prompt_tokens": len(i.prompt_ids) if i.leader is None else 0,  # it counts once
            "cached_tokens": i.cached_tokens if i.leader is None else 0,
            "num_tokens": i.num_tokens,
            "completion_tokens": len(i.tokens),
            "preemptions": i.preemptions,
            "preempted_s": round(i.preempted_s, 6),
            "paused_s": round(i.paused_s, 6),
            "recomputed_tokens": i.recomputed_tokens,
            "arrived_at": epoch(i.arrived_at),
            "admitted_at": epoch(i.admitted_at),
            "token_times": [epoch(seconds) for seconds in i.token_times],
            "answered_at": epoch(i.answered_at),
        }

    def _write(self, line: bytes) -> None:
        data, written = self._rest + line, 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
            self._rest = b""
        except OSError as error:
            begun = data if written > len(self._rest) else self._rest
            self._rest = begun[written:]
            with contextlib.suppress(OSError):  # a pipe keeps what it has
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                self._rest = b""
            self._lose(error.strerror or str(error))

    def _lose(self, reason: str) -> None:
        if not self._lost:
            log.warning(
                "request log: %s; lines are lost from here on, and serving continues", reason
            )
        self._lost += 1
