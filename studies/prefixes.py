"""What prefix caching saves, on what, and what a small pool leaves of it: virtual time, seeded.

    python -m studies.prefixes [--loads 0.5,0.8,1,1.2] [--seeds 5] [--out DIR]

The server's own scheduler at the cost of `--model fake`. A load is a share of what `dynamic`
without caching completes; where orders are compared, of what `fcfs` with caching does on the same
pool. All variants serve the same traces, so differences are paired by seed. A later turn of a
conversation holds the answers before it, as the fake engine gives them.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from client.traces import Request
from client.workloads import Workload
from config import Config, build
from generate.fake import PREFILL_TOKEN_S, FakeGenerator, cost_s
from scheduling import scheduler
from scheduling.inference import Inference, Iteration, Sampling
from scheduling.policies import ORDERS
from scheduling.prefix_cache import block_keys
from simulate import Arrival, any_ids, drive
from stats import times_of
from studies.prefix_tables import figure, tables
from studies.runner import Study, over_seeds, parser_of, write

BLOCK = 16
PREFIX = 256  # tokens of a shared prefix
LONGEST = 1024 // BLOCK  # KV blocks that a request may need
LENGTHS = "exponential:50:400"
TRACES: dict[str, dict[str, Any]] = {
    "shared": {"prefixes": f"16:{PREFIX}:1"},
    "conversations": {"sessions": "4:0.5"},
    "random": {"prompts": "ids"},
    "64 prefixes": {"prefixes": f"64:{PREFIX}:1"},
    "64 prefixes, short answers": {"prefixes": f"64:{PREFIX}:1", "lengths": "uniform:1:8"},
}
CACHING: dict[str, Any] = {"prefix_caching": True}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "static": ("static", {}),
    "static, caching": ("static", CACHING),
    "dynamic": ("dynamic", {}),
    "dynamic, caching": ("dynamic", CACHING),
}
if "prefix" in ORDERS:
    ordered = CACHING | {"order": "prefix", "prefix_window": 128}
    VARIANTS["dynamic, caching, prefix order"] = "dynamic", ordered
MODES, ORDERED = list(VARIANTS)[:4], list(VARIANTS)[2:]  # compared by trace, and on a small pool
POOLS = (1, 2, 4, 8, 16)  # of the KV blocks that are in use without caching
STUDY = Study(
    "studies.prefixes",
    "prefixes",
    "Prefix caching",
    "Time to the first token over load, throughput, and hits over pool size",
)


class Case(NamedTuple):
    """What is served how; a load of `burst` is all at once, others are shares of what `base`
    completes.
    """

    table: str
    trace: str
    load: str
    variant: str
    base: str = "dynamic"
    kv_blocks: int | None = None  # None: the server's default, more than 32 rows can use
    pool: float | None = None  # in blocks that are in use


def config_of(variant: str, kv_blocks: int | None) -> Config:
    """The server's, of `--model fake`."""
    mode, settings = VARIANTS[variant]
    return build(
        mode,
        {
            "model": "fake",
            "max_waiting": 10**6,
            "kv_cache": kv_blocks and f"{kv_blocks}blocks",
            **settings,
        },
        {},
    )


def data_of(trace: str, seed: int) -> Workload:
    return Workload(**({"lengths": LENGTHS} | TRACES[trace]), seed=seed)


def serve(config: Config, requests: Sequence[Request]) -> dict[str, float]:
    """Serve a trace in virtual time: what came of it.

    A turn that has outgrown the context is not asked, nor are those after it.
    """
    followers = {r.after: r for r in requests if r.after is not None}
    asked: dict[Inference, Request] = {}

    def ask(request: Request, at: float, said: Sequence[int] = ()) -> Iterable[Arrival]:
        ids = [*said, *request.ids]
        keys = block_keys(ids, BLOCK) if config.prefix_caching else None
        sampling = Sampling(seed=request.seed or 0)
        inference = Inference(ids, request.num_tokens, sampling, keys=keys)
        if inference.total_tokens <= config.max_model_len:
            asked[inference] = request
            yield at, [inference]

    def ended(now: float, inference: Inference) -> Iterable[Arrival]:
        if following := followers.get(asked[inference].id):
            said = inference.prompt_ids + inference.tokens
            yield from ask(following, now + (following.think_s or 0.0), said)

    busy_s = blocks_s = prefilled = 0.0

    def cost(iteration: Iteration) -> float:
        nonlocal busy_s, blocks_s, prefilled
        seconds = cost_s(iteration)
        busy_s += seconds
        blocks_s += iteration.blocks_used * seconds
        prefilled += sum(row.n_tokens for row in iteration.rows if not row.decodes)
        return seconds

    served_by = scheduler.build(config)
    firsts = (arrival for r in requests if r.after is None for arrival in ask(r, r.at))
    generate = FakeGenerator(lambda seconds: None).generate if followers else any_ids
    end = drive(served_by, firsts, cost, generate, ended=ended)
    told_of = {"blocks": blocks_s / busy_s, "prefill": 100 * prefilled * PREFILL_TOKEN_S / busy_s}
    return told_of | measures(list(asked), prefilled, served_by.snapshot().prefix_hits, end)


def measures(
    served: Sequence[Inference], prefilled: float, hits: int, end: float
) -> dict[str, float]:
    prompts = sum(len(i.prompt_ids) for i in served)
    times = {i: times_of(i) for i in served}
    alike = Counter(tuple(i.prompt_ids[:PREFIX]) for i in served)
    rare = sorted(served, key=lambda i: alike[tuple(i.prompt_ids[:PREFIX])])[: len(served) // 4]
    ttft_ms = [1e3 * times[i].ttft_s for i in served]
    return {
        "computed": 100 * prefilled / prompts,
        "hits": 100 * hits / prompts,
        "hits_to_oracle": 100 * hits / (oracle(served) or 1),
        "ttft_ms": statistics.mean(ttft_ms),
        "ttft_p99_ms": float(np.percentile(ttft_ms, 99)),
        "wait_ms": max(1e3 * times[i].queue_s for i in served),
        "rare_ms": statistics.mean(1e3 * times[i].ttft_s for i in rare),
        "mean_ms": statistics.mean(1e3 * times[i].e2e_s for i in served),
        "throughput": sum(len(i.tokens) for i in served) / end,
        "requests": len(served),
    }


def oracle(served: Sequence[Inference]) -> int:
    """Prompt tokens that an unlimited pool would hold: the full blocks of a prompt, less that of
    its last token, that occurred at the beginning of anything served to who came before.
    """
    known: set[bytes] = set()
    found = 0
    for i in sorted(served, key=lambda i: (i.arrived_at, i.id)):
        keys = (i.keys or [])[1:]  # its completion's, too
        most = (len(i.prompt_ids) - 1) // BLOCK
        found += BLOCK * sum(1 for _ in itertools.takewhile(known.__contains__, keys[:most]))
        known.update(keys)
    return found


def burst(trace: str, variant: str, kv_blocks: int | None, n: int) -> dict[str, float]:
    return serve(config_of(variant, kv_blocks), data_of(trace, 2**31).requests(n, scaled=True))


def small_pool(trace: str) -> int:
    """KV blocks of eight mean requests and a third of the prefixes."""
    data = data_of(trace, 2**31)
    life = statistics.mean(len(r.ids) + r.num_tokens for r in data.requests(2000))
    return round(8 * life / BLOCK + 64 * PREFIX / BLOCK / 3)


def cases_of(loads: Sequence[str], used: Mapping[str, float]) -> list[Case]:
    """used: KV blocks in use of the traces that are served on pools of so many times as many."""
    shared = [
        Case("caching", trace, load, variant)
        for trace, load, variant in itertools.product(list(TRACES)[:3], [*loads, "burst"], MODES)
        if load == "burst" or "static" not in variant  # which queues at all but the lightest
    ]
    ordered = [
        Case("order", trace, load, variant, "dynamic, caching", small_pool(trace))
        for trace in list(TRACES)[3:]
        for load, variant in itertools.product(("burst", "0.8", "1.2"), ORDERED)
    ]
    pooled = [
        Case("pool", trace, "0.8", variant, kv_blocks=max(round(pool * blocks), LONGEST), pool=pool)
        for trace, blocks in used.items()
        for variant, pool in itertools.product(ORDERED[1:], POOLS)
    ]
    return shared + ordered + pooled


def task(case: Case, n: int, rate: float, seed: int) -> dict[str, float]:
    """rate: of conversations where there are any, else of requests."""
    arrival = "burst" if case.load == "burst" else f"poisson:{float(case.load) * rate:g}"
    requests = data_of(case.trace, seed).requests(n, arrival, scaled=True)
    return serve(config_of(case.variant, case.kv_blocks), requests)


def study(loads: Sequence[str], seeds: int, n: int, processes: int) -> list[dict[str, Any]]:
    """Of each case what every seed's trace came to."""
    with multiprocessing.Pool(processes) as workers:

        def rates_of(cases: Iterable[Case]) -> dict[tuple[str, str, int | None], float]:
            whats = sorted({what_of(case) for case in cases}, key=str)
            bursts = workers.starmap(burst, [(*what, 4 * n) for what in whats])
            return {w: b["throughput"] / a_request(w[0]) for w, b in zip(whats, bursts)}

        alone = [
            Case("pool", trace, "0.8", "dynamic") for trace in ("64 prefixes", "conversations")
        ]
        rates = rates_of(alone)
        runs = workers.starmap(task, [(c, n, rates[what_of(c)], 2**31) for c in alone])
        used = {case.trace: run["blocks"] for case, run in zip(alone, runs)}
        cases = cases_of(loads, used)
        rates = rates_of(cases)
        tasks = [(case, n, rates[what_of(case)]) for case in cases]
        results = over_seeds(workers, task, tasks, seeds)
    return [
        case._asdict()
        | {"rate": rates[what_of(case)], "blocks_in_use": used.get(case.trace)}
        | {"seeds": of_seeds}
        for case, of_seeds in zip(cases, results)
    ]


def what_of(case: Case) -> tuple[str, str, int | None]:
    """What a load is a share of; a pool that is to be judged does not set its own load."""
    return case.trace, case.base, case.kv_blocks if case.base != "dynamic" else None


def a_request(trace: str) -> float:
    """Completion tokens of what arrives on its own: a request, or all turns of a conversation."""
    turns = int(TRACES[trace].get("sessions", "1").split(":")[0])
    return turns * data_of(trace, 0).mean_num_tokens


def main() -> None:
    parser = parser_of(STUDY, "What prefix caching saves, and what a small pool leaves of it.")
    parser.add_argument(
        "--loads", default="0.5,0.8,1,1.2", help="besides a burst (default: %(default)s)"
    )
    parser.add_argument("--requests", type=int, default=1000, help="of a trace (default: 1000)")
    options = parser.parse_args()
    found = study(options.loads.split(","), options.seeds, options.requests, options.processes)
    n = f"{options.requests} requests of lengths {LENGTHS}, {options.seeds} seeds"
    told_of = f"{n}, at most 32 rows; virtual time at the cost of --model fake"
    traces = "; ".join(
        f"{name}: {', '.join(f'`--{key} {value}`' for key, value in of.items())}"
        for name, of in TRACES.items()
    )
    body = f"Traces are {traces}.\n\n{tables(found)}"
    result = {"cases": found, "traces": TRACES, "variants": VARIANTS, "lengths": LENGTHS}
    write(STUDY, options.out, told_of, body, figure(found, told_of), result)


if __name__ == "__main__":
    main()
