"""vLLM's scheduler, and a line of JSON for each of its iterations. Copy this one file beside your
server:

    PYTHONPATH=. vllm serve MODEL … --scheduler-cls vllm_recorder.AsyncRecordingScheduler

Runs inside vLLM 0.30 to 0.33 and needs nothing else. It records lengths, times and schedules, and
of prompts shortened hashes of whole blocks (with prefix caching): no text and no token.
docs/your_vllm.md has the format; `simulate.vllm` reads it.

RECORD_ITERATIONS   the file (default: vllm.jsonl); one that is there becomes FILE.1
RECORD_MB           its size, in 10^6 bytes, beyond which it becomes FILE.1, in place of an earlier
                    FILE.1, and a new file begins (default: 500)
"""

from __future__ import annotations

import base64
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from itertools import count, islice
from typing import Any

import msgspec
import torch
from vllm import __version__
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

FORMAT = 2
VERSIONS = ("0.30.", "0.31.", "0.32.", "0.33.")
QUEUE = 64  # waiting requests that a line names
HASH = 6  # bytes of a block's hash
OF_SCHEDULER = (  # settings that are written under vLLM's names, if this version has them
    *("policy", "max_num_seqs", "max_num_active_seqs", "long_prefill_token_threshold"),
    *("max_num_partial_prefills", "prefill_schedule_interval", "enable_chunked_prefill"),
    *("watermark", "async_scheduling", "scheduler_reserve_full_isl"),
)


class RecordingScheduler(Scheduler):
    """Scheduler for a vLLM that was started with --no-async-scheduling."""

    order: Mapping[str, str] = {}  # what the first line says of one of ours (vllm_order.py)
    now = 0.0  # when the last iteration was planned

    def __init__(self, *args: Any, **kwargs: Any):
        if not __version__.startswith(VERSIONS):
            raise RuntimeError(
                f"this recorder was written for vLLM 0.30 to 0.33, and this is {__version__}; use "
                "the vllm_recorder.py of a newer effective-batching, or one of these versions"
            )
        super().__init__(*args, **kwargs)
        parallel = self.vllm_config.parallel_config
        self._path = os.environ.get("RECORD_ITERATIONS", "vllm.jsonl")
        # each rank has a scheduler; to those of a dense model vLLM says that there is one rank
        if parallel.data_parallel_size > 1 or parallel.data_parallel_index:
            self._path += f".rank{parallel.data_parallel_index}"
        self._most_bytes = 1e6 * float(os.environ.get("RECORD_MB", "500"))
        self._count = count()
        self._known: dict[str, tuple[int, Any]] = {}  # number and request of each in flight
        self._new: list[list[Any]] = []  # requests that no line has named yet
        self._aborted: list[int] = []  # the same of those whose clients gave up
        self._steps = deque[dict[str, Any]]()  # scheduled, and not computed yet
        self._begin([])

    def _begin(self, in_flight: list[list[Any]]) -> None:
        """Begin a file. in_flight: requests that the file before it has the beginnings of."""
        if os.path.exists(self._path):
            os.replace(self._path, f"{self._path}.1")
        # open for as long as vLLM runs; a killed one loses one line at most
        self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115
        config, scheduler = self.vllm_config, self.scheduler_config
        graphs = getattr(config.compilation_config, "cudagraph_capture_sizes", None)
        self._write(
            {
                "format": FORMAT,
                "engine": f"vLLM {__version__}",
                "model": config.model_config.model.rstrip("/").rpartition("/")[2],
                "dtype": str(config.model_config.dtype).removeprefix("torch."),
                "hardware": current_platform.get_device_name(),
                "versions": {"torch": str(torch.__version__)},
                **{n: getattr(scheduler, n) for n in OF_SCHEDULER if hasattr(scheduler, n)},
                "max_num_batched_tokens": self.max_num_scheduled_tokens,
                "max_model_len": self.max_model_len,
                "num_blocks": self._pool.num_gpu_blocks - 1,  # without the null block
                "block_size": self.block_size,
                "prefix_caching": bool(self.cache_config.enable_prefix_caching),
                "graph_sizes": [] if current_platform.is_cpu() else sorted(graphs or []),
                **self.order,
                "unknown": self._unknown(),
                "in_flight": in_flight,
            }
        )

    def _unknown(self) -> list[str]:
        """Features of this vLLM that a line does not describe."""
        config = self.vllm_config
        found = {
            "speculative decoding": config.speculative_config is not None,
            "LoRA adapters": config.lora_config is not None,
            "multimodal inputs": config.model_config.is_multimodal_model,
            "pipeline parallelism": config.parallel_config.pipeline_parallel_size > 1,
            "a KV connector": config.kv_transfer_config is not None,
            "several kinds of KV caches": len(self.kv_cache_config.kv_cache_groups) > 1,
        }
        return [name for name, is_there in found.items() if is_there]

    @property
    def _pool(self) -> Any:
        return self.kv_cache_manager.block_pool

    def _write(self, entry: dict[str, Any]) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(msgspec.json.encode(entry) + b"\n")
        except OSError as error:  # a full disk must not stop the server
            print(f"recording stops: {self._path}: {error}", file=sys.stderr)
            self._file.close()

    def _described(self, number: int, request: Any) -> list[Any]:
        lengths = request.num_prompt_tokens, request.max_tokens
        arrived_at = round(request.arrival_time, 6)
        return [number, arrived_at, *lengths, request.priority, _hashes(request.block_hashes)]

    def add_request(self, request: Any) -> None:
        """Number the request, and pass it on."""
        if request.request_id not in self._known:
            number, at = next(self._count), round(time.time(), 6)
            self._known[request.request_id] = number, request
            stated = self.stated(number, request, at)
            self._new.append([*self._described(number, request), at, *stated])
        super().add_request(request)

    def stated(self, number: int, request: Any, at: float) -> list[Any]:
        """Return what an order of ours knows of a request."""
        return []

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule an iteration, and note what it will compute."""
        self.now = round(time.time(), 6)
        output = super().schedule(*args, **kwargs)
        # those that finished by themselves are not known any more
        over = [id_ for id_ in output.finished_req_ids if id_ in self._known]
        self._aborted += [self._known.pop(id_)[0] for id_ in over]
        if output.num_scheduled_tokens:
            known, pool = self._known, self._pool
            step = {
                "at": self.now,
                "until": None,
                "new": self._new,
                "rows": [
                    [known[id_][0], known[id_][1].num_computed_tokens - n, n]
                    for id_, n in output.num_scheduled_tokens.items()
                ],
                "preempted": [known[id_][0] for id_ in output.preempted_req_ids or ()],
                "aborted": self._aborted,
                "waiting": self.get_request_counts()[1],
                "queue": [known[r.request_id][0] for r in islice(self.waiting, QUEUE)],
                "blocks_used": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            }
            self._new, self._aborted = [], []
            self._steps.append(step)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Take the sampled tokens, and write the iteration's line."""
        until = time.time()
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        if scheduler_output.num_scheduled_tokens:
            step = self._steps.popleft()
            answers = [answer for part in outputs.values() for answer in part.outputs]
            known = self._known
            tokens = {known[a.request_id][0]: len(a.new_token_ids) for a in answers}
            step["until"] = round(until, 6)
            step["rows"] = [[*row, tokens.get(row[0], 0)] for row in step["rows"]]
            step["finished"], hashes = {}, {}
            for answer in answers:
                if answer.finished:
                    number, request = known.pop(answer.request_id)
                    step["finished"][number] = str(answer.finish_reason)
                    first = request.num_prompt_tokens // self.block_size
                    if len(request.block_hashes) > first:  # those of blocks with its answer
                        hashes[number] = _hashes(request.block_hashes[first:])
            if hashes:
                step["hashes"] = hashes
            self._write(step)
            if not self._file.closed and self._file.tell() > self._most_bytes:
                self._begin_anew()
        return outputs

    def _begin_anew(self) -> None:
        """Begin a file, also while iterations are planned ahead: under load there always are."""
        self._file.close()
        lists = [self._new, *(step["new"] for step in self._steps)]
        new = {number for each in lists for number, *_ in each}
        known = [each for each in self._known.values() if each[0] not in new]
        self._begin([self._described(*each) for each in known])
        # a request that is over, and that the new file does not name: its rows are idle
        named = new.union(number for number, _ in known)
        for step in self._steps:
            step["rows"] = [row for row in step["rows"] if row[0] in named]
            step["queue"] = [number for number in step["queue"] if number in named]
        for aborted in (self._aborted, *(step["aborted"] for step in self._steps)):
            aborted[:] = [number for number in aborted if number in named]


def _hashes(hashes: Any) -> str:
    """Return the beginnings of blocks' hashes in one text, eight characters each."""
    return base64.b64encode(b"".join(each[:HASH] for each in hashes)).decode()


class AsyncRecordingScheduler(RecordingScheduler, AsyncScheduler):
    """Scheduler for vLLM's default, in which an iteration is planned while the last is computed."""
