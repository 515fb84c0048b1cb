"""Savings of prefix caching by trace, and what a small pool leaves of them.

The prompt of a later turn of a conversation contains the fake engine's answers to earlier ones.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from client.drawing import PALETTE, Style
from client.traces import Request
from client.workloads import Workload
from generate.fake import PREFILL_TOKEN_S
from lab.studies import virtual
from lab.studies.study import Against, Case, Panel, Study, Table, grid, load_of
from lab.studies.virtual import BLOCK, CAPACITY_SEED, VIRTUAL, Settings
from scheduling.inference import Inference
from stats import times_of

PREFIX = 256  # tokens of a shared prefix
LENGTHS = "exponential:50:400"
LOADS = ("0.5", "0.8", "1", "1.2")
CACHED_TRACES: dict[str, dict[str, Any]] = {
    "shared": {"prefixes": f"16:{PREFIX}:1"},
    "conversations": {"sessions": "4:0.5"},
    "random": {"prompts": "ids"},
}
ORDERED_TRACES: dict[str, dict[str, Any]] = {
    "64 prefixes": {"prefixes": f"64:{PREFIX}:1"},
    "64 prefixes, short answers": {"prefixes": f"64:{PREFIX}:1", "lengths": "uniform:1:8"},
}
POOLED_TRACES = ("64 prefixes", "conversations")
TRACES = CACHED_TRACES | ORDERED_TRACES
CACHING: Settings = {"prefix_caching": True}
FCFS, BY_PREFIX = "dynamic, caching", "dynamic, caching, prefix order"
VARIANTS: dict[str, Settings] = {
    "static": {"mode": "static"},
    "static, caching": {"mode": "static", **CACHING},
    "dynamic": {},
    FCFS: CACHING,
    BY_PREFIX: {**CACHING, "order": "prefix"},
}
MODES, ORDERED = list(VARIANTS)[:4], list(VARIANTS)[2:]  # compared by trace, and on a small pool
POOLS = (1, 2, 4, 8, 16)  # of the KV blocks that are in use without caching


def cases(n: int) -> list[dict[str, Any]]:
    """Return the cases. kv_blocks None: the server's default, more than 32 rows can use. pool: the
    size as a multiple of the blocks in use.
    """
    caching = grid(table=["caching"], trace=CACHED_TRACES, load=(*LOADS, "burst"), variant=MODES)(n)
    order = grid(
        table=["order"], trace=ORDERED_TRACES, load=("burst", "0.8", "1.2"), variant=ORDERED
    )(n)
    pool = grid(table=["pool"], trace=POOLED_TRACES, load=["0.8"], variant=ORDERED[1:], pool=POOLS)(
        n
    )
    for case in caching + pool:
        case |= {"kv_blocks": None, "rate": rate_of(case["trace"], "dynamic", None, n)}
    for case in order:
        blocks = small_pool(case["trace"])
        case |= {"kv_blocks": blocks, "rate": rate_of(case["trace"], FCFS, blocks, n)}
    for case in pool:
        blocks = round(case["pool"] * blocks_in_use(case["trace"], n))
        case["kv_blocks"] = max(blocks, virtual.LONGEST // BLOCK)
    # static queues at all loads but the lightest
    light = [case for case in caching if case["load"] == "burst" or "static" not in case["variant"]]
    return light + order + pool


@functools.cache
def rate_of(trace: str, variant: str, kv_blocks: int | None, n: int) -> float:
    """Return the requests completed per second, or the conversations where there are any."""
    burst = data_of(trace, CAPACITY_SEED).requests(4 * n, scaled=True)
    turns = int(TRACES[trace].get("sessions", "1").split(":")[0])
    tokens = turns * data_of(trace, 0).mean_num_tokens
    return served(variant, kv_blocks, burst)["throughput"] / tokens


@functools.cache
def blocks_in_use(trace: str, n: int) -> float:
    """Return the mean KV blocks in use without caching, at a load of 0.8."""
    rate = 0.8 * rate_of(trace, "dynamic", None, n)
    requests = data_of(trace, CAPACITY_SEED).requests(n, f"poisson:{rate:g}", scaled=True)
    return served("dynamic", None, requests)["blocks"]


@functools.cache
def small_pool(trace: str) -> int:
    """Return the KV blocks of eight mean requests and a third of the prefixes."""
    return virtual.pool_of(8, data_of(trace, CAPACITY_SEED), 64 * PREFIX / BLOCK / 3)


def data_of(trace: str, seed: int) -> Workload:
    return Workload(**({"lengths": LENGTHS} | TRACES[trace]), seed=seed)


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    load = case["load"]
    arrival = "burst" if load == "burst" else f"poisson:{float(load) * case['rate']:g}"
    requests = data_of(case["trace"], seed).requests(n, arrival, scaled=True)
    return served(case["variant"], case["kv_blocks"], requests)


def served(variant: str, kv_blocks: int | None, requests: Sequence[Request]) -> dict[str, float]:
    """Return the measures of a trace. A turn that has outgrown the context is not sent, nor are
    those after it.
    """
    settings = {**virtual.pool(kv_blocks), **VARIANTS[variant]}
    outcomes, seen = virtual.served(settings, requests)
    blocks_s = sum(record.iteration.blocks_used * record.seconds for record in seen.records)
    rows = (row for record in seen.records for row in record.iteration.rows)
    prefilled = sum(row.n_tokens for row in rows if not row.decodes)
    inferences = sorted(seen.inferences, key=lambda inference: inference.id)
    prompts = sum(len(i.prompt_ids) for i in inferences)
    hits = prompts - prefilled
    alike = Counter(tuple(i.prompt_ids[:PREFIX]) for i in inferences)
    by_rarity = sorted(inferences, key=lambda i: alike[tuple(i.prompt_ids[:PREFIX])])
    ttft_ms = {i: 1e3 * times_of(i).ttft_s for i in by_rarity}
    return {
        "blocks": blocks_s / seen.busy_s,
        "prefill": 100 * prefilled * PREFILL_TOKEN_S / seen.busy_s,
        "computed": 100 * prefilled / prompts,
        "hits": 100 * hits / prompts,
        "hits_to_oracle": 100 * hits / (oracle(inferences) or 1),
        "ttft_ms": statistics.mean(ttft_ms.values()),
        "ttft_p99_ms": float(np.percentile([*ttft_ms.values()], 99)),
        "wait_ms": 1e3 * max(times_of(i).queue_s for i in inferences),
        "rare_ms": statistics.mean([*ttft_ms.values()][: len(inferences) // 4]),
        "mean_ms": 1e3 * float(outcomes.answers.e2e_s.mean()),
        "throughput": virtual.throughput(outcomes),
    }


def oracle(inferences: Sequence[Inference]) -> int:
    """Return the prompt tokens that an unlimited pool would have cached: of full blocks, without
    that of a prompt's last token, that occurred at the beginning of any earlier request.
    """
    known: set[bytes] = set()
    tokens = 0
    for i in sorted(inferences, key=lambda i: (i.arrived_at, i.id)):
        keys = i.prefix.keys[1:] if i.prefix else []  # with those of the completion
        most = (len(i.prompt_ids) - 1) // BLOCK
        tokens += BLOCK * sum(1 for _ in itertools.takewhile(known.__contains__, keys[:most]))
        known.update(keys)
    return tokens


BY = ("trace", "load", "variant")
COMMON = ("computed", "ttft_ms", "ttft_p99_ms", "mean_ms", "throughput")


def without_caching(case: Case) -> Case:
    return {"variant": case["variant"].split(",")[0]}


GAIN = ("throughput",)
WITHOUT = Against(without_caching, ("ttft_ms", "mean_ms"), GAIN, "that without caching")
ON_POOL = Against({"variant": FCFS}, ("ttft_ms", "wait_ms"), GAIN)
HITS = ("hits, % of those of an unlimited pool", "{:.1f}")
CACHED = {"table": "caching", "load": LOADS, "variant": ("dynamic", FCFS)}
STUDY = Study(
    name="prefixes",
    title="Prefix caching",
    question="How much does prefix caching save, on which traces, and how much of it with few KV "
    "blocks?",
    source="serving the request with the longest cached prefix first lowers latency (SGLang); "
    "grouping requests by prefix raises throughput (BatchLLM, arXiv 2412.03594)",
    workload=f"{{n}} requests, `--lengths {LENGTHS}`, {{seeds}} seeds, at most 32 rows, {VIRTUAL}",
    cases=cases,
    run=run,
    measures={
        "computed": ("prompt tokens computed, %", "{:.1f}"),
        "hits": ("hit rate, %", "{:.1f}"),
        "prefill": ("time in prefill, %", "{:.1f}"),
        "ttft_ms": ("TTFT mean, ms", "{:,.1f}"),
        "ttft_p99_ms": ("TTFT p99, ms", "{:,.1f}"),
        "wait_ms": ("longest time queued, ms", "{:,.0f}"),
        "rare_ms": ("rarest prefixes: TTFT mean, ms", "{:,.1f}"),
        "mean_ms": ("latency mean, ms", "{:,.0f}"),
        "throughput": ("throughput, tok/s", "{:,.0f}"),
        "hits_to_oracle": HITS,
    },
    text="Traces, as arguments of `./compare.sh`:\n\n"
    + "\n".join(
        f"- {name}: {', '.join(f'`--{key} {value}`' for key, value in drawn.items())}"
        for name, drawn in TRACES.items()
    )
    + "\n\nA turn whose conversation no longer fits into the context is not sent.",
    tables=[
        Table(
            BY, (*COMMON, "hits", "prefill"), [WITHOUT], {"table": "caching"},
            "With and without caching, where all prefixes fit",
            "Load is the rate of requests ÷ what `dynamic` without caching completes.",
        ),
        Table(
            (*BY, "kv_blocks"), (*COMMON, "wait_ms", "rare_ms"), [ON_POOL], {"table": "order"},
            "Orders on a small pool",
            "The pool has the KV blocks of eight requests of mean length and of a third of the 64 "
            "prefixes. `prefix order` serves the request with the longest cached prefix first, the "
            "other variants by arrival. Load is the rate of requests ÷ what "
            f"`{FCFS}` completes. Rarest prefixes: those of a quarter of the requests.",
        ),
        Table(
            ("trace", "variant", "pool", "kv_blocks"), ["hits_to_oracle"], [], {"table": "pool"},
            "Hits by the size of the pool",
            "Pool: its KV blocks ÷ those in use without caching, at a load of 0.8.",
        ),
    ],
    figure="TTFT by load, throughput of a burst, and hits by the size of the pool",
    panels=[
        *(
            Panel(trace, "TTFT mean, ms", "ttft_ms", load_of, "load", where=where, log=True)
            for trace in CACHED_TRACES
            for where in [CACHED | {"trace": trace}]
        ),
        *(
            Panel(title, "throughput, tok/s", "throughput", "trace",
                  where={"table": table, "load": "burst"})
            for table, title in {"caching": "burst", "order": "burst on a small pool"}.items()
        ),
        Panel("hits by pool size", HITS[0], "hits_to_oracle", "pool", "KV blocks ÷ those in use",
              "trace", {"table": "pool", "variant": FCFS}),
    ],
    styles={
        name: Style(colour, "-" if "caching" in name else "--", "o")
        for name, colour in zip(
            VARIANTS, ("#f0c4a0", PALETTE[1], "#a3d4c5", PALETTE[3], PALETTE[5]))
    },
)  # fmt: skip
