"""Disaggregated prefill, beside the same servers with prompts mixed in, or first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from client.drawing import STYLES
from client.workloads import Workload
from compare.analysis import ATTAINMENT
from lab.studies import virtual
from lab.studies.study import Against, Case, Panel, Study, Table, grid
from simulate.server import SimulatedServer

WORDS = "--costs roofline:a100,gpt2-xl,bfloat16 --max-batch-size 64 --router least_tokens"
LENGTHS = {"512+64": (512, 64), "256+256": (256, 256), "64+512": (64, 512)}  # prompt, mean answer
RATES = {"512+64": 60, "256+256": 20, "64+512": 10}  # requests per second at which gaps are shown
LIMITS = {"strict": {"ttft": 40, "tpot": 4}, "lax": {"ttft": 200, "tpot": 20}}  # ms
GBYTES = (1, 10, 100)  # GB/s at which a prefill replica sends
FASTEST = GBYTES[-1]
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
    def of(limits: str, lengths: str, variants: Iterable[str], *gbytes: int) -> list[Any]:
        return grid(lengths=[lengths], limits=[limits], gbytes=gbytes, variant=variants)(n)

    strict = [case for lengths in LENGTHS for case in of("strict", lengths, VARIANTS, FASTEST)]
    slower = of("strict", "512+64", APART, *GBYTES[:-1])
    return [*slower, *strict, *of("lax", "512+64", VARIANTS, FASTEST)]


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    """Return the highest rate at which nine in ten requests are within both limits, the throughput
    of all at once, and the p99 gap at a rate.
    """
    prompt, mean = LENGTHS[case["lengths"]]
    lengths, prompts = f"uniform:{mean // 2}:{3 * mean // 2}", f"16:{prompt}:0"
    workload = Workload(lengths, seed=seed, prefixes=prompts)
    words = f"{WORDS} {VARIANTS[case['variant']]}"
    if case["variant"] in APART:
        words += f" --kv-gbps {8 * case['gbytes']}"
    made = virtual.simulation(words)
    config = made.config("dynamic")

    def served(arrival: str) -> dict[str, Any]:
        server = SimulatedServer("", config, made.costs, made.layout, stream=True)
        requests = workload.requests(n, arrival, scaled=True)
        return virtual.measures(server, requests, LIMITS[case["limits"]])

    def is_within(rate: float) -> bool:
        return bool(served(f"poisson:{rate:g}")["attainment"] >= ATTAINMENT)

    burst = served("burst")
    return {
        "goodput": virtual.highest(is_within, STEPS, 2 * n / burst["wall_clock_s"]),
        "throughput": burst["output_throughput"],
        "p99_itl_ms": served(f"poisson:{RATES[case['lengths']]}")["p99_itl_ms"],
    }


LIMITED = ", ".join(f"{name} {of['ttft']} and {of['tpot']}" for name, of in LIMITS.items())
STRICT = {"limits": "strict", "gbytes": FASTEST}
SLOWER = {"limits": "strict", "lengths": "512+64", "variant": APART}
STUDY = Study(
    name="apart",
    title="Disaggregated prefill and decode",
    question="Do four servers complete more within latency limits if some compute prompts only, "
    "and the others decode only?",
    source="disaggregation has up to 4.48 times the goodput of the vLLM of that time, which "
    "computed prompts first (DistServe's authors in a post); it does not improve throughput "
    "(vLLM's documentation)",
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
    tables=[
        Table(
            ("lengths", "limits", "variant"),
            (),
            [
                Against({"variant": "first"}, ratios=["goodput"]),
                Against({"variant": "mixed"}, ratios=["goodput", "throughput"]),
            ],
            {"gbytes": FASTEST},
            f"By lengths and limits, {FASTEST} GB/s",
            "Goodput is the highest rate at which 90% of the requests are within both limits, on "
            f"TTFT and TPOT ({LIMITED} ms).\n\n"
            "- `512+64`: prompts of 512 tokens, and 64 completion tokens on average.\n"
            "- `first`: four replicas that compute prompts first; token budget 2048.\n"
            "- `mixed`: four replicas that mix prompts and decode rows; token budget 256.\n"
            "- `apart 1+3`: one prefill and three decode replicas; token budget 2048.\n\n"
            "Gaps are those at 60, 20 and 10 requests per second, by lengths.",
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
    styles=dict(zip(VARIANTS, STYLES)),
)  # fmt: skip
