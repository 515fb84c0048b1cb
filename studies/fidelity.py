"""The simulator held against real servers, on traces that its costs were not fitted to.

Each trace is served by two fresh servers, an hour or so apart, and by a simulated one at the costs
of `python -m benchmarks.costs` on the same machine. A burst shows a case's capacity, of which loads
are parts. Finished runs stay valid when the simulator or the costs change.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from client.draws import TokenIds
from client.load import Watch
from client.outcomes import Outcome
from client.traces import Request
from client.wire import Plain
from client.workloads import Workload
from compare.measure import Measurable, Target, measure, stats_of, warm_up
from compare.report.tables import markdown
from compare.servers import server
from config import Config
from simulate.costs import Costs, load
from simulate.run import SimulatedServer
from studies.runner import Kept
from studies.study import Case, Cases, Panel, Study, Table, mean, only
from studies.virtual import pool

BURST = "burst"
LOADS = (0.5, 0.7, 0.85, 0.95, 1.2)  # parts of the capacity, as a burst on a real server shows it
JUDGED = 0.85  # of the capacity; beyond it errors are reported
FIRST_SEED = 1000  # calibration draws from smaller ones
ONE_BY_ONE = 30  # requests of a trace for nobatch
EVERY, LONG = 3, (200, 700)  # of long prompts: each third one, and their tokens
TIMEOUT_S = 600.0  # of a request
CLOCKS_S = 1e-6  # to which times are reported
MET, BY_SPREAD, MISSED, REPORTED = "met", "met by spread", "**missed**", "reported"
TARGETS = {"capacity": 3.0, "p50": 5.0, "p99": 10.0}  # of the relative error, %
LEAST = {"p99": 2000}  # real requests of all runs, of which it is judged
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "nobatch": ("nobatch", {}),
    "static": ("static", {}),
    "windowed": ("windowed", {}),
    "dynamic": ("dynamic", {}),
    # so few blocks that rows are preempted
    "dynamic, demand": ("dynamic", {"kv_reservation": "demand", "kv_cache": "160blocks"}),
    "dynamic, prefix caching": ("dynamic", {"prefix_caching": True}),
    "dynamic, sjf": ("dynamic", {"order": "sjf"}),
}
PLAIN, LONG_PROMPTS = "plain", "long prompts"
KINDS: dict[str, tuple[dict[str, Any], str]] = {  # of a trace: Workload's fields, and arrivals
    PLAIN: ({}, "poisson:{:g}"),
    "other lengths": ({"lengths": "lognormal:60:1:700"}, "poisson:{:g}"),
    "bursty": ({}, "gamma:{:g}:3"),
    "shared prefixes": ({"prefixes": "8:128:1"}, "poisson:{:g}"),
    LONG_PROMPTS: ({"prompts": "ids"}, "poisson:{:g}"),
}
Row = dict[str, Any]  # numbers of a trace on one side
# what a server and its client run
CODE = (
    *("app.py", "batching.py", "model.py", "serving.py", "stats.py", "tokenizer.py", "wire"),
    *("config", "front_door", "generate", "kernels", "observers", "routes", "scheduling"),
    *("client/calls.py", "client/draws.py", "client/load.py", "client/outcomes.py"),
    *("client/traces.py", "client/wire.py", "client/workloads.py"),
    *("compare/measure.py", "compare/servers.py"),
)


class Part(NamedTuple):
    """A model, and the loads of its cases."""

    costs: str  # by name, of the machine at hand
    loads: Sequence[float]  # of plain traces, all variants
    other_loads: Sequence[float]
    others: Mapping[str, Sequence[str]]  # kind: variants

    def cases(self) -> dict[tuple[str, str], Sequence[float]]:
        """(variant, kind): loads"""
        others = {
            (name, kind): self.other_loads for kind in self.others for name in self.others[kind]
        }
        return {(name, PLAIN): self.loads for name in VARIANTS} | others


CACHING = "dynamic, prefix caching"
PARTS = {
    "fake": Part(
        "fake-server",
        LOADS,
        (0.85, 1.2),
        {
            "other lengths": ("static", "dynamic", "dynamic, sjf"),
            "bursty": ("windowed", "dynamic"),
            "shared prefixes": (CACHING,),
            LONG_PROMPTS: ("static", "dynamic", "dynamic, demand"),
        },
    ),
    "demo": Part(
        "demo",
        (0.5, 0.85, 1.2),
        (0.85,),
        {
            "other lengths": ("dynamic",),
            "bursty": ("dynamic",),
            "shared prefixes": (CACHING,),
            LONG_PROMPTS: ("dynamic",),
        },
    ),
}


def cases(n: int, repeats: int, costs: str) -> list[dict[str, Any]]:
    """All cases take turns, so that a machine that is slow for a while is so for all."""
    return [
        {"part": part, "variant": variant, "kind": kind, "repeat": repeat}
        for repeat, part in itertools.product(range(repeats), PARTS)
        for variant, kind in PARTS[part].cases()
    ]


def trace(kind: str, seed: int, n: int, rate: float | None) -> Sequence[Request]:
    """Requests at so many a second; None: all at once."""
    fields, arrival = KINDS[kind]
    data = Workload(seed=FIRST_SEED + seed, **fields)
    requests = data.requests(n, arrival.format(rate) if rate else BURST, scaled=True)
    if kind != LONG_PROMPTS:
        return requests
    rng = np.random.default_rng([FIRST_SEED + seed, 10])
    own = TokenIds(rng, rng.integers(*LONG, len(requests), endpoint=True))
    return [r if r.id % EVERY else r.model_copy(update={"prompt_ids": own[r.id]}) for r in requests]


def run(case: Case, n: int, seed: int, kept: Kept) -> dict[str, Row]:
    """Rows of a fresh server's burst and of its loads."""
    kind, (mode, flags) = case["kind"], VARIANTS[case["variant"]]
    n_requests = ONE_BY_ONE if mode == "nobatch" else n
    first: tuple[Case, int, int] = ({**case, "repeat": 0}, n, 0)
    with server(mode, flags | {"model": case["part"]}, name=case["variant"]) as url:
        target = Target(case["variant"], url, Plain())
        warm_up(target)
        # of one machine: the clocks of its processes are apart by as much
        epoch = max(time.time() - time.perf_counter() for _ in range(100))

        def row(rate: float | None) -> Row:
            requests = trace(kind, seed, n_requests, rate)
            return {"rate": rate} | measured(target, requests, lambda: stats_of(url)[1], epoch)

        rows = {BURST: row(None)}
        burst = kept[first][BURST] if first in kept else rows[BURST]
        tokens = Workload(**KINDS[kind][0]).mean_num_tokens
        for part in PARTS[case["part"]].cases()[case["variant"], kind]:
            rows[f"{part:g}"] = row(float(f"{part * burst['capacity'] / tokens:.4g}"))
    return rows


def simulated(case: Case, seed: int, row: Row, costs: Costs) -> Row:
    """The row of a simulated server, with the settings and the blocks of the real one."""
    # each iteration is computed, so that each is reported
    target = SimulatedServer(case["variant"], Config(**row["config"]), costs, jump=False)

    def iterations() -> list[list[float]]:
        pages: list[list[float]] = []
        since: int | None = 0
        while since is not None:
            page = target.stats.iterations(since)
            pages, since = pages + page["iterations"], page["next_iteration"]
        return pages

    return measured(target, trace(case["kind"], seed, len(row["e2e_s"]), row["rate"]), iterations)


def measured(
    target: Measurable,
    requests: Sequence[Request],
    iterations: Callable[[], list[list[float]]],
    epoch: float = 0.0,
) -> Row:
    """The row of a trace. iterations: those of the server, afterwards. epoch: by how much a
    request's times are on another clock than theirs.
    """
    result, outcomes = measure(target, requests, {}, TIMEOUT_S, Watch())
    if result["partial"]:
        raise KeyboardInterrupt
    engine, _, config = target.report()
    answers = [outcome.answer for outcome in outcomes if outcome.answer]
    started, took, _ = np.array(iterations())[:, :3].T
    return {
        "config": config | pool(engine.get("kv_blocks")),
        "failed": result["failed"],
        "capacity": result["busy_throughput"] or 0.0,
        "e2e_s": [round(a.e2e_s, 6) for a in answers],
        "ttft_s": [round(a.ttft_s, 6) for a in answers],
        "tpot_s": [round(a.tpot_s, 7) for a in answers if a.completion_tokens > 1],
        "http_s": float(np.median([a.e2e_s - a.timings["e2e_s"] for a in answers if a.timings])),
        "iterations": len(took),
        "iterations_s": float(took.sum()),
        "gap_s": gaps_s(started, took, outcomes, epoch) / len(took),
    }


def gaps_s(
    started: np.ndarray, took: np.ndarray, outcomes: Sequence[Outcome], epoch: float
) -> float:
    """Seconds without an iteration while a request is in flight."""
    timings = [o.answer.timings for o in outcomes if o.answer and o.answer.timings]
    arrived = np.sort([each["arrived_at"] - epoch for each in timings])
    answered = np.sort([each["arrived_at"] - epoch + each["e2e_s"] for each in timings])
    ended, following = started[:-1] + took[:-1], started[1:]
    # requests answered between two iterations are answered by the first
    come = np.searchsorted(arrived, ended, "right")
    in_flight = come - np.searchsorted(answered, following - CLOCKS_S, "right")
    begin = np.where(in_flight > 0, ended, arrived[np.minimum(come, len(arrived) - 1)])
    return float(np.maximum(0.0, following - begin).sum())


def quantile(rows: Sequence[Row], name: str, p: float) -> float:
    return float(np.percentile(np.concatenate([row[name] for row in rows]), p))


MEASURES: dict[str, Callable[[Sequence[Row]], float]] = {
    "capacity": lambda rows: float(np.mean([row["capacity"] for row in rows])),
    "p50": lambda rows: 1e3 * quantile(rows, "e2e_s", 50),
    "p99": lambda rows: 1e3 * quantile(rows, "e2e_s", 99),
    "ttft": lambda rows: 1e3 * quantile(rows, "ttft_s", 50),
    "tpot": lambda rows: 1e3 * quantile(rows, "tpot_s", 50),
}


def compared(real: Sequence[Row], mine: Row) -> dict[str, Any]:
    """One seed's measures: each by the repeats of a real server, with the error of the simulated
    one and the spread of the repeats; then where the time goes.
    """
    measures = {}
    for name, of in MEASURES.items():
        value = measures[name] = of(real)
        measures[f"{name}_error"] = 100 * (of([mine]) / value - 1)
        each = [of([row]) for row in real]
        measures[f"{name}_spread"] = 100 * (max(each) / min(each) - 1)
    sums = {name: float(np.mean([row[name] for row in real])) for name in mine if name in ORIGINS}
    return {
        **measures,
        "iterations": 100 * (mine["iterations"] / sums["iterations"] - 1),
        "iterations_s": 100 * (mine["iterations_s"] / sums["iterations_s"] - 1),
        "gap_us": 1e6 * sums["gap_s"],
        "gap_simulated_us": 1e6 * mine["gap_s"],
        "http_ms": 1e3 * sums["http_s"],
        "http_simulated_ms": 1e3 * mine["http_s"],
        "failed": sum(row["failed"] for row in (*real, mine)),
        "requests": sum(len(row["e2e_s"]) for row in real),
    }


ORIGINS = ("iterations", "iterations_s", "gap_s", "http_s")


def summarized(cases: Cases, repeats: int, costs: str) -> list[dict[str, Any]]:
    """A case for each load: how the simulated server does beside the real ones."""
    used = {part: load(costs or PARTS[part].costs) for part in PARTS}
    firsts = [case for case in cases if case["repeat"] == 0]
    runs = [
        (case, load_name, seed, real)
        for case in firsts
        for load_name in case["seeds"][0]
        for seed in range(len(case["seeds"]))
        for real in [[c["seeds"][seed][load_name] for c in same(cases, case)]]
    ]
    with multiprocessing.Pool() as pool:
        work = [(case, seed, real[0], used[case["part"]]) for case, _, seed, real in runs]
        rows = pool.starmap(simulated, work, chunksize=1)
    cells: dict[tuple[str, ...], dict[str, Any]] = {}
    for (case, load_name, _, real), mine in zip(runs, rows):
        place = {key: case[key] for key in ("part", "variant", "kind")} | {"load": load_name}
        cell = cells.setdefault(tuple(place.values()), {**place, "seeds": []})
        cell["seeds"].append(compared(real, mine))
    for cell in cells.values():
        verdicts = {f"{name}_verdict": verdict(cell, name) for name in TARGETS}
        cell["seeds"] = [seed | verdicts for seed in cell["seeds"]]
    return list(cells.values())


def same(cases: Cases, case: Case) -> list[Case]:
    """All repeats of a case."""
    return only(cases, {key: case[key] for key in ("part", "variant", "kind")})


def verdict(cell: Case, name: str) -> str:
    """Whether an error is below its target, or within what the real server differs from itself."""
    judged = cell["load"] == BURST if name == "capacity" else cell["load"] != BURST
    requests = sum(seed["requests"] for seed in cell["seeds"])
    if not judged or requests < LEAST.get(name, 0):
        return REPORTED
    if cell["load"] != BURST and float(cell["load"]) > JUDGED:
        return REPORTED
    error = abs(mean(cell, f"{name}_error").mean)
    if error <= TARGETS[name]:
        return MET
    return BY_SPREAD if error <= mean(cell, f"{name}_spread").mean else MISSED


def text(cases: Cases) -> str:
    rows = [["servers", "measure, and its target", MET, BY_SPREAD, "missed", "mean |error|, %"]]
    for part, name in itertools.product(PARTS, TARGETS):
        judged = [
            case
            for case in only(cases, {"part": part})
            if case["seeds"][0][f"{name}_verdict"] != REPORTED
        ]
        if judged:
            n = Counter(case["seeds"][0][f"{name}_verdict"] for case in judged)
            error = np.mean([abs(mean(case, f"{name}_error").mean) for case in judged])
            counts = [str(n[verdict]) for verdict in (MET, BY_SPREAD, MISSED)]
            rows.append([part, f"{name}, {TARGETS[name]:g}%", *counts, f"{error:.1f}"])
    return f"{markdown(rows, left=2)}\n\n{HOW}"


HOW = f"""\
Error: simulated ÷ measured − 1, in %, mean over seeds ± 95%. Latencies are the client's. Spread: by
how much real runs of the same trace by fresh servers are apart. *met*: the error is below its
target; *met by spread*: it is not, but below the spread; *missed*: neither; *reported*: no target
at this load (above {JUDGED:g}), or p99 of fewer than {LEAST["p99"]:,} real requests. Load: the rate
of a trace as a part of the capacity of the case's first burst."""
PARTS_OF = ("", "_error", "_spread", "_verdict")
ORIGINS_SHOWN = (
    *("iterations", "iterations_s", "gap_us", "gap_simulated_us"),
    *("http_ms", "http_simulated_ms", "failed"),
)
PLACE = ("part", "variant", "kind", "load")
LATER = tuple(f"{part:g}" for part in LOADS)
STUDY = Study(
    name="fidelity",
    title="The simulator beside real servers",
    question="How far is the simulator from real servers?",
    workload="{repeats} real runs of each trace and one in virtual time, {seeds} traces of {n} "
    "requests a case, on the machine that the costs were measured on",
    requests=250,
    seeds=4,
    options={
        "repeats": (2, "real runs of each trace"),
        "costs": ("", "name of the costs, instead of those of each part"),
    },
    cases=cases,
    run=run,
    servers=True,
    summarized=summarized,
    code=CODE,
    measures={
        "capacity": ("measured, tok/s", "{:,.0f}"),
        "p50": ("median latency, ms", "{:,.0f}"),
        "p99": ("p99 latency, ms", "{:,.0f}"),
        "ttft": ("TTFT median, ms", "{:,.1f}"),
        "tpot": ("TPOT median, ms", "{:,.2f}"),
        **{f"{name}_error": ("error, %", "{:.1f}") for name in MEASURES},
        **{f"{name}_spread": ("spread, %", "{:.1f}") for name in MEASURES},
        **{f"{name}_verdict": ("verdict", "") for name in TARGETS},
        "iterations": ("number of iterations, error, %", "{:.1f}"),
        "iterations_s": ("time in iterations, error, %", "{:.1f}"),
        "gap_us": ("gap between iterations, µs", "{:,.0f}"),
        "gap_simulated_us": ("simulated", "{:,.0f}"),
        "http_ms": ("HTTP, ms", "{:.2f}"),
        "http_simulated_ms": ("simulated", "{:.2f}"),
        "failed": ("failed", "{:.0f}"),
    },
    text=text,
    tables=[
        Table(
            PLACE[:3],
            ("capacity", "capacity_error", "capacity_spread", "capacity_verdict"),
            where={"load": BURST},
            title="Capacity",
        ),
        Table(
            PLACE,
            [f"{name}{part}" for name in ("p50", "p99") for part in PARTS_OF],
            where={"load": LATER},
            title="Latency",
        ),
        Table(
            PLACE,
            ("ttft", "ttft_error", "ttft_spread", "tpot", "tpot_error", "tpot_spread"),
            where={"load": LATER},
            title="First token, and time per token",
        ),
        Table(
            PLACE,
            ORIGINS_SHOWN,
            title="What the errors are made of",
            text="If time in iterations is off while their number is not, iterations take other "
            "than the costs say. Gap: without an iteration while a request is in flight, mean of "
            "all iterations. HTTP: by how much the client's latency is beyond the server's own.",
        ),
    ],
    figure="error of the simulated median and p99 of latency over load, by variant",
    panels=[
        Panel(
            f"{part} servers",
            f"error of {name}, %",
            f"{name}_error",
            lambda case: float(case["load"]),
            "load, of capacity",
            where={"part": part, "kind": PLAIN, "load": LATER},
        )
        for part, name in itertools.product(PARTS, ("p50", "p99"))
    ],
)
