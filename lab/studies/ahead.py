"""What planning one iteration ahead gives, by the times of host and engine.

A request that arrives while an iteration is planned ahead waits for one iteration more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from client.workloads import Workload
from lab.studies import virtual
from lab.studies.study import Against, Case, Panel, Study, Table, grid
from simulate.loop import PS
from simulate.server import SimulatedServer

COSTS = "roofline:h100,gpt2-medium,bfloat16"
ROWS, HOST_MS = (8, 32, 128), (0.1, 0.3, 1.0)
VARIANTS = {"in turn": "", "ahead": "--ahead"}
LOAD = 0.7  # of what `in turn` completes of a burst
GAPS = ("gap", "gap_row", "gap_answer", "gap_answer_row", "gap_stream", "gap_stream_row")


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    """Return the throughput of a burst, and times at a share of it, in ms."""
    rows, host_ms = case["rows"], case["host_ms"]

    def served(variant: str, arrival: str) -> dict[str, Any]:
        made = virtual.simulation(f"--costs {COSTS} --max-batch-size {rows} {VARIANTS[variant]}")
        gaps: dict[str, Any] = dict.fromkeys(GAPS, 0) | {"gap": round(host_ms * PS / 1e3)}
        costs = replace(made.costs, **gaps)
        server = SimulatedServer("", made.config("dynamic"), costs, stream=True)
        result = virtual.measures(server, Workload(seed=seed).requests(n, arrival, scaled=True))
        return result | {"busy_s": server.report()[0]["busy_s"]}

    burst, base = served(case["variant"], "burst"), served("in turn", "burst")
    loaded = served(case["variant"], f"poisson:{LOAD * n / base['wall_clock_s']:g}")
    engine_ms = host_ms * base["busy_s"] / (base["wall_clock_s"] - base["busy_s"])
    gain = (engine_ms + host_ms) / max(engine_ms, host_ms) if case["variant"] == "ahead" else 1.0
    return {
        "engine_ms": engine_ms,
        "tokens": burst["output_throughput"],
        "expected": gain * base["output_throughput"],
        "ttft_ms": loaded["p50_ttft_ms"],
        "tpot_ms": loaded["p50_tpot_ms"],
    }


STUDY = Study(
    name="ahead",
    title="Planning one iteration ahead",
    question="How much faster is a server that plans the next iteration while the engine computes?",
    workload="{n} streamed requests, {seeds} seeds, `dynamic` in virtual time, with the iteration "
    f"times of `--costs {COSTS}`",
    requests=400,
    seeds=4,
    cases=grid(rows=ROWS, host_ms=HOST_MS, variant=VARIANTS),
    run=run,
    measures={
        "engine_ms": ("iteration on the engine, ms", "{:.2f}"),
        "tokens": ("burst: throughput, tok/s", "{:,.0f}"),
        "expected": ("burst: expected, tok/s", "{:,.0f}"),
        "ttft_ms": ("TTFT p50, ms", "{:.1f}"),
        "tpot_ms": ("TPOT p50, ms", "{:.2f}"),
    },
    tables=[
        Table(
            ("rows", "host_ms", "variant"),
            against=[Against({"variant": "in turn"}, ratios=["tokens", "ttft_ms", "tpot_ms"])],
            text="Between the end of an iteration and the launch of the next one the host works "
            "for `host ms`. `in turn`: the engine waits for it. `ahead`: it works while the engine "
            "computes (`--ahead`). Expected: an iteration takes the longer one of both mean times "
            f"instead of their sum. TTFT and TPOT are at {LOAD:.0%} of the requests per second "
            "that `in turn` completes of a burst.",
        )
    ],
    figure="Throughput of a burst against the host's time (dotted: expected)",
    panels=[
        Panel(f"{n} rows", "throughput, tok/s", "tokens", "host_ms", "host, ms", where={"rows": n},
              expected="expected")
        for n in ROWS
    ],
)  # fmt: skip
