"""Many adapters on one model: their cost in the engine, and what rules for few slots do."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from client.drawing import STYLES
from client.workloads import Workload
from lab.studies import virtual
from lab.studies.engines import MODELS, engine, iterate
from lab.studies.runner import FinishedRuns
from lab.studies.study import Against, Case, Panel, Study, Table, grid
from lab.studies.virtual import VIRTUAL, Settings
from scheduling.building import build_scheduler
from scheduling.inference import Inference
from simulate.costs import FAKE
from simulate.loop import PS

LOAD_MS, TOKEN_MS = 50.0, 0.02  # of a fake engine, whose iteration takes 8 ms and 0.3 ms a row
COSTS = replace(FAKE, load=round(LOAD_MS / 1e3 * PS), adapter_token=round(TOKEN_MS / 1e3 * PS))
LENGTHS, ROWS, SLOTS = "exponential:60:400", 32, 8
NUMBERS = (1, 2, 4, 8, 16, 32, 64)
POPULARITIES = ("distinct", "uniform", "skewed", "identical")
RULES: dict[str, Settings] = {
    "mixed": {},
    "grouped": {"lora_policy": "grouped"},
    "skip": {"lora_policy": "skip", "max_wait_s": 5.0},
    "drain": {"lora_policy": "drain", "max_wait_s": 5.0},
}
FREE, FEW = ("mixed", "skip", "drain"), (4, 8, 12, 16)  # of 16 adapters: rules, and slots
RANK, PROMPT, ITERATIONS = 8, 8, {"demo": 60, "GPT-2 124M": 12}
MEASURES = ("output_throughput", "mean_ttft_ms", "p99_ttft_ms")
MIXED = {"variant": "mixed"}
NUMBER, RULED, SLOTTED, ENGINE = ({"table": t} for t in ("number", "rules", "slots", "engine"))


def cases(n: int) -> list[dict[str, Any]]:
    def of(table: str, load: float, **axes: Iterable[Any]) -> list[dict[str, Any]]:
        return grid(table=[table], load=[load], **axes)(n)

    number = of("number", 0, adapters=NUMBERS, variant=("mixed", "grouped"))
    return [
        *({**case, "popularity": "uniform", "slots": case["adapters"]} for case in number),
        *of("rules", 0, adapters=[64], popularity=POPULARITIES, slots=[SLOTS], variant=RULES),
        *of("slots", 0.7, adapters=[16], popularity=["uniform"], slots=FEW, variant=FREE),
        *({**ENGINE, "model": model, "rows": rows, "adapters": adapters}
          for model in MODELS for rows in (8, 32) for adapters in (0, 1, rows)),
    ]  # fmt: skip


def run(case: Case, n: int, seed: int, kept: FinishedRuns) -> dict[str, Any]:
    if case["table"] == "engine":
        return {"output_throughput": decoded(case)}
    rate = f"poisson:{case['load'] * capacity(n):g}" if case["load"] else "burst"
    return served(case, n, seed, rate)


def served(case: Case, n: int, seed: int, arrivals: str) -> dict[str, Any]:
    popularity = f"{case['adapters']}:{case['popularity']}"
    trace = Workload(LENGTHS, seed=seed, prompts="ids", adapters=popularity)
    settings = {"max_batch_size": ROWS, "lora_random": f"{case['adapters']}:{RANK}"}
    settings |= {"max_loras": case["slots"], **RULES[case["variant"]]}
    requests = trace.requests(n, arrivals, scaled=True)
    result = virtual.measures(virtual.server(settings, COSTS), requests)
    return {name: result[name] for name in MEASURES}


@functools.cache
def capacity(n: int) -> float:
    """Return the requests per second that are completed with a slot for each of 16 adapters."""
    case = {"adapters": 16, "popularity": "uniform", "slots": 16, "variant": "mixed"}
    tokens = Workload(LENGTHS, seed=1, prompts="ids").requests(n, "burst", scaled=True)
    mean = sum(request.num_tokens for request in tokens) / n
    return float(served(case, n, 1, "burst")["output_throughput"]) / mean


def decoded(case: Case) -> float:
    """Return tokens per second of rows that decode on a real engine."""
    n, rows, steps = case["adapters"], case["rows"], ITERATIONS[case["model"]]
    lora = {"lora_random": f"{n}:{RANK}", "max_loras": n} if n else {}
    config, generator = engine(**MODELS[case["model"]], max_batch_size=32, **lora)
    scheduler = build_scheduler(config)
    names = [f"lora-{i}" for i in range(n)] or [""]
    asked = [Inference([7] * PROMPT, steps + 3, adapter=names[i % len(names)]) for i in range(rows)]
    scheduler.enqueue(asked, 0.0)
    ends = []
    while scheduler.has_work:
        iterate(scheduler, generator)
        ends.append(time.perf_counter())
    return rows * steps / (ends[1 + steps] - ends[1])


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
    cases=cases,
    run=run,
    servers=True,
    measures={name: virtual.OF_TRACE[name] for name in MEASURES},
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
            NUMBER, "By the number of adapters",
            "All requests come at once. Adapters are equally popular, and each has a slot.",
        ),
        Table(
            ("popularity", "variant"), ["output_throughput", "mean_ttft_ms"],
            [Against(MIXED, ratios=["output_throughput", "mean_ttft_ms"])], RULED,
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
            SLOTTED, "16 adapters, by the number of slots",
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
        Panel("a burst, a slot for each", "throughput, tok/s", "output_throughput", "adapters",
              "adapters", where=NUMBER, log=True),
        Panel("16 adapters, load 0.7", "TTFT mean, ms", "mean_ttft_ms", "slots", "slots",
              where=SLOTTED, log=True),
    ],
    styles=dict(zip(RULES, STYLES)),
)  # fmt: skip
