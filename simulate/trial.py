"""The question of --find; and its trials: one trace, served by replicas in virtual time."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from client import draws
from client.analysis import queue_grows
from client.draws import Sessions
from client.measure import burst_size, judged
from client.summary import meet
from client.traces import Request, Trace, load_trace
from client.users import Users
from client.workloads import Workload
from config import Config, ConfigError, flag
from simulate.costs import Costs
from simulate.fleet import Layout
from simulate.jobs import Stoppable
from simulate.server import SimulatedServer
from stats import IN_RESULTS, LIMITED

if TYPE_CHECKING:
    from simulate.vllm.foreseen import OwnServer

ATTAINMENT = 0.99  # unless it is given
SEEDS = 40
SAMPLE = 1_000  # requests that stand for a trace
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
RATES = ("goodput", "request_throughput", "output_throughput", "total_token_throughput")
MEASURES = [*RATES, *(f"{each}_{m.name}_ms" for m in IN_RESULTS for each in STATISTICS)]
WORST = 1e9  # in place of milliseconds of which a trace has none


@dataclass(frozen=True)
class Question:
    """Limits to be met, the share of requests that must meet them, the traffic, and the measure by
    which the best is chosen.

    slo: limits in ms: of each request ("ttft"), or of a statistic of a trace ("e2el:p99").
    arrival: in words. requests: of a trace; None where the traffic has a number of its own, or
    where `rate` (requests per second) and what the growth of a queue needs determine it.
    uncertainty: relative standard deviation of the costs as a whole, from their fit. drawn: each
    seed has traffic of its own.
    """

    slo: dict[str, float]
    attainment: float
    arrival: str
    requests: int | None
    seeds: tuple[int, ...]
    uncertainty: float
    rate: float | None = None
    drawn: bool = True
    measure: str = RATES[0]

    @property
    def of_requests(self) -> dict[str, float]:
        """The limits of each request, without those of statistics."""
        return {name: limit for name, limit in self.slo.items() if ":" not in name}

    @property
    def sign(self) -> int:
        """1 if more of the measure is better, else -1."""
        return 1 if self.measure in RATES else -1

    def limits(self, names: Collection[str] = ()) -> str:
        """Return these limits, or all, in words."""
        pairs = [(name, self.slo[name]) for name in names or self.slo]
        return ", ".join(f"{name.replace(':', ' ')} ≤ {limit:g} ms" for name, limit in pairs)


def limits_of(texts: Sequence[str]) -> dict[str, float]:
    """Return {"ttft": 200, "e2el:p99": 2000} for "ttft:200" and "e2el:p99:2000". Raises
    ConfigError.
    """
    limits = {}
    for text in texts:
        name, _, value = text.rpartition(":")
        measure, _, statistic = name.partition(":")
        try:
            known = measure in LIMITED and statistic in ("", *STATISTICS)
            if not known or name.endswith(":") or not 0 < float(value) < math.inf:
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"--slo {text!r}: give ttft:MS, tpot:MS or e2el:MS for each request, or e2el:p99:MS"
                f" for a statistic of all ({', '.join(STATISTICS)})"
            ) from None
        limits[name] = float(value)
    return limits


def question_of(
    known: argparse.Namespace, costs: Costs, seeds: int, recorded: bool = False
) -> Question:
    """Return the question that --find answers. recorded: its requests are those of a recording.
    Raises ConfigError.
    """
    if not known.slo:
        raise ConfigError("--find needs limits: --slo ttft:200 e2el:p99:2000")
    for name in ("sweep", "fail", "goodput", "replicas"):
        if getattr(known, name):
            more = ", or write --find replicas=N" if name == "replicas" else ""
            raise ConfigError(f"--find draws traces of its own; leave out {flag(name)}{more}")
    share = ATTAINMENT if known.attainment is None else known.attainment
    if not 0 < share <= 1:
        raise ConfigError("--attainment must be above 0, and 1 at most")
    if (measure := vars(known)["for"] or RATES[0]) not in MEASURES:
        raise ConfigError(
            f"--for {measure}: name one of {', '.join(RATES)}, or a latency such as mean_e2el_ms"
        )
    traffic = str(known.vllm if recorded else known.trace or " ".join(known.users or ()))
    return Question(
        limits_of(known.slo),
        share,
        " at ".join(filter(None, (traffic, known.arrival))),
        known.numsamples,
        tuple(range(known.seed, known.seed + seeds)),
        costs.uncertainty,
        None if recorded else _rate(known),
        recorded or not known.trace or bool(known.arrival),
        measure,
    )


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
            "--find needs the rate of requests: --arrival poisson:200, or --users, or a --trace "
            "that has it"
        )
    draws.arrivals(known.arrival, 1, known.seed)
    turns = Sessions.parse(known.sessions).turns if known.sessions else 1
    return None if known.trace else turns * draws.number(rest.split(":")[0])


class Traffic(NamedTuple):
    """Requests that are drawn from a seed, or those of a trace file or of a recording.

    data: fields of Workload. arrival: "" where users or a file determine it; otherwise it replaces
    a file's times, too. own: one's own server, whose requests are sent as recorded if it `replays`.
    first: seed, for which they come as they did.
    """

    data: Mapping[str, Any]
    arrival: str = ""
    trace: Path | None = None
    scale: int | None = None
    own: OwnServer | None = None
    replays: bool = False
    first: int = 0

    def requests(self, n: int | None, seed: int) -> Trace:
        """Return the trace of a seed. Raises WorkloadError."""
        if self.own and self.replays:
            trace = self.own.traffic.trace(seed - self.first)
        elif self.trace:
            trace = _loaded(self.trace, self.scale)
        else:
            return Workload(**self.data, seed=seed).requests(n, self.arrival)
        return trace.sent_as(self.arrival, seed) if self.arrival else trace

    def factor(self, uncertainty: float, seed: int) -> float:
        """Return the factor of a seed's costs, drawn within their uncertainty."""
        if self.own:
            return self.own.factor(seed - self.first)
        return math.exp(uncertainty * np.random.default_rng([seed, 11]).standard_normal())


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
        return self.result(*self._drawn())

    def fills_s(self) -> float:
        """Return the seconds in which requests that fill an empty server, all at once, are served;
        a later turn of a conversation as if it were its first, which is faster.
        """
        trace = self.traffic.requests(self.question.requests, self.seed)
        sample = trace[:: max(1, len(trace) // SAMPLE)][: burst_size(self.config)]
        fields = {"at": 0.0, "users": None, "after": None, "think_s": None}
        burst = [request.model_copy(update=fields) for request in sample]
        return self.result(burst, self.costs).slowest_row_s

    def _drawn(self) -> tuple[Trace, Costs]:
        factor = self.traffic.factor(self.question.uncertainty, self.seed)
        requests = self.traffic.requests(self.question.requests, self.seed)
        return requests, self.costs.scaled(factor)

    def result(self, requests: Sequence[Request], costs: Costs) -> TrialResult:
        """Serve these requests."""
        trace, own, question = Trace.of(requests), self.traffic.own, self.question
        server = SimulatedServer(
            self.name,
            self.config,
            costs,
            replace(self.layout, seed=self.seed),
            stream=self.stream,
            jump=own is None or own.can_jump(self.config),
        )
        outcomes = server.replay(trace, watch=Stoppable())
        measures = judged(trace, outcomes, {})
        answered, wall_s = np.flatnonzero(outcomes.rows["answered"]), measures["wall_clock_s"]

        def within(name: str) -> float:
            measure, _, statistic = name.partition(":")
            if statistic:
                return float((measures[f"{statistic}_{measure}_ms"] or WORST) <= question.slo[name])
            return share({name: question.slo[name]})

        def share(limits: Mapping[str, float]) -> float:
            return float(meet(outcomes.answers, trace.limits_ms(answered, limits)).sum()) / len(
                trace
            )

        def value(share: float) -> float:
            goodput = share * len(trace) / (wall_s or math.inf)
            found = goodput if question.measure == "goodput" else measures[question.measure]
            return float(found or (0.0 if question.sign > 0 else WORST))

        shares = {
            left_out: share({k: v for k, v in question.of_requests.items() if k != left_out})
            for left_out in ("", *question.slo)
        }
        return TrialResult(
            {left_out: value(each) for left_out, each in shares.items()},
            shares,
            {name: within(name) for name in question.slo},
            queue_grows(measures),
            measures["slowest_row_s"],
            measures["p99_ttft_ms"] or WORST,
            measures["p99_e2el_ms"] or WORST,
            len(trace),
        )


class TrialResult(NamedTuple):
    """Measures of a trial. values, shares: the measure that was asked for, and the share of
    requests within the limits of each, with all limits ("") and without each one of them.
    """

    values: dict[str, float]
    shares: dict[str, float]
    within: dict[str, float]  # of each limit: the share of requests; of a statistic 0 or 1
    queue_grows: bool
    slowest_row_s: float
    p99_ttft_ms: float
    p99_e2el_ms: float
    requests: int

    def meets(self, least: float, without: str = "") -> bool:
        """Return whether this share of the requests is within the limits, but for one of them."""
        others = [share for name, share in self.within.items() if ":" in name and name != without]
        return self.shares[without] >= least and min(others, default=1.0) >= least
