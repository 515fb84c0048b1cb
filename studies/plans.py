"""`--plan` held against real servers: what share of requests meets the limits with two replicas.

    python -m studies.plans [--costs fake-server] [--seeds 40] [--out DIR]
    python -m studies.plans --fronts ray,proxy --variants static,dynamic --slowdown 8
        --requests 200 [--out DIR]

For each case, which is a variant at one of five workloads, the simulator says where the share of
another trace lies with a probability of 95%. Then two real `fake` servers, to which the client
sends in turn, or a front end that has its own way to choose, serve a trace that was not among the
simulated ones, another one in each case. Limits are those that 95% of a simulated trace meet, and
20 ms at least for the first token, times the slowdown. Fit the costs on this machine first, with
`python -m benchmarks.costs --model fake`, and those of front ends with `python -m benchmarks.fronts
--out results/replicas`: the engine is slowed down so that they leave the cores time to spare. About
six minutes without front ends and twenty with two; nothing else should run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from client.calls import ServerError
from client.load import Watch
from client.wire import Plain
from client.workloads import Workload
from compare.deployments import Deployment, deployed
from compare.measure import Target, measure, warm_up
from compare.report.drawing import LOOKS, STYLE, caption_of
from compare.report.tables import markdown
from compare.servers import server
from compare.variants import Variant
from config import Config, build
from deploy.kinds import KINDS
from simulate import plan
from simulate.costs import FAKE, Costs, CostsError, load, through
from simulate.fleet import Layout
from simulate.plan import Judged, Planner
from simulate.simulated import Simulated
from simulate.trial import Case, Question, Traffic
from studies.runner import Study, write

STUDY = Study(
    "studies.plans", "plans", "What --plan predicts, and what two servers do",
    "where the share of another trace within the limits is expected, and what was measured",
)  # fmt: skip
VARIANTS = {
    "static": Variant("static", {}),
    "windowed": Variant("windowed", {}),
    "dynamic": Variant("dynamic", {}),
    "dynamic, sjf": Variant("dynamic", {"order": "sjf"}),
}
REPLICAS = 2
PLAIN = "plain"  # a client with --url twice, which sends in turn
ROUTERS = {PLAIN: "round_robin", "ray": "power_of_two", "proxy": "least_requests"}
BURST = 400  # requests that measure capacity
MEET = 95  # % of simulated requests meet each of the two limits
# of a first token: below it a limit asks what HTTP does, whose times are a median in simulations
LEAST_TTFT_MS = 20.0
HELD_OUT = 2000  # seed of the first case's measured trace; simulated ones have smaller ones
LIMITS_OF = 900  # seed of the trace that gives the limits
TIMEOUT_S = 600.0
Told = dict[str, Any]  # what became of a case


class Condition(NamedTuple):
    """load: the rate, as a part of what both servers can do."""

    name: str
    load: float
    drawn: Mapping[str, Any]
    arrival: str = "poisson:{:.4g}"


WORKLOADS = (
    Condition("light", 0.5, {}),
    Condition("usual", 0.7, {}),
    Condition("heavy", 0.85, {}),
    Condition("other lengths", 0.7, {"lengths": "lognormal:60:1:500"}),
    Condition("bursty", 0.6, {}, "gamma:{:.4g}:3"),
)


def asked(
    name: str, front: str, workload: Condition, costs: Costs, seed: int, options: Any
) -> Case:
    """What a case asks: a rate of its load, and limits that most requests meet. seed: of the trace
    that is measured.
    """
    config = build(VARIANTS[name].mode, flags_of(name, options.slowdown), {})
    costs = costs.slower(options.slowdown)
    if front != PLAIN:
        costs = through(front, costs)
    n = options.requests
    data = Workload(**workload.drawn, seed=LIMITS_OF)
    rate = workload.load * REPLICAS * capacity(config, costs, data) / data.mean_num_tokens
    arrival = workload.arrival.format(rate)
    layout = Layout(REPLICAS, ROUTERS[front])
    server = Simulated(name, config, costs, layout)
    answers = server.replay(data.requests(n, arrival), math.inf, Watch()).answers
    slo = {
        limit: max(least, float(f"{1e3 * sorted(seconds)[n * MEET // 100]:.3g}"))
        for limit, seconds, least in (
            ("ttft", answers.ttft_s, LEAST_TTFT_MS * options.slowdown),
            ("e2el", answers.e2e_s, 0.0),
        )
    }
    question = Question(
        slo, plan.ATTAINMENT, arrival, n, tuple(range(options.seeds)), costs.uncertainty
    )
    traffic = Traffic(dict(workload.drawn), arrival)
    return Case(name, config, costs, layout, False, traffic, question, seed)


def flags_of(name: str, slowdown: float) -> dict[str, Any]:
    return {"model": FAKE.name, "fake_slowdown": slowdown, **VARIANTS[name].flags}


def capacity(config: Config, costs: Costs, data: Workload) -> float:
    """Tokens per second of one server while every row is busy."""
    one = Simulated("one", config, costs)
    return float(measure(one, data.requests(BURST), {}, math.inf, Watch())[0]["busy_throughput"])


def measured(case: Case, front: str) -> float:
    """The share of requests within the limits, by two real servers. Raises ServerError."""
    question = case.question
    requests = case.traffic.requests(question.requests, case.seed)
    with two(case, front) as target:
        warm_up(target)
        result, _ = measure(target, requests, question.slo, TIMEOUT_S, Watch())
    if result["failed"] or result["partial"]:
        raise ServerError(f"{case.name}: not all were answered: {result['errors']}")
    return float(result["attainment"])


@contextlib.contextmanager
def two(case: Case, front: str) -> Iterator[Target]:
    mode, flags = case.config.mode, flags_of(case.name, case.config.fake_slowdown)
    if front != PLAIN:
        deployment = Deployment(front, REPLICAS, KINDS[front].routers[0])
        with deployed(case.name, deployment, mode, flags, Plain()) as target:
            yield target
        return
    with contextlib.ExitStack() as servers:
        url, *others = [servers.enter_context(server(mode, flags)) for _ in range(REPLICAS)]
        yield Target(case.name, url, Plain(), others=tuple(others))


def told(front: str, workload: Condition, case: Case, judged: Judged, share: float) -> Told:
    low, high = judged.attainment_between
    return {
        "front": front,
        "variant": case.name,
        "workload": workload.name,
        "arrival": case.question.arrival,
        "slo": case.question.slo,
        "predicted": judged.attainments,
        "between": [low, high],
        "measured": share,
        "inside": low <= share <= high,
    }


def percent(cases: Sequence[Mapping[str, Any]]) -> str:
    return f"{plan.coverage(len(cases[0]['predicted'])):.0%}"


def body(cases: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            "through", "variant", "workload", "arrivals", "limits, ms", "expected, %",
            "measured, %", "inside",
        ],
    ]  # fmt: skip
    for case in cases:
        low, high = (100 * share for share in case["between"])
        limits = ", ".join(f"{name} {limit:g}" for name, limit in case["slo"].items())
        rows.append(
            [
                case["front"], case["variant"], case["workload"], case["arrival"], limits,
                f"{low:.1f} to {high:.1f}", f"{100 * case['measured']:.1f}",
                "yes" if case["inside"] else "**no**",
            ]
        )  # fmt: skip
    inside = sum(case["inside"] for case in cases)
    said = f"**{inside} of {len(cases)} measured shares lie inside the {percent(cases)} interval.**"
    return f"{said}\n\n{markdown(rows, left=5)}"


def figure(cases: Sequence[Mapping[str, Any]], caption: str) -> Figure:
    """A line a case: where the share is expected, what each simulated trace had, and a point."""
    colour, missed = LOOKS[2].colour, "#c00000"
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(9.5, 0.34 * len(cases) + 2.2), layout="constrained")
        axes = fig.subplots()
        for y, case in enumerate(cases):
            low, high = (100 * share for share in case["between"])
            axes.hlines(y, low, high, color=colour, lw=9, alpha=0.25)
            simulated = [100 * share for share in case["predicted"]]
            axes.plot(simulated, [y] * len(simulated), "|", color=colour, ms=8)
            axes.plot(
                100 * case["measured"], y, "o", color="#222222" if case["inside"] else missed, ms=7
            )
        names = [f"{case['front']} · {case['variant']} · {case['workload']}" for case in cases]
        axes.set_yticks(range(len(cases)), names)
        axes.invert_yaxis()
        axes.set_xlabel("requests within the limits, %")
        axes.grid(alpha=0.25, axis="x")
        keys = [
            Line2D(
                [], [], color=colour, lw=9, alpha=0.25, label=f"{percent(cases)} of other traces"
            ),
            Line2D([], [], color=colour, ls="", marker="|", ms=8, label="a simulated trace"),
            Line2D([], [], color="#222222", ls="", marker="o", ms=7, label="two real servers"),
        ]
        if not all(case["inside"] for case in cases):
            keys.append(Line2D([], [], color=missed, ls="", marker="o", label="outside"))
        fig.legend(handles=keys, loc="outside lower center", ncols=4, fontsize=11)
        caption_of(fig, caption)
    return fig


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m {STUDY.module}", description="--plan's predictions beside real servers."
    )
    parser.add_argument("--costs", default="fake-server", help="default: fake-server")
    parser.add_argument(
        "--seeds", type=int, default=plan.SEEDS, help=f"simulated traces (default: {plan.SEEDS})"
    )
    parser.add_argument("--variants", default=",".join(VARIANTS), help="default: all")
    parser.add_argument("--fronts", default=PLAIN, help=f"of {', '.join(ROUTERS)} (default: plain)")
    parser.add_argument("--slowdown", type=float, default=1.0, help="of the engine (default: 1)")
    parser.add_argument("--requests", type=int, default=400, help="of a trace (default: 400)")
    parser.add_argument("--cases", type=int, help="only so many of them")
    parser.add_argument("--out", type=Path, default=Path("runs") / STUDY.name, help="folder")
    options = parser.parse_args()
    try:
        costs = load(options.costs)
    except CostsError as error:
        parser.error(str(error))
    fronts, variants = options.fronts.split(","), options.variants.split(",")
    cases = []
    asking = itertools.product(fronts, variants, WORKLOADS)
    for k, (front, name, workload) in enumerate(itertools.islice(asking, options.cases)):
        case = asked(name, front, workload, costs, HELD_OUT + k, options)
        with ProcessPoolExecutor() as pool:  # gone before the servers are timed
            judged = Planner(case, pool, lambda text: None).judge(REPLICAS)
        try:
            share = measured(case, front)
        except ServerError as error:
            sys.exit(f"error: {error}")
        cases.append(told(front, workload, case, judged, share))
        low, high = judged.attainment_between
        print(f"{front} · {name} · {workload.name}: {low:.3f} to {high:.3f}, measured {share:.3f}",
              flush=True)  # fmt: skip
    slowed = f", {options.slowdown:g} times slower" if options.slowdown != 1 else ""
    told_of = (
        f"{REPLICAS} fake servers{slowed} ({options.fronts}), {options.requests} requests; "
        f"{options.seeds} simulated traces, costs {costs.name}"
    )
    source = {name: costs.source.get(name) for name in ("commit", "date", "hardware")}
    write(STUDY, options.out, told_of, body(cases), figure(cases, told_of),
          {"costs": source, "cases": cases})  # fmt: skip


if __name__ == "__main__":
    main()
