"""Approximations of a scheduler, one at a time: the error that each brings into a simulation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from client.drawing import STYLES
from client.measure import judged
from client.traces import Request
from lab.studies import virtual
from lab.studies.arena import FAST, Kind, Trace, prompts_of, requests_of
from lab.studies.study import Against, Case, Panel, Study, Table
from lab.studies.virtual import CAPACITY_SEED, Settings, pool
from simulate.costs import load

TRACE = Trace(
    "three of four chat, the fourth has a long prompt",
    [
        Kind("exponential:100:400", prompts_of(64), 0.75, {}),
        Kind("exponential:60:300", prompts_of(600), 0.25, {}),
    ],
)
COSTS, ROWS, BUDGET, BLOCK = "gpt2", 16, 256, 16
AMPLE = ROWS * 64  # KV blocks of the longest request in every row
POOLS = {"ample": AMPLE, "short": 128}
LOADS, BURST = (0.5, 0.8, 1.0), "burst"
EXACT, MEAN = "exact", "mean lengths"
VARIANTS: dict[str, Settings] = {
    EXACT: {},
    "a batch at a time": {"mode": "static", "compact_batches": True},
    "whole prompts": {"token_budget": 10**6},
    MEAN: {},
    "endless memory": pool(AMPLE),
    "tokens, not blocks": {"block_size": 1, **pool(BLOCK * POOLS["short"])},
}
OF_MEMORY = ("endless memory", "tokens, not blocks")  # the same where memory is ample


def cases(n: int) -> list[dict[str, Any]]:
    return [
        {"memory": memory, "load": share, "variant": variant}
        for memory in POOLS
        for share in (BURST, *LOADS)
        for variant in VARIANTS
        if memory == "short" or variant not in OF_MEMORY
    ]


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    """Return the capacity in a burst, in requests per second; or times at a load, in ms."""
    of = case["variant"], POOLS[case["memory"]]
    if case["load"] == BURST:
        return {"capacity": capacity(*of, n, seed)}
    rate = case["load"] * capacity(EXACT, of[1], n, CAPACITY_SEED)
    result = measures(*of, drawn(case["variant"], rate, n, seed))
    return {name: result[name] for name in TIMES}


@functools.cache
def capacity(variant: str, kv_blocks: int, n: int, seed: int) -> float:
    """Return the requests per second that are completed while others always wait."""
    return float(measures(variant, kv_blocks, drawn(variant, FAST, n, seed))["capacity"])


def drawn(variant: str, rate: float, n: int, seed: int) -> list[Request]:
    """Return the trace as a variant sees it."""
    requests = requests_of(TRACE, rate, n, seed)
    if variant != MEAN:
        return requests
    prompts = evened([len(request.ids) for request in requests])
    tokens = evened([request.num_tokens for request in requests])
    return [
        request.model_copy(update={"prompt_ids": [0] * prompt, "num_tokens": length})
        for request, prompt, length in zip(requests, prompts, tokens)
    ]


def evened(lengths: Sequence[int]) -> list[int]:
    """Return as many lengths of the same sum, none more than one apart from another."""
    n = len(lengths)
    return [int(each) for each in np.diff(np.arange(n + 1) * sum(lengths) // n)]


def measures(variant: str, kv_blocks: int, requests: Sequence[Request]) -> dict[str, Any]:
    """Return the measures of a trace that is served with so many KV blocks."""
    settings: dict[str, Any] = {"token_budget": BUDGET, "block_size": BLOCK, **pool(kv_blocks)}
    settings |= {"max_batch_size": ROWS, **VARIANTS[variant]}
    if "mode" not in settings:
        settings["kv_reservation"] = "demand"
    outcomes = virtual.server(settings, load(COSTS), stream=True).replay(requests)
    capacity = virtual.while_waiting(outcomes.answers.times_at_server)
    return judged(requests, outcomes, {}) | {"capacity": capacity}


TIMES = {name: virtual.OF_TRACE[name] for name in ("mean_ttft_ms", "p99_ttft_ms", "p99_e2el_ms")}
AGAINST = {"variant": EXACT}
STUDY = Study(
    name="approximations",
    title="Simulators with an approximate scheduler",
    question="How wrong is a simulation whose scheduler is only an approximation of the server's?",
    source="an approximation of vLLM's scheduler adds to a simulator's error, and by how much is "
    "an open question (BLIS, issue 1272)",
    workload=f"{{n}} requests ({TRACE.words}), {{seeds}} seeds, virtual time with `--costs "
    f"{COSTS}`; {ROWS} rows, token budget {BUDGET}, KV blocks on demand: {POOLS['ample']} "
    f"(ample) or {POOLS['short']} (short)",
    requests=300,
    cases=cases,
    run=run,
    measures={"capacity": ("capacity, requests/s", "{:.2f}"), **TIMES},
    text="""\
`exact` is a simulation that runs the server's own scheduler. It is the reference here; no real
server runs. Each other variant has the same iteration times and traces, and simplifies one thing:

- `a batch at a time`: requests join only when all rows are free. Each is answered when finished.
- `whole prompts`: a prompt is one chunk, whatever the token budget.
- `mean lengths`: every request has the mean prompt and the mean completion of its trace.
- `endless memory`: there are always free KV blocks, so nothing is preempted.
- `tokens, not blocks`: memory is counted in tokens, as if a block had one token.

With ample memory the last two are the same as `exact`, and are left out.""",
    tables=[
        Table(("memory", "variant"), ["capacity"], [Against(AGAINST, ratios=["capacity"])],
              {"load": BURST}, "Capacity"),
        Table(("memory", "load", "variant"), list(TIMES), [Against(AGAINST, ratios=list(TIMES))],
              {"load": LOADS}, "Times by load (1: the capacity of `exact`)"),
    ],
    figure="Mean TTFT ÷ that of the exact simulation, by load",
    panels=[
        Panel(f"{memory} memory", "TTFT mean ÷ exact's", "mean_ttft_ms", "load", "load",
              where={"memory": memory, "load": LOADS}, base=AGAINST, log=True) for memory in POOLS
    ],
    styles=dict(zip(VARIANTS, STYLES)),
)  # fmt: skip
