"""Prompts and decode rows in one iteration or apart: time to the first token against gaps."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from client.drawing import STYLES
from client.traces import Request
from client.workloads import Workload
from lab.studies import virtual
from lab.studies.study import Against, Case, Panel, Study, Table, grid
from lab.studies.virtual import CAPACITY_SEED, Settings
from simulate.costs import Work, load
from simulate.loop import PS

MODELS = {"demo": "demo", "gpt2": "GPT-2 124M"}  # by the name of their costs
ROWS, LENGTHS = 32, "exponential:64:200"
PROMPTS, BUDGETS, LOADS = (64, 512), (64, 256, 2048), (0.5, 0.8)
STRICT, RELAXED = 5, 25  # the paper's limits of the p99 gap, in decode iterations of all rows
AIM, MARGIN = 2, 0.8  # limit of adaptive in the grid, and its share of a limit of the gap
STEPS = 6  # halvings that find a capacity
CLOSED = {"prompt": 480, "tokens": 480, "budget": 1024, "requests": 10 * ROWS}
VARIANTS: dict[str, Settings] = {
    "mixed": {},
    "first": {"prefill": "first"},
    "last, floor 16": {"prefill": "last:16"},
    "every:4": {"prefill": "every:4"},
    "adaptive": {"prefill": "adaptive"},
}
SERVERS = (("mixed", 64), ("mixed", 256), ("mixed", 2048), ("first", 2048), ("adaptive", 2048))
OF_TRACE = {name: of for name, of in virtual.OF_TRACE.items() if name != "p99_e2el_ms"}


def cases(n: int) -> list[dict[str, Any]]:
    free = grid(
        table=["grid"], model=MODELS, prompt=PROMPTS, load=LOADS, budget=BUDGETS, variant=VARIANTS
    )
    limited = grid(table=["capacity"], model=MODELS, limit=(STRICT, RELAXED), server=SERVERS)(n)
    for case in limited:
        case["variant"], case["budget"] = case["server"]
        case["server"] = "{}, {}".format(*case["server"])
    return free(n) + limited + grid(table=["closed"], model=MODELS, variant=("mixed", "first"))(n)


def decode_ms(model: str) -> float:
    """Return the time of a decode iteration of all rows, each with a long prompt."""
    context = ROWS * (PROMPTS[-1] + 64)
    return 1e3 * load(model).decode[ROWS].of(Work(1, ROWS, context, 0, 0)) / PS


def drawn(prompt: int, seed: int, lengths: str = LENGTHS) -> Workload:
    """Return a workload of prompts of so many tokens and about ten more; none is cached."""
    return Workload(lengths, seed=seed, prefixes=f"16:{prompt}:0")


def served(
    model: str, variant: str, budget: int, requests: Sequence[Request], limit: float = AIM
) -> dict[str, Any]:
    """Return the measures of a trace. limit: of adaptive, in decode iterations."""
    settings = {"max_batch_size": ROWS, "token_budget": budget, **VARIANTS[variant]}
    if variant == "adaptive":
        settings["prefill"] = f"adaptive:{limit * decode_ms(model)}"
    return virtual.measures(virtual.server(settings, load(model), stream=True), requests)


@functools.cache
def capacity(model: str, prompt: int, n: int, variant: str = "mixed", budget: int = 256) -> float:
    """Return the requests per second that are completed when all come at once."""
    burst = drawn(prompt, CAPACITY_SEED).requests(n, "burst", scaled=True)
    return n / float(served(model, variant, budget, burst, RELAXED)["wall_clock_s"])


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    if case["table"] == "capacity":
        return {"rate": capacity_within(case, n, seed)}
    model, variant = case["model"], case["variant"]
    if case["table"] == "closed":
        workload = drawn(CLOSED["prompt"], seed, f"fixed:{CLOSED['tokens']}")
        trace = workload.requests(CLOSED["requests"], f"closed:{ROWS}")
        result = served(model, variant, CLOSED["budget"], trace)
    else:
        rate = case["load"] * capacity(model, case["prompt"], n)
        trace = drawn(case["prompt"], seed).requests(n, f"poisson:{rate:g}", scaled=True)
        result = served(model, variant, case["budget"], trace)
    return {name: result[name] for name in OF_TRACE}


def capacity_within(case: Case, n: int, seed: int) -> float:
    """Return the highest rate, up to the capacity, at which the p99 gap is within the limit."""
    model, limit, of = case["model"], case["limit"], (case["variant"], case["budget"])
    most = capacity(model, PROMPTS[-1], n, *of)

    def is_within(share: float) -> bool:
        arrival = f"poisson:{share * most:g}"
        trace = drawn(PROMPTS[-1], seed).requests(n, arrival, scaled=True)
        result = served(model, *of, trace, MARGIN * limit)
        return bool(result["p99_itl_ms"] <= limit * decode_ms(model))

    return most * (1.0 if is_within(1.0) else virtual.highest(is_within, STEPS))


def name_of(case: Case) -> str:
    return MODELS[case["model"]]


MIXED = {"variant": "mixed"}
VS_MIXED = [Against(MIXED, ratios=["mean_ttft_ms", "p99_itl_ms"])]
HARD = {"table": "grid", "prompt": PROMPTS[-1], "load": LOADS[-1]}
LIMITED, CLOSED_LOOP = {"table": "capacity"}, {"table": "closed"}
SHOWN = {"p99_itl_ms": "p99 gap between tokens", "mean_ttft_ms": "mean TTFT"}
STUDY = Study(
    name="prefill",
    title="Prompts and decode rows: in one iteration, or in iterations of their own",
    question="How does `--prefill` affect the time to the first token, the gaps between tokens, "
    "and capacity?",
    source="mixing has 2.6 to 5.6 times the capacity under a limit of the p99 time between tokens "
    "(Sarathi-Serve, OSDI 2024); mixed and prefill-first have the same throughput, with a mean "
    "TTFT of 961 and 4,489 ms, and a p99 gap of 552 and 30 ms (aisimulate, pull request 120)",
    workload=f"{{n}} streamed requests, `--lengths {LENGTHS}`, {{seeds}} seeds, {ROWS} rows, "
    "virtual time with the iteration times of demo and of GPT-2 124M on 2 cores",
    requests=200,
    cases=cases,
    run=run,
    measures={**OF_TRACE, "rate": ("capacity, requests/s", "{:.2f}")},
    text=f"""\
The variants are values of `--prefill`:

- `mixed`: an iteration has prompts and decode rows.
- `first`: prompts are computed alone, and decode rows wait for them.
- `last, floor 16`: prompts are computed while fewer than 16 rows decode.
- `every:4`: prompts are computed after every four iterations of decode rows.
- `adaptive`: as `mixed`, with as many prompt tokens as keep gaps below {AIM} decode iterations of
  all rows ({", ".join(f"{AIM * decode_ms(m):.0f} ms on {name}" for m, name in MODELS.items())}).

Load is the rate of requests ÷ what `mixed` with a token budget of 256 completes of a burst. Prompts
have about ten tokens more than stated.""",
    tables=[
        Table(("model", "prompt", "load", "budget", "variant"), [*OF_TRACE], VS_MIXED,
              {"table": "grid"}, "By prompt length, load and token budget"),
        Table(
            ("model", "limit", "server"), ["rate"],
            [Against({"server": "first, 2048"}, ratios=["rate"])], LIMITED,
            "Capacity under a limit of the p99 gap between tokens",
            "Capacity is the highest rate at which the p99 gap is at most `limit` decode "
            f"iterations of all rows. `adaptive` aims at {MARGIN} of that. A server is its "
            "`--prefill` and its token budget. `first, 2048` is the rule of vLLM V0, the baseline "
            "of Sarathi-Serve.",
        ),
        Table(
            ("model", "variant"), [*OF_TRACE], VS_MIXED, CLOSED_LOOP,
            "A closed loop of equal requests",
            f"{ROWS} users send a request when their last one is answered. A request has "
            f"{CLOSED['prompt']} prompt tokens and as many completion tokens; the token budget "
            "holds two prompts. With `first` all requests begin and end together, in waves.",
        ),
    ],
    figure="p99 gap between tokens and mean TTFT by token budget, and in a closed loop",
    panels=[
        panel
        for measure, label in SHOWN.items()
        for panel in (
            *(
                Panel(f"{name}, prompts of {PROMPTS[-1]} tokens", f"{label}, ms", measure, "budget",
                      "token budget", where={**HARD, "model": model}, log=True)
                for model, name in MODELS.items()
            ),
            Panel("closed loop", f"{label} ÷ mixed's", measure, name_of, where=CLOSED_LOOP,
                  base=MIXED),
        )
    ],
    styles=dict(zip(VARIANTS, STYLES)),
)  # fmt: skip
