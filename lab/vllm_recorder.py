"""vLLM's scheduler, and a line of JSON for each of its iterations: the requests in the batch, which
vLLM's own log does not name.

    RECORD_ITERATIONS=vllm.jsonl PYTHONPATH=. vllm serve MODEL \
        --scheduler-cls lab.vllm_recorder.AsyncRecordingScheduler

Runs inside vLLM (written against 0.32) and needs nothing of ours. docs/live.md has the format;
`simulate.vllm` reads it.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from itertools import count, islice
from typing import Any

from vllm import __version__
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

FORMAT = 1
QUEUE = 64  # waiting requests that a line names


class RecordingScheduler(Scheduler):
    """Scheduler for a vLLM that was started with --no-async-scheduling."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        path = os.environ.get("RECORD_ITERATIONS", "vllm.jsonl")
        # for as long as vLLM runs; a killed one loses one line at most
        try:
            self._file = open(path, "x", buffering=1)  # noqa: SIM115
        except FileExistsError:
            raise FileExistsError(
                f"{path} is there already; name another file with RECORD_ITERATIONS"
            ) from None
        self._count = count()
        self._numbers: dict[str, int] = {}  # of requests in flight
        self._new: list[list[Any]] = []  # requests that no line has named yet
        self._steps = deque[dict[str, Any]]()  # scheduled, and not computed yet
        self._write(
            {
                "vllm": __version__,
                "format": FORMAT,
                "model": self.vllm_config.model_config.model.rstrip("/").rpartition("/")[2],
                "policy": self.scheduler_config.policy,
                "max_num_seqs": self.scheduler_config.max_num_seqs,
                "max_num_batched_tokens": self.max_num_scheduled_tokens,
                "num_blocks": self._pool.num_gpu_blocks - 1,  # without the null block
                "block_size": self.block_size,
            }
        )

    @property
    def _pool(self) -> Any:
        return self.kv_cache_manager.block_pool

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry, separators=(",", ":")) + "\n")

    def add_request(self, request: Any) -> None:
        """Number the request, and pass it on."""
        if request.request_id not in self._numbers:
            number = self._numbers[request.request_id] = next(self._count)
            lengths = request.num_prompt_tokens, request.max_tokens
            arrived_at = round(request.arrival_time, 6)
            self._new.append([number, request.request_id, arrived_at, *lengths])
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule an iteration, and note what it will compute."""
        at = time.time()
        output = super().schedule(*args, **kwargs)
        if output.num_scheduled_tokens:
            numbers, pool = self._numbers, self._pool
            step = {
                "at": round(at, 6),
                "until": None,
                "new": self._new,
                "rows": [
                    [numbers[id_], self.requests[id_].num_computed_tokens - n, n]
                    for id_, n in output.num_scheduled_tokens.items()
                ],
                "preempted": [numbers[id_] for id_ in output.preempted_req_ids or ()],
                # those that finished by themselves have no number any more
                "aborted": [numbers.pop(id_) for id_ in output.finished_req_ids if id_ in numbers],
                "waiting": self.get_request_counts()[1],
                "queue": [numbers[r.request_id] for r in islice(self.waiting, QUEUE)],
                "blocks_used": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            }
            self._new = []
            self._steps.append(step)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Take the sampled tokens, and write the iteration's line."""
        until = time.time()
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        if scheduler_output.num_scheduled_tokens:
            step = self._steps.popleft()
            answers = [answer for part in outputs.values() for answer in part.outputs]
            numbers = self._numbers
            tokens = {numbers[a.request_id]: len(a.new_token_ids) for a in answers}
            step["until"] = round(until, 6)
            step["rows"] = [[*row, tokens.get(row[0], 0)] for row in step["rows"]]
            step["finished"] = {
                numbers.pop(a.request_id): str(a.finish_reason) for a in answers if a.finished
            }
            self._write(step)
        return outputs


class AsyncRecordingScheduler(RecordingScheduler, AsyncScheduler):
    """Scheduler for vLLM's default, in which an iteration is planned while the last is computed."""
