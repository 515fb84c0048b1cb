"""The question of a plan; and its trials: one trace, served by replicas in virtual time."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from client import draws
from client.analysis import queue_grows
from client.arguments import parse_goodput
from client.draws import Sessions
from client.measure import judged
from client.summary import meet
from client.trace_file import Context, TraceFile
from client.traces import Request, Trace
from client.users import Users
from client.workloads import Workload
from config import Config, ConfigError, flag
from simulate.costs import Costs
from simulate.fleet import Layout
from simulate.jobs import Stoppable
from simulate.server import SimulatedServer

ATTAINMENT = 0.99  # unless it is given
SEEDS = 40  # the least and the most of so many values enclose 95% of others (`plan.coverage`)


@dataclass(frozen=True)
class Question:
    """Limits to be met, the share of requests that must meet them, and the traffic.

    slo: limits in ms. arrival: in words. requests: of a trace; None where the traffic has a number
    of its own, or where `rate` (requests per second) and what the growth of a queue needs determine
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


def question_of(known: argparse.Namespace, costs: Costs, repeats: bool) -> Question:
    """Return the question that --plan answers. repeats: --repeats is given. Raises ConfigError."""
    if not known.slo:
        raise ConfigError("--plan needs limits: --slo ttft:200 tpot:50")
    for name in ("sweep", "fail", "goodput", "replicas"):
        if getattr(known, name):
            raise ConfigError(
                f"--plan draws traces and tries replicas itself; leave out {flag(name)}"
            )
    share = ATTAINMENT if known.attainment is None else known.attainment
    if not 0 < share <= 1:
        raise ConfigError("--attainment must be above 0, and 1 at most")
    slo, n = parse_goodput(known.slo, "--slo"), known.repeats if repeats else SEEDS
    traffic = str(known.trace) if known.trace else " ".join(known.users or ())
    arrival = " at ".join(filter(None, (traffic, known.arrival)))
    seeds, drawn = tuple(range(known.seed, known.seed + n)), not known.trace or bool(known.arrival)
    of_run = share, arrival, known.numsamples, seeds, costs.uncertainty, _rate(known), drawn
    return Question(slo, *of_run)


def _rate(known: argparse.Namespace) -> float | None:
    """Return the requests per second; None where users or a trace have a length of their own.

    Raises ConfigError, and WorkloadError for an unknown arrival.
    """
    if known.users:
        users = Users(known.users)
        return None if users.until else users.rate
    if known.trace and not known.arrival:
        return None
    kind, _, rest = (known.arrival or "").partition(":")
    if kind not in ("poisson", "gamma", "constant"):
        raise ConfigError(
            "--plan needs the rate of requests: --arrival poisson:200, or --users, or a --trace "
            "that has it"
        )
    draws.arrivals(known.arrival, 1, known.seed)
    turns = Sessions.parse(known.sessions).turns if known.sessions else 1
    return None if known.trace else turns * draws.number(rest.split(":")[0])


class Traffic(NamedTuple):
    """Requests that are drawn from a seed, or those of a trace file.

    data: fields of Workload. arrival: "" where users or a file determine it; otherwise it replaces
    a file's times, too.
    """

    data: Mapping[str, Any]
    arrival: str = ""
    trace: TraceFile | None = None
    context: Context | None = None

    def requests(self, n: int | None, seed: int) -> Trace:
        """Return the trace of a seed. Raises WorkloadError."""
        if self.trace is None:
            return Workload(**self.data, seed=seed).requests(n, self.arrival)
        trace = _loaded(self.trace, self.context)
        return trace.sent_as(self.arrival, seed) if self.arrival else trace


@functools.lru_cache(maxsize=1)  # a process serves it many times
def _loaded(file: TraceFile, context: Context | None) -> Trace:
    return file.requests(context)[0]


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
        return self.result(*self._drawn())

    def alone(self) -> TrialResult:
        """Serve each request of that trace by the fastest replica when it is idle, without its
        adapter and what a prefix cache can hold, and without delays and padding that others can
        end.
        """
        requests, costs = self._drawn()
        ended = {"max_batch_delay_ms": 0.0, "loop_interval_ms": 0.0, "decoder_batch_sizes": ()}
        config = self.config.model_copy(update=ended)
        layout = Layout(slow={0: min([1.0, *self.layout.slow.values()])})
        fields = {"model": None} | ({"prompt_ids": [0]} if config.prefix_caching else {})
        return self._replace(config=config, layout=layout).by_one(requests, 1, costs, **fields)

    def by_one(
        self, requests: Sequence[Request], users: int | None, costs: Costs, **fields: Any
    ) -> TrialResult:
        """Serve requests with these fields by one replica, `users` at a time, or all at once. A
        later turn of a conversation comes as if it were its first, which is faster.
        """
        fields |= {"at": 0.0, "users": users, "after": None, "think_s": None}
        trace = [request.model_copy(update=fields) for request in requests]
        return self.result(trace, costs)._replace(queue_grows=False)

    def _drawn(self) -> tuple[Trace, Costs]:
        rng = np.random.default_rng([self.seed, 11])
        factor = math.exp(self.question.uncertainty * rng.standard_normal())
        requests = self.traffic.requests(self.question.requests, self.seed)
        return requests, self.costs.scaled(factor)

    def result(self, requests: Sequence[Request], costs: Costs) -> TrialResult:
        """Serve these requests."""
        layout = replace(self.layout, seed=self.seed)
        server = SimulatedServer(self.name, self.config, costs, layout, stream=self.stream)
        outcomes = server.replay(requests, watch=Stoppable())
        slo, n = self.question.slo, len(requests)
        measures = judged(requests, outcomes, slo)
        p99 = measures["p99_ttft_ms"] or math.inf, measures["p99_e2el_ms"] or math.inf
        within = {k: float(meet(outcomes.answers, {k: v}).sum()) / n for k, v in slo.items()}
        grows, slowest_row_s = queue_grows(measures), measures["slowest_row_s"]
        return TrialResult(measures["attainment"], grows, slowest_row_s, *p99, n, within)


class TrialResult(NamedTuple):
    """Measures of a trial."""

    attainment: float
    queue_grows: bool
    slowest_row_s: float
    p99_ttft_ms: float
    p99_e2el_ms: float
    requests: int
    within: dict[str, float]  # share of the requests that are answered within each limit
