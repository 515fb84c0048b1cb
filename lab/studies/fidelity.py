"""The simulator beside real servers, on traces that its costs were not fitted to.

Each trace is served by two fresh servers, an hour or so apart, and by a simulated one at the costs
of `python -m simulate.measure_costs` on the same machine. A burst shows the capacity of a case;
loads are shares of it. Finished runs stay valid when the simulator or the costs change.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from client.draws import TokenIds
from client.load import Watch
from client.measure import Measurable, Target, measure, warm_up
from client.traces import Request
from client.wire import Plain
from client.workloads import Workload
from compare.report.tables import markdown
from compare.servers import server
from config.config import Config
from lab.studies import virtual
from lab.studies.runner import FinishedRuns
from lab.studies.study import Case, Cases, Panel, Study, Table, load_of, mean, only
from simulate.costs import load
from simulate.server import SimulatedServer

BURST = "burst"
LOADS = (0.5, 0.7, 0.85, 0.95, 1.2)  # shares of the capacity that a burst on a real server shows
JUDGED = 0.85  # highest load whose errors have a target; beyond it they are reported
FIRST_SEED = 1000  # calibration draws from smaller ones
ONE_BY_ONE = 30  # requests of a trace for nobatch
EVERY, LONG = 3, (200, 700)  # every third prompt is long, of so many tokens
TIMEOUT_S = 600.0  # longest time for a request
MET, BY_SPREAD, MISSED, REPORTED = "met", "met by spread", "**missed**", "reported"
TARGETS = {"capacity": 3.0, "p50": 5.0, "p99": 10.0}  # largest relative error, %
LEAST = {"p99": 2000}  # real requests in all runs, with fewer of which it is not judged
CACHING = "dynamic, prefix caching"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{mode: (mode, {}) for mode in ("nobatch", "static", "windowed", "dynamic")},
    # so few blocks that rows are preempted
    "dynamic, demand": ("dynamic", {"kv_reservation": "demand", "kv_cache": "160blocks"}),
    CACHING: ("dynamic", {"prefix_caching": True}),
    "dynamic, sjf": ("dynamic", {"order": "sjf"}),
}
PLAIN, LONG_PROMPTS, PREFIXES = "plain", "long prompts", "shared prefixes"
KINDS: dict[str, tuple[dict[str, Any], str]] = {  # a kind's Workload, and its arrivals
    PLAIN: ({}, "poisson:{:g}"),
    "other lengths": ({"lengths": "lognormal:60:1:700"}, "poisson:{:g}"),
    "bursty": ({}, "gamma:{:g}:3"),
    PREFIXES: ({"prefixes": "8:128:1"}, "poisson:{:g}"),
    LONG_PROMPTS: ({"prompts": "ids"}, "poisson:{:g}"),
}
Trial = dict[str, Any]  # what one server, real or simulated, showed of a trace
SOME = (0.85, 1.2)
# by part: the costs, and settings of the model where the part's name does not say all
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "fake": ("fake-server", {}),
    "demo": ("demo", {}),
    "gpt2": ("gpt2", {"weights": "random", "tokenizer": "bytes"}),
}
# by part and kind of trace: variants, and loads
PARTS: dict[str, dict[str, tuple[Iterable[str], Sequence[float]]]] = {
    "fake": {
        PLAIN: (VARIANTS, LOADS),
        "other lengths": (["static", "dynamic", "dynamic, sjf"], SOME),
        "bursty": (["windowed", "dynamic"], SOME),
        PREFIXES: ([CACHING], SOME),
        LONG_PROMPTS: (["static", "dynamic", "dynamic, demand"], SOME),
    },
    "demo": {
        PLAIN: (VARIANTS, (0.5, 0.85, 1.2)),
        **{kind: (["dynamic"], (0.85,)) for kind in KINDS if kind not in (PLAIN, PREFIXES)},
        PREFIXES: ([CACHING], (0.85,)),
    },
    "gpt2": {PLAIN: (["dynamic"], (0.5, 0.85))},
}


def cases(n: int, repeats: int) -> list[dict[str, Any]]:
    """Return the cases, which take turns: a machine that is slow for a while is so for all.
    Raises CostsError where costs are missing.
    """
    for costs, _ in MODELS.values():
        load(costs)
    return [
        {"part": part, "variant": variant, "kind": kind, "repeat": repeat}
        for repeat, part in itertools.product(range(repeats), PARTS)
        for kind, (variants, _) in PARTS[part].items()
        for variant in variants
    ]


def trace(kind: str, seed: int, n: int, rate: float | None) -> Sequence[Request]:
    """Return requests at so many per second; None: all at once."""
    fields, arrival = KINDS[kind]
    data = Workload(seed=FIRST_SEED + seed, **fields)
    requests = data.requests(n, arrival.format(rate) if rate else BURST, scaled=True)
    if kind != LONG_PROMPTS:
        return requests
    rng = np.random.default_rng([FIRST_SEED + seed, 10])
    own = TokenIds(rng, rng.integers(*LONG, len(requests), endpoint=True))
    return [r if r.id % EVERY else r.model_copy(update={"prompt_ids": own[r.id]}) for r in requests]


def run(case: Case, n: int, seed: int, kept: FinishedRuns) -> dict[str, Trial]:
    """Return the trials of a fresh server's burst and of its loads."""
    kind, (mode, flags) = case["kind"], VARIANTS[case["variant"]]
    n_requests = ONE_BY_ONE if mode == "nobatch" else n
    first: tuple[Case, int, int] = ({**case, "repeat": 0}, n, 0)
    model = {"model": case["part"], **MODELS[case["part"]][1]}
    with server(mode, flags | model, name=case["variant"]) as url:
        target = Target(case["variant"], url, Plain())
        warm_up(target)

        def trial(rate: float | None) -> Trial:
            return {"rate": rate} | measured(target, trace(kind, seed, n_requests, rate))

        trials = {BURST: trial(None)}
        of_first = kept[first] if first in kept else trials  # noqa: SIM401  (it is no dict)
        capacity = of_first[BURST]["capacity"]
        tokens = Workload(**KINDS[kind][0]).mean_num_tokens
        for share in PARTS[case["part"]][kind][1]:
            trials[f"{share:g}"] = trial(float(f"{share * capacity / tokens:.4g}"))
    return trials


def measured(target: Measurable, requests: Sequence[Request]) -> Trial:
    """Return the trial of a trace."""
    result, outcomes = measure(target, requests, {}, TIMEOUT_S, Watch())
    if result.partial:
        raise KeyboardInterrupt
    engine, _, config = target.report()
    answers = [outcome for outcome in outcomes if not outcome.error]
    return {
        "config": {**config, **virtual.pool(engine.get("kv_blocks"))},
        "failed": result.failed,
        "capacity": result.busy_throughput or 0.0,
        "e2e_s": [round(a.e2e_s, 6) for a in answers],
        "ttft_s": [round(a.ttft_s, 6) for a in answers],
        "tpot_s": [round(a.tpot_s, 7) for a in answers if a.completion_tokens > 1],
    }


def quantile(name: str, p: float) -> Callable[[Sequence[Trial]], float]:
    """Return a function that computes a percentile of all requests of several runs, in ms."""
    return lambda trials: (
        1e3 * float(np.percentile(np.concatenate([trial[name] for trial in trials]), p))
    )


LATER = tuple(f"{part:g}" for part in LOADS)
MEASURES: dict[str, Callable[[Sequence[Trial]], float]] = {
    "capacity": lambda trials: float(np.mean([trial["capacity"] for trial in trials])),
    "p50": quantile("e2e_s", 50),
    "p99": quantile("e2e_s", 99),
    "ttft": quantile("ttft_s", 50),
    "tpot": quantile("tpot_s", 50),
}


def compared(real: Sequence[Trial], simulated: Trial) -> dict[str, Any]:
    """Return one seed's measures on real servers, each with the error of the simulated server and
    the spread of the repeats.
    """
    measures: dict[str, Any] = {"requests": sum(len(trial["e2e_s"]) for trial in real)}
    measures["failed"] = sum(trial["failed"] for trial in (*real, simulated))
    for name, of in MEASURES.items():
        value = measures[name] = of(real)
        repeats = [of([trial]) for trial in real]
        if not min(repeats):
            continue  # a capacity where no request ever waited
        measures[f"{name}_error"] = 100 * (of([simulated]) / value - 1)
        measures[f"{name}_spread"] = 100 * (max(repeats) / min(repeats) - 1)
    return measures


def summarized(cases: Cases, repeats: int) -> list[dict[str, Any]]:
    """Return a case for each load, with a simulated server beside the real ones: it has their
    settings and blocks.
    """
    summary: dict[tuple[str, ...], dict[str, Any]] = {}
    for case in only(cases, {"repeat": 0}):
        place = {key: case[key] for key in ("part", "variant", "kind")}
        costs = load(MODELS[case["part"]][0])
        for seed, repeated in enumerate(zip(*(same["seeds"] for same in only(cases, place)))):
            for name, trial in repeated[0].items():
                target = SimulatedServer(case["variant"], Config(**trial["config"]), costs)
                requests = trace(case["kind"], seed, len(trial["e2e_s"]), trial["rate"])
                found = compared([trials[name] for trials in repeated], measured(target, requests))
                key = (*place.values(), name)
                at_load = summary.setdefault(key, {**place, "load": name, "seeds": []})
                at_load["seeds"].append(found)
    for case in summary.values():
        of_all = {f"{name}_verdict": verdict(case, name) for name in TARGETS}
        case["seeds"] = [seed | of_all for seed in case["seeds"]]
    return list(summary.values())


def verdict(case: Case, name: str) -> str:
    """Return whether an error is below its target, or else below the spread of real servers."""
    is_burst = case["load"] == BURST
    requests = sum(seed["requests"] for seed in case["seeds"])
    if is_burst != (name == "capacity") or requests < LEAST.get(name, 0):
        return REPORTED
    if not is_burst and float(case["load"]) > JUDGED:
        return REPORTED
    error = abs(mean(case, f"{name}_error").mean)
    if error <= TARGETS[name]:
        return MET
    return BY_SPREAD if error <= mean(case, f"{name}_spread").mean else MISSED


def text(cases: Cases) -> str:
    rows = [["servers", "measure, and its target", MET, BY_SPREAD, "missed", "mean |error|, %"]]
    for part, name in itertools.product(PARTS, TARGETS):
        found = [
            (case["seeds"][0][f"{name}_verdict"], abs(mean(case, f"{name}_error").mean))
            for case in only(cases, {"part": part})
            if case["seeds"][0][f"{name}_verdict"] != REPORTED
        ]
        if found:
            verdicts = Counter(word for word, _ in found)
            counts = [str(verdicts[word]) for word in (MET, BY_SPREAD, MISSED)]
            error = f"{np.mean([error for _, error in found]):.1f}"
            rows.append([part, f"{name}, {TARGETS[name]:g}%", *counts, error])
    return f"{markdown(rows, left=2)}\n\n{HOW}"


HOW = f"""\
- Error: simulated ÷ measured − 1. Latencies are those that the client sees.
- Spread: the largest ÷ the smallest value of real runs of a trace, by fresh servers, − 1.
- Verdict: *met* if the error is below its target, *met by spread* if it is at least below the
  spread, else *missed*. *reported*: there is no target, since the load is above {JUDGED:g}, or p99
  is of fewer than {LEAST["p99"]:,} real requests.
- Load: the rate of requests ÷ the capacity that the first burst of the case shows."""


def columns(*names: str, verdict: bool = False) -> list[str]:
    judged = ("_verdict",) if verdict else ()
    parts = ("", "_error", "_spread", *judged)
    return [f"{name}{part}" for name in names for part in parts]


PLACE = ("part", "variant", "kind", "load")
STUDY = Study(
    name="fidelity",
    title="The simulator and real servers",
    question="How close are the simulator's throughput and latencies to those of real servers?",
    workload="each case: {seeds} traces of {n} requests, {repeats} real runs of each and some in "
    "virtual time, on the machine on which the iteration times were measured",
    requests=250,
    seeds=4,
    options={"repeats": (2, "real runs of each trace")},
    cases=cases,
    run=run,
    servers=True,
    summarized=summarized,
    measures={
        "capacity": ("capacity, tok/s", "{:,.0f}"),
        "p50": ("latency p50, ms", "{:,.0f}"),
        "p99": ("latency p99, ms", "{:,.0f}"),
        "ttft": ("TTFT p50, ms", "{:,.1f}"),
        "tpot": ("TPOT p50, ms", "{:,.2f}"),
        **{f"{name}_error": ("error, %", "{:.1f}") for name in MEASURES},
        **{f"{name}_spread": ("spread, %", "{:.1f}") for name in MEASURES},
        **{f"{name}_verdict": ("verdict", "") for name in TARGETS},
        "failed": ("failed", "{:.0f}"),
    },
    text=text,
    tables=[
        Table(PLACE, columns("capacity", verdict=True), where={"load": BURST}, title="Capacity"),
        Table(PLACE, columns("p50", "p99", verdict=True), where={"load": LATER}, title="Latency"),
        Table(PLACE, [*columns("ttft", "tpot"), "failed"], where={"load": LATER},
              title="TTFT and TPOT"),
    ],
    figure="Error of the simulated p50 and p99 of latency by load and variant",
    panels=[
        Panel(f"{part} servers: latency {name}", "error, %", f"{name}_error", load_of, "load",
              where=where)
        for part, name in itertools.product(PARTS, ("p50", "p99"))
        for where in [{"part": part, "kind": PLAIN, "load": LATER}]
    ],
)  # fmt: skip
