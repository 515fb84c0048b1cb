"""The question of --find; and its trials: one trace, served by replicas in virtual time."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from client import draws
from client.analysis import queue_grows
from client.arguments import parse_limits
from client.draws import Sessions
from client.measure import burst_size, judged
from client.outcomes import Outcomes
from client.price import costs as cost_of
from client.results import Json, Result
from client.summary import meet
from client.trace_file import Context, TraceFile
from client.traces import Trace
from client.users import Users
from client.workloads import Workload
from config.config import Config
from config.settings import ConfigError, flag
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
    arrival: in words. requests: how many a trace has; None where the traffic has a number of its
    own, or where `rate` (requests per second) and what the growth of a queue needs determine it.
    uncertainty: relative standard deviation of the costs as a whole, from their fit. drawn: each
    seed has traffic of its own. price: a machine's per hour.
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
    price: float | None = None

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
    names = [*LIMITED, *(f"{measure}:{each}" for measure in LIMITED for each in STATISTICS)]
    form = (
        "ttft:MS, tpot:MS or e2el:MS for each request, or e2el:p99:MS for a statistic of all "
        f"({', '.join(STATISTICS)})"
    )
    return parse_limits(texts, "--slo", names, form)


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
        known.price,
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

    data: Json
    arrival: str = ""
    trace: TraceFile | None = None
    context: Context | None = None
    own: OwnServer | None = None
    replays: bool = False
    first: int = 0

    def requests(self, n: int | None, seed: int) -> Trace:
        """Return the trace of a seed. Raises WorkloadError."""
        if self.own and self.replays:
            trace = self.own.traffic.trace(seed - self.first)
        elif self.trace:
            trace = _loaded(self.trace, self.context)
        else:
            drawn = Workload(**self.data, seed=seed, context=self.context)
            return drawn.requests(n, self.arrival)
        return trace.sent_as(self.arrival, seed) if self.arrival else trace

    def factor(self, uncertainty: float, seed: int) -> float:
        """Return the factor of a seed's costs, drawn within their uncertainty."""
        if self.own:
            return self.own.factor(seed - self.first)
        return math.exp(uncertainty * np.random.default_rng([seed, 11]).standard_normal())


@functools.lru_cache(maxsize=1)  # a process serves it many times
def _loaded(file: TraceFile, context: Context | None) -> Trace:
    return file.requests(context)[0]


def _known(value: float | None, worst: float = WORST) -> float:
    """Return a measure, or the worst where no answer has it. 0 is one."""
    return worst if value is None else float(value)


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
        question = self.question
        trace = self.traffic.requests(question.requests, self.seed)
        factor = self.traffic.factor(question.uncertainty, self.seed)
        outcomes, result = self._served(trace, self.costs.scaled(factor))
        answered, wall_s = np.flatnonzero(outcomes["answered"]), result.wall_clock_s
        values, shares = dict[str, float](), dict[str, float]()
        for without in (*question.slo, ""):
            limits = {k: v for k, v in question.of_requests.items() if k != without}
            within = meet(outcomes.answers, trace.limits_ms(answered, limits))
            shares[without] = float(within.sum()) / len(trace)
            result = replace(result, goodput=shares[without] * len(trace) / (wall_s or math.inf))
            worst = 0.0 if question.sign > 0 else WORST
            values[without] = _known(result.number(question.measure), worst)
        of_traces = {name: name.split(":") for name in question.slo if ":" in name}
        found = {k: _known(result.number("{1}_{0}_ms".format(*n))) for k, n in of_traces.items()}
        return TrialResult(
            values,
            shares,
            [name for name, ms in found.items() if ms > question.slo[name]],
            queue_grows(result),
            _known(result.ttft.p99),
            _known(result.e2el.p99),
            {} if question.price is None else cost_of(result, question.price),
        )

    def fills_s(self) -> float:
        """Return the seconds in which requests that fill an empty server, all at once, are served;
        a later turn of a conversation as if it were its first, which is faster.
        """
        trace = self.traffic.requests(self.question.requests, self.seed)
        sample = trace[:: max(1, len(trace) // SAMPLE)][: burst_size(self.config)]
        fields = {"at": 0.0, "users": None, "after": None, "think_s": None}
        burst = Trace.of([request.model_copy(update=fields) for request in sample])
        return float(self._served(burst, self.costs)[1].slowest_row_s)

    def _served(self, trace: Trace, costs: Costs) -> tuple[Outcomes, Result]:
        """Serve these requests; return the outcomes and the measures."""
        own = self.traffic.own
        server = SimulatedServer(
            self.name,
            self.config,
            costs,
            replace(self.layout, seed=self.seed),
            stream=self.stream,
            jump=own is None or own.can_jump(self.config),
        )
        outcomes = server.replay(trace, watch=Stoppable())
        result = judged(trace, outcomes, {})
        return outcomes, replace(result, server={"replicas": server.replicas})


class TrialResult(NamedTuple):
    """Measures of a trial. values, shares: the measure that was asked for, and the share of
    requests within the limits of each, with all limits ("") and without each one of them.
    """

    values: dict[str, float]
    shares: dict[str, float]
    beyond: list[str]  # limits of statistics that the trace does not meet
    queue_grows: bool
    p99_ttft_ms: float
    p99_e2el_ms: float
    costs: dict[str, float | None]  # by client.price, if there is a price

    def meets(self, least: float, without: str = "") -> bool:
        """Return whether this share of the requests is within the limits, but for one of them."""
        return self.shares[without] >= least and not {*self.beyond} - {without}
