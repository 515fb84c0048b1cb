"""A trace served in virtual time by the server's own scheduler, at the cost of `--model fake`."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from client.traces import Request
from client.workloads import Workload
from config import build
from generate.fake import cost_s
from scheduling.building import build_scheduler
from scheduling.inference import Inference, Iteration, Slo, State
from scheduling.records import IterationRecord
from scheduling.sampling import Sampling
from simulate import drive
from stats import Times, times_of

VIRTUAL = "virtual time, with the iteration times of `--model fake`"
BURST = 2000  # requests that show a capacity
BLOCK = 16  # tokens of a KV block
LONGEST = 1024  # tokens of a request
CAPACITY_SEED = 2**31
Settings = dict[str, Any]
SETTINGS: Settings = {"model": "fake", "max_waiting": 10**6}


def pool(kv_blocks: int | None) -> Settings:
    """Return the setting of so many KV blocks; None: the server's default."""
    return {"kv_cache": f"{kv_blocks}blocks"} if kv_blocks else {}


def data_of(lengths: str, seed: int) -> Workload:
    return Workload(lengths, seed=seed, prompts="ids")


class Served(NamedTuple):
    """Inferences with their stamps and tokens, and when the last one ended."""

    inferences: list[Inference]
    end: float

    @property
    def throughput(self) -> float:
        """Completion tokens per second."""
        return sum(len(i.tokens) for i in self.inferences) / self.end


def serve(
    mode: str,
    settings: Settings,
    requests: Sequence[Request],
    observe: Callable[[IterationRecord], None] | None = None,
) -> Served:
    """Serve a trace. observe: called with each iteration."""

    def planned(now: float, iteration: Iteration) -> None:
        if observe is not None:
            seconds = cost_s(iteration) if iteration.rows else 0.0
            observe(IterationRecord(now, seconds, iteration))

    inferences = [
        Inference(
            request.ids,
            request.num_tokens,
            Sampling(seed=request.seed or 0),
            user=request.user,
            priority=request.priority or 0,
            slo=Slo(request.slo_ttft_ms, request.slo_tpot_ms, request.slo_class),
        )
        for request in requests
    ]
    config = build(mode, SETTINGS | settings, {})
    arrivals = [(request.at, [inference]) for request, inference in zip(requests, inferences)]
    end = drive(build_scheduler(config), arrivals, cost_s, planned=planned)
    return Served(inferences, end)


def latencies(inferences: Sequence[Inference]) -> list[float]:
    """Return end-to-end latencies of the answered ones, in seconds."""
    return [times_of(i).e2e_s for i in inferences if i.state is State.FINISHED]


def mean_and_p99(inferences: Sequence[Inference], of: str = "") -> dict[str, float]:
    """Return measures of latency, in seconds."""
    seconds = latencies(inferences)
    p99 = float(np.percentile(seconds, 99))
    return {f"{of}mean_s": statistics.mean(seconds), f"{of}p99_s": p99}


def while_waiting(times: Times) -> float:
    """Return the requests completed a second until the last one is admitted. times: of a trace in
    which requests wait all the time until then.
    """
    end = float(np.max(times.admitted_at))
    return float(np.sum(times.answered_at <= end)) / end


class Capacity(NamedTuple):
    """Completions of `dynamic` with `fcfs` per second while requests always wait."""

    requests: float
    tokens: float  # completion tokens
    prompt_tokens: float


@functools.cache
def capacity(rows: int, lengths: str, kv_blocks: int | None = None) -> Capacity:
    burst = data_of(lengths, CAPACITY_SEED).requests(BURST, "burst", scaled=True)
    settings = {"max_batch_size": rows, **pool(kv_blocks)}
    rate = BURST / serve("dynamic", settings, burst).end
    tokens = statistics.mean(request.num_tokens for request in burst)
    return Capacity(rate, rate * tokens, rate * statistics.mean(len(r.ids) for r in burst))


def pool_of(requests: float, data: Workload, more: float = 0.0) -> int:
    """Return the KV blocks for all tokens of so many requests of mean length, and `more` blocks; at
    least those of the longest request.
    """
    drawn = data.requests(2000, "burst")
    tokens = statistics.mean(len(r.ids) + r.num_tokens for r in drawn)
    return max(round(requests * tokens / BLOCK + more), LONGEST // BLOCK)
