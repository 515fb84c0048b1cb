"""Many adapters on one model: their cost in the engine, and the effect of each rule for slots.

Engine: rows that decode, each with an adapter of its own, without HTTP. The rest is in virtual
time, at the costs of the fake engine and of adapters as `LOAD_MS` and `TOKEN_MS` state them.
"""

from __future__ import annotations

import functools
import itertools
import time
from dataclasses import replace
from typing import Any

import torch

from client.drawing import LOOKS
from client.measure import judged
from client.workloads import Workload
from config import Config, build
from generate.loading import load_generator
from generate.weights import locate
from lab.studies.runner import FinishedRuns
from lab.studies.study import Against, Case, Panel, Study, Table
from lab.studies.virtual import VIRTUAL
from scheduling.building import build_scheduler
from scheduling.inference import Generator, Inference
from simulate.costs import FAKE
from simulate.run import SimulatedServer
from simulate.time import PS

LOAD_MS, TOKEN_MS = 50.0, 0.02  # of a fake engine, whose iteration takes 8 ms and 0.3 ms a row
COSTS = replace(FAKE, load=round(LOAD_MS / 1e3 * PS), adapter_token=round(TOKEN_MS / 1e3 * PS))
LENGTHS, ROWS, SLOTS = "exponential:60:400", 32, 8
NUMBERS = (1, 2, 4, 8, 16, 32, 64)
POPULARITIES = ("distinct", "uniform", "skewed", "identical")
RULES: dict[str, dict[str, Any]] = {
    "mixed": {},
    "grouped": {"lora_policy": "grouped"},
    "skip": {"lora_policy": "skip", "max_wait_s": 5.0},
    "drain": {"lora_policy": "drain", "max_wait_s": 5.0},
}
MODELS: dict[str, dict[str, Any]] = {
    "demo": {"model": "demo"},
    "GPT-2 124M": {"model": "gpt2", "weights": "random", "tokenizer": "bytes"},
}
RANK, PROMPT, ITERATIONS = 8, 8, {"demo": 60, "GPT-2 124M": 12}
MIXED, ENGINE = {"variant": "mixed"}, {"table": "engine"}


def cases(n: int) -> list[dict[str, Any]]:
    def case(table: str, adapters: int, popularity: str, slots: int, load: float, rule: str) -> Any:
        return {"table": table, "adapters": adapters, "popularity": popularity, "slots": slots,
                "load": load, "variant": rule}  # fmt: skip

    engine = [
        ENGINE | {"model": model, "rows": rows, "adapters": adapters}
        for model, rows in itertools.product(MODELS, (8, 32))
        for adapters in (0, 1, rows)
    ]
    return [
        *(case("number", n, "uniform", n, 0, r) for n in NUMBERS for r in ("mixed", "grouped")),
        *(case("rules", 64, each, SLOTS, 0, rule) for each in POPULARITIES for rule in RULES),
        *(case("slots", 16, "uniform", slots, 0.7, rule)
          for slots in (4, 8, 12, 16) for rule in RULES if rule != "grouped"),
        *engine,
    ]  # fmt: skip


def run(case: Case, n: int, seed: int, kept: FinishedRuns) -> dict[str, Any]:
    if case["table"] == "engine":
        return engine_run(case, seed)
    rate = f"poisson:{case['load'] * capacity(n):g}" if case["load"] else "burst"
    return virtual(case, n, seed, rate)


def virtual(case: Case, n: int, seed: int, arrivals: str) -> dict[str, Any]:
    """Serve a trace in virtual time."""
    popularity = f"{case['adapters']}:{case['popularity']}"
    workload = Workload(LENGTHS, seed=seed, prompts="ids", adapters=popularity)
    trace = workload.requests(n, arrivals, scaled=True)
    settings = {"model": "fake", "max_batch_size": ROWS, "max_waiting": 10**6}
    settings |= {"lora_random": f"{case['adapters']}:{RANK}", "max_loras": case["slots"]}
    config = build("dynamic", settings | RULES[case["variant"]], {})
    result = judged(trace, SimulatedServer("", config, COSTS).replay(trace), {})
    shown = ("output_throughput", "mean_ttft_ms", "p99_ttft_ms")
    return {name: result[name] for name in shown}


@functools.cache
def capacity(n: int) -> float:
    """Return the requests a second that are completed with a slot for each of 16 adapters."""
    case = {"adapters": 16, "popularity": "uniform", "slots": 16, "variant": "mixed"}
    tokens = Workload(LENGTHS, seed=1, prompts="ids").requests(n, "burst", scaled=True)
    mean = sum(request.num_tokens for request in tokens) / n
    return float(virtual(case, n, 1, "burst")["output_throughput"]) / mean


@functools.cache
def engine(model: str, adapters: int) -> tuple[Config, Generator]:
    lora = {"lora_random": f"{adapters}:{RANK}", "max_loras": adapters} if adapters else {}
    config = build("dynamic", {**MODELS[model], "max_batch_size": 32, **lora}, {})
    return config, load_generator(config, locate(config), 257)


def engine_run(case: Case, seed: int) -> dict[str, Any]:
    """Return tokens a second of rows that decode."""
    n, rows = case["adapters"], case["rows"]
    config, generator = engine(case["model"], n)
    torch.set_num_threads(config.threads)
    scheduler = build_scheduler(config)
    names = [f"lora-{i}" for i in range(n)] or [""]
    steps = ITERATIONS[case["model"]]
    asked = [Inference([7] * PROMPT, steps + 3, adapter=names[i % len(names)]) for i in range(rows)]
    scheduler.enqueue(asked, 0.0)
    took_s = []
    while scheduler.has_work:
        start = time.perf_counter()
        iteration, _ = scheduler.schedule(start)
        scheduler.apply(iteration, generator.generate(iteration), start)
        took_s.append(time.perf_counter() - start)
    return {"output_throughput": rows * steps / sum(took_s[2 : 2 + steps])}


STUDY = Study(
    name="adapters",
    title="Many adapters on one model",
    question="How much more does a batch with many adapters complete than one adapter at a time, "
    "and what does it cost if few of them fit into the memory of the engine?",
    source="batches of many adapters have 12 times the throughput of batches with one (Punica, "
    "arXiv 2310.18547), 4 times vLLM's (S-LoRA, arXiv 2311.03285), and nearly the same for any "
    "number of adapters (LoRAX)",
    workload=f"{{n}} requests, `--lengths {LENGTHS}`, {{seeds}} seeds, at most {ROWS} rows, "
    f"{VIRTUAL}; loading an adapter takes {LOAD_MS:g} ms, and each token with an adapter "
    f"{TOKEN_MS:g} ms. The last table is of the real engine: adapters of rank {RANK}, 2 cores",
    requests=1000,
    seeds=5,
    cases=cases,
    run=run,
    servers=True,
    measures={
        "output_throughput": ("throughput, tok/s", "{:,.0f}"),
        "mean_ttft_ms": ("TTFT mean, ms", "{:,.0f}"),
        "p99_ttft_ms": ("TTFT p99, ms", "{:,.0f}"),
    },
    text="""\
A slot holds one adapter in the engine. The variants are the values of `--lora-policy`:

- `mixed`: a batch has any adapters. A request without a slot waits, with all requests behind it.
- `grouped`: all requests of a batch have the same adapter.
- `skip`: as `mixed`, but other requests overtake a request without a slot, for 5 s at most.
- `drain`: as `skip`, but the first such request gets the slot of the adapter with the fewest tokens
  left to generate, which takes no new requests.""",
    tables=[
        Table(
            ("adapters", "variant"), ["output_throughput"],
            [
                Against({"variant": "grouped"}, ratios=["output_throughput"]),
                Against({"adapters": 1}, ratios=["output_throughput"], words="that of one adapter"),
            ],
            {"table": "number"}, "By the number of adapters",
            "All requests come at once. Adapters are equally popular, and each has a slot.",
        ),
        Table(
            ("popularity", "variant"), ["output_throughput", "mean_ttft_ms"],
            [Against(MIXED, ratios=["output_throughput", "mean_ttft_ms"])], {"table": "rules"},
            f"64 adapters on {SLOTS} slots, by popularity",
            "All requests come at once. `distinct`: each request has another adapter, as long as "
            "there are any; `uniform`: all adapters are equally popular; `skewed`: few have most "
            "requests; `identical`: all requests have the same one (Punica's names).",
        ),
        Table(
            ("slots", "variant"), ["mean_ttft_ms", "p99_ttft_ms"],
            [
                Against(MIXED, ratios=["mean_ttft_ms"]),
                Against({"slots": 16}, ratios=["mean_ttft_ms"], words="that with 16 slots"),
            ],
            {"table": "slots"}, "16 adapters, by the number of slots",
            "Requests come at 0.7 of the rate that 16 slots complete.",
        ),
        Table(
            ("model", "rows", "adapters"), ["output_throughput"],
            [Against({"adapters": 0}, ratios=["output_throughput"], words="that without adapters")],
            ENGINE, "Decode rows on the real engine",
        ),
    ],
    figure="Throughput against the number of adapters, and TTFT against the number of slots",
    panels=[
        Panel("a burst, a slot for each adapter", "throughput, tok/s", "output_throughput",
              "adapters", "adapters",
              where={"table": "number"}, log=True),
        Panel("16 adapters, load 0.7", "TTFT mean, ms", "mean_ttft_ms", "slots",
              "slots", where={"table": "slots"}, log=True),
    ],
    looks=dict(zip(RULES, LOOKS)),
)  # fmt: skip
