"""Traces served in virtual time by the server's own scheduler, at stated costs."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from client.measure import judged
from client.outcomes import Answers, Outcomes
from client.results import OF_FILE
from client.traces import Request
from client.workloads import Workload
from generate.auto import build
from scheduling.inference import Inference
from scheduling.records import IterationRecord
from simulate.costs import FAKE, Costs
from simulate.server import SimulatedServer
from stats import Times

VIRTUAL = "virtual time, with the iteration times of `--model fake`"
BURST = 2000  # requests that show a capacity
BLOCK = 16  # tokens of a KV block
CAPACITY_SEED = 2**31
Settings = Mapping[str, Any]  # of a server; "mode", if it is not dynamic, among them
SETTINGS: Settings = {"model": "fake", "max_waiting": 10**6}
NO_LIMITS: Mapping[str, float] = {}


class Seen:
    """Observer that keeps all iterations of a trace, and the inferences that were answered."""

    def __init__(self) -> None:
        self.records: list[IterationRecord] = []
        self.inferences: list[Inference] = []

    def iteration(self, record: IterationRecord) -> None:
        self.records.append(record)

    def answered(self, inference: Inference) -> None:
        self.inferences.append(inference)

    @property
    def busy_s(self) -> float:
        return sum(record.seconds for record in self.records)


def server(settings: Settings, costs: Costs = FAKE, **more: Any) -> SimulatedServer:
    """Return a simulated server. more: its other arguments."""
    flags = {**SETTINGS, **settings}
    mode = flags.pop("mode", "dynamic")
    return SimulatedServer(mode, build(mode, flags, {}), costs, **more)


def measures(
    server: SimulatedServer, requests: Sequence[Request], limits: Mapping[str, float] = NO_LIMITS
) -> dict[str, Any]:
    """Serve a trace; return the client's measures. limits: those that goodput counts by, in ms."""
    return judged(requests, server.replay(requests), limits).json(OF_FILE)


def served(settings: Settings, requests: Sequence[Request], **more: Any) -> tuple[Outcomes, Seen]:
    """Serve a trace; return what the client and what an observer saw."""
    seen = Seen()
    return server(settings, observe=lambda scheduler: seen, **more).replay(requests), seen


def throughput(outcomes: Outcomes) -> float:
    """Return completion tokens per second."""
    tokens: float = outcomes.answers["completion_tokens"].sum()
    return tokens / float(outcomes.ended["ended_at"].max())


def pool(kv_blocks: int | None) -> Settings:
    """Return the setting of so many KV blocks; None: the server's default."""
    return {"kv_cache": f"{kv_blocks}blocks"} if kv_blocks else {}


def by_time(requests: Sequence[Request]) -> list[Request]:
    """Return requests in the order of their arrivals, and numbered so."""
    ordered = sorted(requests, key=lambda request: request.at)
    return [request.model_copy(update={"id": i}) for i, request in enumerate(ordered)]


def data_of(lengths: str, seed: int) -> Workload:
    return Workload(lengths, seed=seed, prompts="ids")


def mean_and_p99(answers: Answers, of: str = "") -> dict[str, float]:
    """Return measures of latency, in seconds."""
    p99 = float(np.percentile(answers.e2e_s, 99))
    return {f"{of}mean_s": float(answers.e2e_s.mean()), f"{of}p99_s": p99}


def while_waiting(times: Times) -> float:
    """Return the requests completed per second until the last one is admitted. times: of a trace in
    which requests wait all the time until then.
    """
    end = float(np.max(times.admitted_at))
    return float(np.sum(times.answered_at <= end)) / end


@functools.cache
def capacity(rows: int, lengths: str, kv_blocks: int | None = None) -> float:
    """Return the requests per second that `dynamic` with `fcfs` completes of a burst."""
    burst = data_of(lengths, CAPACITY_SEED).requests(BURST, "burst", scaled=True)
    result = measures(server({"max_batch_size": rows, **pool(kv_blocks)}), burst)
    return BURST / result["wall_clock_s"]
