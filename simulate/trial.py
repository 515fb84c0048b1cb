"""A trial of a plan: one trace, served by a number of replicas in virtual time."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from client.traces import Request, Trace, load_trace
from client.workloads import Workload
from compare.analysis import queue_grows
from compare.measure import judged
from config import Config
from simulate.costs import Costs
from simulate.fleet import Layout
from simulate.jobs import Stoppable
from simulate.run import SimulatedServer


@dataclass(frozen=True)
class Question:
    """Limits to be met, the share of requests that must meet them, and the traffic.

    slo: limits in ms. arrival: in words. requests: of a trace; None where the traffic has a number
    of its own, or where `rate` (requests a second) and what the growth of a queue needs determine
    it. uncertainty: relative standard deviation of the costs as a whole, from their fit. drawn:
    each seed has traffic of its own.
    """

    slo: dict[str, float]
    attainment: float
    arrival: str
    requests: int | None
    seeds: tuple[int, ...]
    uncertainty: float
    rate: float | None = None
    drawn: bool = True

    @property
    def limits(self) -> str:
        return ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in self.slo.items())


class Traffic(NamedTuple):
    """Requests that are drawn from a seed, or those of a trace file.

    data: fields of Workload. arrival: "" where users or a file determine it; otherwise it replaces
    a file's times, too.
    """

    data: Mapping[str, Any]
    arrival: str = ""
    trace: Path | None = None
    scale: int | None = None

    def requests(self, n: int | None, seed: int) -> Trace:
        """Return the trace of a seed. Raises WorkloadError."""
        if self.trace is None:
            return Workload(**self.data, seed=seed).requests(n, self.arrival)
        trace = _loaded(self.trace, self.scale)
        return Trace.of(trace).sent_as(self.arrival, seed) if self.arrival else trace


@functools.lru_cache(maxsize=1)  # a process serves it many times
def _loaded(path: Path, scale: int | None) -> Trace:
    return Trace.of(load_trace(path, scale))


class Trial(NamedTuple):
    """A trace and the servers that serve it; picklable, since processes share the trials."""

    name: str
    config: Config
    costs: Costs
    layout: Layout
    stream: bool
    traffic: Traffic
    question: Question
    seed: int

    def serve(self) -> TrialResult:
        """Serve the trace of the seed, at costs that are drawn with it within their uncertainty."""
        rng = np.random.default_rng([self.seed, 11])
        factor = math.exp(self.question.uncertainty * rng.standard_normal())
        requests = self.traffic.requests(self.question.requests, self.seed)
        return self.result(requests, self.costs.scaled(factor))

    def result(self, requests: Sequence[Request], costs: Costs) -> TrialResult:
        """Serve these requests."""
        layout = replace(self.layout, seed=self.seed)
        server = SimulatedServer(self.name, self.config, costs, layout, stream=self.stream)
        outcomes = server.replay(requests, watch=Stoppable())
        measures = judged(requests, outcomes, self.question.slo)
        return TrialResult(
            measures["attainment"],
            queue_grows(measures),
            measures["slowest_row_s"],
            measures["p99_ttft_ms"] or math.inf,
            measures["p99_e2el_ms"] or math.inf,
            len(requests),
            server.replicas["replica_s"] / float(outcomes.ended["ended_at"].max()),
        )


class TrialResult(NamedTuple):
    """Measures of a trial."""

    attainment: float
    queue_grows: bool
    slowest_row_s: float
    p99_ttft_ms: float
    p99_e2el_ms: float
    requests: int
    mean_replicas: float
