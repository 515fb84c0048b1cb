"""Disaggregated prefill: what four servers complete within limits on the first token and on the
mean time of later ones, beside the same four with prompts and decode rows mixed, or prompts first.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from client.drawing import LOOKS
from client.measure import judged
from client.workloads import Workload
from compare.analysis import ATTAINMENT, Estimate
from compare.report.tables import NONE, formatted
from lab.studies.study import Against, Case, Cases, Panel, Study, Table, only, ratio
from simulate.server import SimulatedServer
from simulate.simulation import Simulation, parse

WORDS = "--costs roofline:a100,gpt2-xl,bfloat16 --max-batch-size 64 --router least_tokens"
LENGTHS = {"512+64": (512, 64), "256+256": (256, 256), "64+512": (64, 512)}  # prompt, mean answer
RATES = {"512+64": 60, "256+256": 20, "64+512": 10}  # requests a second at which gaps are shown
LIMITS = {"strict": {"ttft": 40, "tpot": 4}, "lax": {"ttft": 200, "tpot": 20}}  # ms
GBYTES, FASTEST = (1, 10, 100), 100  # GB/s at which a prefill replica sends
STEPS = 5  # halvings that find a rate
APART = ("apart 1+3", "apart 2+2", "apart 3+1")
VARIANTS = {
    "first": "--replicas 4 --token-budget 2048 --prefill first",
    "mixed": "--replicas 4 --token-budget 256",
    **{
        name: f"--prefill-replicas {name[-3]} --decode-replicas {name[-1]} --token-budget 2048"
        for name in APART
    },
}


def cases(n: int) -> list[dict[str, Any]]:
    def of(lengths: str, limits: str, gbytes: int, variants: Iterable[str]) -> list[dict[str, Any]]:
        case = {"lengths": lengths, "limits": limits, "gbytes": gbytes}
        return [case | {"variant": variant} for variant in variants]

    slower = [of("512+64", "strict", gbytes, APART) for gbytes in GBYTES if gbytes < FASTEST]
    strict = [of(lengths, "strict", FASTEST, VARIANTS) for lengths in LENGTHS]
    groups = [*slower, *strict, of("512+64", "lax", FASTEST, VARIANTS)]
    return [case for group in groups for case in group]


@functools.cache
def setup(variant: str, gbytes: int) -> Simulation:
    """Return what ./simulate.sh makes of the words of a variant."""
    words = f"{WORDS} --modes dynamic --max-waiting 1000000 {VARIANTS[variant]}"
    return parse((words + f" --kv-gbps {8 * gbytes}" * (variant in APART)).split())


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    """Return the highest rate at which nine in ten requests are within both limits, the throughput
    of all at once, and the p99 gap at a rate.
    """
    prompt, mean = LENGTHS[case["lengths"]]
    lengths, prompts = f"uniform:{mean // 2}:{3 * mean // 2}", f"16:{prompt}:0"
    workload = Workload(lengths, seed=seed, prefixes=prompts)
    made = setup(case["variant"], case["gbytes"])

    def served(arrival: str) -> dict[str, Any]:
        requests = workload.requests(n, arrival, scaled=True)
        config = made.config("dynamic")
        server = SimulatedServer("", config, made.costs, made.layout, stream=True)
        return judged(requests, server.replay(requests), LIMITS[case["limits"]])

    burst = served("burst")
    low, high = 0.0, 2 * n / burst["wall_clock_s"]
    for _ in range(STEPS):
        rate = (low + high) / 2
        is_within = served(f"poisson:{rate:g}")["attainment"] >= ATTAINMENT
        low, high = (rate, high) if is_within else (low, rate)
    gap = served(f"poisson:{RATES[case['lengths']]}")["p99_itl_ms"]
    return {"goodput": low, "throughput": burst["output_throughput"], "p99_itl_ms": gap}


def verdict(cases: Cases) -> str:
    """Say whether the claims hold for any lengths, limits and split."""

    def words(base: str, measure: str) -> str:
        pairs = [
            (ratio(other, case, measure), case)
            for case in only(cases, {"variant": APART, "gbytes": FASTEST})
            for keys in [{key: case[key] for key in ("lengths", "limits", "gbytes")}]
            for other in only(cases, keys | {"variant": base})
        ]
        if not pairs:
            return f"- {measure} ÷ that of `{base}`: {NONE}"
        gain, case = max(pairs, key=lambda pair: pair[0].mean)
        where = [case["variant"], case["lengths"]]
        if measure != "throughput":  # of a burst, which has no limits
            where.append(f"{case['limits']} limits")
        if not Estimate(gain.mean - 1, gain.half).shown:
            where.append("no difference shown")
        elif gain.mean < 1:
            where.append("less than 1")
        return f"- {measure} ÷ that of `{base}`: {formatted(gain, '{:.2f}')} ({', '.join(where)})"

    return (
        "The most that separate prefill and decode replicas reach at 100 GB/s:\n\n"
        f"{words('first', 'goodput')}. DistServe reports up to 4.48.\n"
        f"{words('mixed', 'goodput')}.\n{words('mixed', 'throughput')}."
    )


LIMITED = ", ".join(f"{name} {of['ttft']} and {of['tpot']}" for name, of in LIMITS.items())
STRICT = {"limits": "strict", "gbytes": FASTEST}
SLOWER = {"limits": "strict", "lengths": "512+64", "variant": APART}
STUDY = Study(
    name="apart",
    title="Disaggregated prefill and decode",
    question="Do four servers complete more within latency limits if some compute prompts only, "
    "and the others decode only?",
    source="disaggregation has up to 4.48 times the goodput of the vLLM of that time, which "
    "computed prompts first (DistServe, OSDI 2024); it does not improve throughput (vLLM's "
    "documentation)",
    workload=f"{{n}} streamed requests, {{seeds}} seeds, four servers in virtual time, `{WORDS}`",
    requests=250,
    seeds=4,
    cases=cases,
    run=run,
    measures={
        "goodput": ("goodput, requests/s", "{:.0f}"),
        "throughput": ("burst: throughput, tok/s", "{:,.0f}"),
        "p99_itl_ms": ("gap between tokens p99, ms", "{:.1f}"),
    },
    text=verdict,
    tables=[
        Table(
            ("lengths", "limits", "variant"),
            (),
            [Against({"variant": base}, ratios=["goodput"]) for base in ("first", "mixed")],
            {"gbytes": FASTEST},
            f"By lengths and limits, {FASTEST} GB/s",
            "Goodput is the highest rate at which 90% of the requests are within both limits, on "
            f"TTFT and TPOT ({LIMITED} ms).\n\n"
            "- `512+64`: prompts of 512 tokens, and 64 completion tokens on average.\n"
            "- `first`: four replicas that compute prompts first; token budget 2048.\n"
            "- `mixed`: four replicas that mix prompts and decode rows; token budget 256.\n"
            "- `apart 1+3`: one prefill and three decode replicas; token budget 2048.\n\n"
            "Gaps are those at 60, 20 and 10 requests a second, by lengths.",
        ),
        Table(("gbytes", "variant"), (), (), SLOWER,
              "By the bandwidth of a prefill replica in GB/s (512+64)"),
    ],
    figure="Goodput within strict limits and p99 gap by lengths, and goodput by bandwidth",
    panels=[
        Panel("strict limits", "goodput, requests/s", "goodput", "lengths", where=STRICT),
        Panel("gaps at one rate", "gap between tokens p99, ms", "p99_itl_ms", "lengths",
              where=STRICT),
        Panel("512+64, strict limits", "goodput, requests/s", "goodput", "gbytes",
              "GB/s of a prefill replica", where=SLOWER),
    ],
    looks=dict(zip(VARIANTS, LOOKS)),
)  # fmt: skip
