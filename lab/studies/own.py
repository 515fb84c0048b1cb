"""One's own vLLM, foreseen and then run: a recording of some minutes of a vLLM under load, what it
says of other settings and other traffic, and the same vLLM really started with them, twice each.

Runs in an environment with lab/benchmarks/requirements-vllm.txt. The model is a GPT-2 of 4 layers
with random weights, so that a CPU decodes a token in some 15 ms.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

from client.calls import ServerError
from client.load import Watch, replay
from client.measure import measure
from client.results import Result
from client.traces import Trace
from client.wire import wire
from generate.auto import build
from lab.studies.own_vllm import (
    BASE,
    CHECKPOINT,
    LEVELS,
    LONG,
    NEAR,
    NEAR_ROWS,
    OVERLOAD,
    PREFIXES,
    rate_of,
    trace,
    vllm,
)
from lab.studies.runner import FinishedRuns
from lab.studies.study import Case, Cases, Study, Table, only, values
from lab.studies.vllm_schedule import Drawn, Limits, schedule_of_vllm
from simulate.costs import Costs
from simulate.fitting import expected_s
from simulate.server import SimulatedServer
from simulate.vllm.costs import observed
from simulate.vllm.foreseen import OwnServer
from simulate.vllm.recording import read

PAIRS = 7  # of runs without and with the recorder
FEW_BLOCKS = 60  # a third of what 16 rows need
RECORDED = "recorded"
# vLLM's flags, our settings, and the traffic
SETTINGS: dict[str, tuple[str, dict[str, Any], str]] = {
    RECORDED: ("", {}, LONG),
    "16 rows": ("", {}, BASE),
    "8 rows": ("--max-num-seqs 8", {"max_batch_size": 8}, BASE),
    "32 rows": ("--max-num-seqs 32", {"max_batch_size": 32}, BASE),
    "budget 64": ("--max-num-batched-tokens 64", {"token_budget": 64}, BASE),
    "budget 512": ("--max-num-batched-tokens 512", {"token_budget": 512}, BASE),
    "few blocks": (
        f"--num-gpu-blocks-override {FEW_BLOCKS + 1}", {"kv_cache": f"{FEW_BLOCKS}blocks"}, BASE,
    ),
    "overload": ("", {}, OVERLOAD),
    "prefixes": ("--enable-prefix-caching", {"prefix_caching": True}, PREFIXES),
    "priorities": (
        "--scheduling-policy priority", {"order": "priority", "priority_levels": 2}, LEVELS,
    ),
    **{
        order: (
            f"--max-num-seqs {NEAR_ROWS}",
            {"order": order, "max_batch_size": NEAR_ROWS}, NEAR,
        )
        for order in ("fcfs", "sjf", "hrrn")
    },
}  # fmt: skip
MEASURES = {
    "output_throughput": ("tok/s", "{:,.0f}"),
    "mean_ttft_ms": ("TTFT mean, ms", "{:,.0f}"),
    "p99_ttft_ms": ("TTFT p99, ms", "{:,.0f}"),
    "mean_itl_ms": ("ITL mean, ms", "{:,.1f}"),
    "p99_itl_ms": ("ITL p99, ms", "{:,.1f}"),
    "mean_e2el_ms": ("latency mean, ms", "{:,.0f}"),
    "p99_e2el_ms": ("latency p99, ms", "{:,.0f}"),
    "preemptions": ("preemptions", "{:,.0f}"),
}


def run(case: Case, n: int, seed: int, kept: FinishedRuns) -> dict[str, Any]:
    """Really run a case; return its measures by vLLM's own instants, and the seconds it took."""
    if importlib.util.find_spec("vllm") is None:
        raise ServerError("run it in an environment with lab/benchmarks/requirements-vllm.txt")
    if case["name"] == RECORDED and seed:  # once
        return kept[case, n, 0]
    folder = kept.path.parent.resolve() / "model"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.json").exists():
        subprocess.run([sys.executable, "-c", CHECKPOINT, str(folder)], check=True)
    rate, began = rate_of(folder), time.monotonic()
    flags, _, traffic = SETTINGS[case["name"]]
    path = folder / f"{case['name'].replace(' ', '-')}-{seed}.jsonl"
    with vllm(folder, flags, path, case["name"] if traffic == NEAR else "") as url:
        outcomes = replay(url, trace(traffic, n, rate, seed), wire("openai", "small"))
    seconds = time.monotonic() - began
    if failed := [outcome.error for outcome in outcomes if outcome.error]:
        raise ServerError(f"a request failed: {failed[0]}")
    measured = OwnServer.of(path, None).measured
    kept_measures = measured.json(MEASURES)
    if case["name"] == RECORDED:
        kept_measures |= {f"recorder_us_{rows}": recorder_us(rows, folder) for rows in (16, 256)}
    return kept_measures | {"seconds": seconds, "rate": rate, "n": n, "recording": str(path)}


def recorder_us(rows: int, folder: Path) -> float:
    """Return the microseconds that the recorder adds to a decode step of so many rows: the median
    of alternating pairs of vLLM's own scheduler, without and with it, that compute nothing.
    """
    from vllm.v1.core.sched import scheduler

    from simulate.vllm.vllm_recorder import RecordingScheduler

    trace = [Drawn(0.0, [1] * 8, [1] * 100) for _ in range(rows)]
    limits, plain = Limits("", rows, 8 * rows, 16 * rows), scheduler.Scheduler
    os.environ["RECORD_ITERATIONS"] = str(path := folder / "steps.jsonl")
    added = []
    for _ in range(PAIRS):
        took = []
        for kind in (plain, RecordingScheduler):
            path.unlink(missing_ok=True)
            scheduler.Scheduler, began = kind, time.perf_counter()
            took.append((len(schedule_of_vllm(limits, trace)), time.perf_counter() - began))
        added.append(1e6 * (took[1][1] - took[0][1]) / took[0][0])
    scheduler.Scheduler = plain
    return median(added)


def summarized(cases: Cases) -> list[dict[str, Any]]:
    """Return the cases with what one recording, the first run's, says of each; of orders, with what
    each run in the order of arrival says of those with the same trace.
    """
    near = [case for case in cases if case["traffic"] == NEAR]
    others = [case for case in cases if case["traffic"] != NEAR]
    return [*(_foreseen(others) if others else ()), *(_gains(case, near[0]) for case in near[1:])]


def _simulated(own: OwnServer, changed: dict[str, Any], times: float, requests: Trace) -> Result:
    """Return what a recording foresees of these settings, at costs so many times as high."""
    config, costs = build("dynamic", own.settings | changed, {}), own.costs.scaled(times)
    server = SimulatedServer("", config, costs, stream=True)
    return measure(server, requests, {}, math.inf, Watch())[0]


def _gains(case: Case, fcfs: Case) -> dict[str, Any]:
    """Return what an order gains over fcfs, really and foreseen, in percent of fcfs's."""
    seeds = []
    for seen, first in zip(case["seeds"], fcfs["seeds"]):
        own, changed = OwnServer.of(Path(first["recording"]), None), SETTINGS[case["name"]][1]
        requests = own.traffic.trace(0)
        before, after = (_simulated(own, each, 1.0, requests) for each in ({}, changed))
        before_left, left = (
            _simulated(own, each, _times(own.costs, Path(ran["recording"])), requests)
            for each, ran in (({}, first), (changed, seen))
        )
        found = {}
        for name in GAINED:
            found[f"{name}_gain"] = real = 100 * (seen[name] / first[name] - 1)
            found[f"{name}_gain_foreseen"] = gain = _percent(before, after, name)
            found[f"{name}_gain_foreseen_error"] = gain - real
            found[f"{name}_gain_left_error"] = _percent(before_left, left, name) - real
        seeds.append(found)
    return {**case, "seeds": seeds}


def _percent(before: Result, after: Result, name: str) -> float:
    return 100 * (after.number(name) / before.number(name) - 1)


def _foreseen(cases: Cases) -> list[dict[str, Any]]:
    began = time.monotonic()
    first = next(case for case in cases if case["name"] == RECORDED)["seeds"][0]
    own = OwnServer.of(Path(first["recording"]), None)
    result = []
    for case in cases:
        _, changed, traffic = SETTINGS[case["name"]]
        requests = Trace.of(trace(traffic, first["n"], first["rate"]))
        times = fmean(_times(own.costs, Path(path)) for path in values(case, "recording"))
        foreseen, at_times = (_simulated(own, changed, each, requests) for each in (1.0, times))
        found: dict[str, Any] = {"seconds": fmean(values(case, "seconds")), "times": times}
        for name in MEASURES:
            real = values(case, name)
            middle = fmean(real)
            found |= {name: middle, f"{name}_foreseen": foreseen.number(name)}
            if middle:
                found[f"{name}_error"] = 100 * (foreseen.number(name) / middle - 1)
                found[f"{name}_left"] = 100 * (at_times.number(name) / middle - 1)
            if middle and case["name"] != RECORDED:
                found[f"{name}_spread"] = 100 * (max(real) - min(real)) / middle
        result.append({**case, "seeds": [found]})
    kept = {name: value for name, value in first.items() if name.startswith("recorder")}
    result[0]["seeds"][0] |= kept
    result[0]["seeds"][0]["foreseeing_s"] = time.monotonic() - began
    return result


def _times(costs: Costs, path: Path) -> float:
    """Return the time of a recording's iterations, in parts of what the costs say of them."""
    seen = observed(read(path))
    return float(sum(each.whole for each in seen) / expected_s(costs, seen).sum())


def columns(*names: str) -> list[str]:
    parts = ("", "_spread", "_foreseen", "_error", "_left")
    return [f"{name}{part}" for name in names for part in parts]


def text(cases: Cases) -> str:
    """Return how the settings rank, really and foreseen, and how long both took."""
    settings = only(cases, {"traffic": BASE})
    if not settings:
        return OF_ORDERS
    parts = []
    for name, words in (("p99_e2el_ms", "p99 of latency"), ("mean_e2el_ms", "mean latency")):
        orders = []
        for key in (name, f"{name}_foreseen"):
            ranked = sorted(settings, key=lambda case: values(case, key)[0])
            orders.append(", ".join(case["name"] for case in ranked))
        parts.append(f"- By {words}, the best first: really {orders[0]}; foreseen {orders[1]}.")
    apart = []
    for key in ("output_throughput", "output_throughput_foreseen"):
        reached = [values(case, key)[0] for case in settings]
        apart.append(f"{100 * (max(reached) / min(reached) - 1):.1f}%")
    parts.append(
        f"- Throughputs of these settings differ by {apart[0]} at most, foreseen by {apart[1]}: "
        "all carry this load."
    )
    took = sum(values(case, "seconds")[0] for case in settings)
    first = cases[0]["seeds"][0]
    needed = first["seconds"] + first.get("foreseeing_s", 0.0)
    parts.append(
        f"- A run of each of these {len(settings)} settings, started and loaded as `vllm bench "
        f"sweep serve` does, takes {took:.0f} s; one recording and the simulations of all "
        f"{len(cases)} cases take {needed:.0f} s."
    )
    if "recorder_us_16" in first:
        parts.append(
            f"- The recorder adds {first['recorder_us_16']:.0f} µs to a decode step of 16 rows, "
            f"and {first['recorder_us_256']:.0f} µs to one of 256."
        )
    return "\n\n".join(
        [EXPLAINED, "\n".join(parts), *([OF_ORDERS] if only(cases, {"traffic": NEAR}) else [])]
    )


OF_ORDERS = f"""\
Orders run near saturation of {NEAR_ROWS} rows, alternately with the order of arrival (`fcfs`) on
the same traces. A *gain* is the change against `fcfs`, in percent; it is foreseen from the
recording of `fcfs`. *At these times*: each with the speed that the machine had in the real run."""
EXPLAINED = """\
Real runs are means of two (the recording is one), by the instants that vLLM itself recorded;
*spread* is the difference of the two, in percent of their mean. *Foreseen* are simulations with the
recording's costs, as `./simulate.sh --vllm FILE --trace FILE` makes them. *Times* are those of the
real iterations, in parts of what these costs say of them: on a shared machine they move by the
minute. *Error at these times* is what is left with costs so many times as high. Near saturation
small differences of times become large ones of latency."""
GAINED = ("mean_ttft_ms", "mean_e2el_ms", "p99_e2el_ms")
OF_GAINS = ("", "_foreseen", "_foreseen_error", "_left_error")
OF_RECORDED = {"traffic": (BASE, LONG, OVERLOAD, PREFIXES, LEVELS)}
SHOWN = {
    name + suffix: (heading + words, form)
    for name, (heading, unit) in MEASURES.items()
    for suffix, words, form in (
        ("", ", real", unit), ("_spread", ": spread, %", "{:.0f}"),
        ("_foreseen", ", foreseen", unit), ("_error", ": error, %", "{:+.0f}"),
        ("_left", ": error at these times, %", "{:+.0f}"),
        ("_gain", ": gain, real, %", "{:+.0f}"),
        ("_gain_foreseen", ": gain, foreseen, %", "{:+.0f}"),
        ("_gain_foreseen_error", ": foreseen − real", "{:+.0f}"),
        ("_gain_left_error", ": foreseen at these times − real", "{:+.0f}"),
    )
}  # fmt: skip
STUDY = Study(
    name="own",
    title="One's own vLLM, foreseen from a recording",
    question="Does one recording of a vLLM foresee what it does with other settings and traffic?",
    workload="{n} requests, and nine times as many where recorded, at 0.7 of the capacity of 16 "
    "rows; each case really run {seeds} times",
    requests=500,
    seeds=2,
    cases=lambda n: [{"name": name, "traffic": of[2]} for name, of in SETTINGS.items()],
    run=run,
    servers=True,
    summarized=summarized,
    measures=SHOWN | {"times": ("times", "{:.2f}")},
    text=text,
    tables=[
        Table(
            ("name",),
            ["times", *columns("output_throughput", "preemptions")],
            where=OF_RECORDED,
            title="Throughput and preemptions",
        ),
        *(
            Table(("name",), columns(f"mean_{name}", f"p99_{name}"), where=OF_RECORDED, title=title)
            for name, title in (("ttft_ms", "TTFT"), ("itl_ms", "ITL"), ("e2el_ms", "Latency"))
        ),
        Table(
            ("name",),
            [f"{name}_gain{part}" for name in GAINED for part in OF_GAINS],
            where={"traffic": NEAR},
            title="Orders",
        ),
    ],
)
