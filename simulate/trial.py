"""A trial of a plan: a trace that so many replicas serve in virtual time, and what came of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from client.load import Watch
from client.traces import Request, Trace, load_trace
from client.workloads import Workload
from compare.analysis import queue_grows
from compare.measure import judged
from config import Config
from simulate.costs import Costs
from simulate.fleet import Layout
from simulate.simulated import Simulated


@dataclass(frozen=True)
class Question:
    """What must be met: `attainment` of the requests within the limits `slo` (ms), and by what.

    arrival: in words. requests: of a trace; None where the traffic has a number of its own, or
    `rate` (requests a second) and what the growth of a queue needs say how many. uncertainty:
    relative standard deviation of what the costs say as a whole, from their fit. drawn: each seed
    has traffic of its own.
    """

    slo: dict[str, float]
    attainment: float
    arrival: str
    requests: int | None
    seeds: tuple[int, ...]
    uncertainty: float
    rate: float | None = None
    drawn: bool = True


class Traffic(NamedTuple):
    """What arrives: requests that are drawn from a seed, or those of a trace file.

    data: of Workload. arrival: "" where users or a file say when; of a file others are drawn.
    """

    data: Mapping[str, Any]
    arrival: str = ""
    trace: Path | None = None
    scale: int | None = None

    def requests(self, n: int | None, seed: int) -> Trace:
        """Raises WorkloadError."""
        if self.trace is None:
            return Workload(**self.data, seed=seed).requests(n, self.arrival)
        trace = _loaded(self.trace, self.scale)
        return Trace.of(trace).sent_as(self.arrival, seed) if self.arrival else trace


@functools.lru_cache(maxsize=1)  # a process serves it many times
def _loaded(path: Path, scale: int | None) -> Trace:
    return Trace.of(load_trace(path, scale))


class Case(NamedTuple):
    """A trace that so many replicas serve; picklable, since several processes serve them."""

    name: str
    config: Config
    costs: Costs
    layout: Layout
    stream: bool
    traffic: Traffic
    question: Question
    seed: int


class Found(NamedTuple):
    """What came of a case."""

    attainment: float
    grows: bool  # the queue
    slowest_row_s: float
    p99_ttft_ms: float
    p99_e2el_ms: float
    requests: int
    mean_replicas: float


def serve(case: Case) -> Found:
    """Serve one trace. The uncertainty of the costs is drawn with the seed."""
    rng = np.random.default_rng([case.seed, 11])
    factor = math.exp(case.question.uncertainty * rng.standard_normal())
    requests = case.traffic.requests(case.question.requests, case.seed)
    return found(case, requests, case.costs.scaled(factor))


def found(case: Case, requests: Sequence[Request], costs: Costs) -> Found:
    layout = replace(case.layout, seed=case.seed)
    server = Simulated(case.name, case.config, costs, layout, stream=case.stream)
    outcomes = server.replay(requests, math.inf, Watch())
    result = judged(requests, outcomes, case.question.slo)
    return Found(
        result["attainment"],
        queue_grows(result),
        result["slowest_row_s"],
        result["p99_ttft_ms"] or math.inf,
        result["p99_e2el_ms"] or math.inf,
        len(requests),
        server.replicas["replica_s"] / float(outcomes.ended["ended_at"].max()),
    )
