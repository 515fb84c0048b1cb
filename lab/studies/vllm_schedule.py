"""vLLM's scheduler and ours over the same traces, iteration by iteration: virtual time, seeded.

Both have equal limits and compute nothing, and the time of an iteration follows from its tokens:
equal schedules keep equal clocks. After a first difference the schedulers are in different states,
so the iterations before it count as equal, and it is named. Needs
lab/benchmarks/requirements-vllm.txt, in an environment of its own.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from client.calls import ServerError
from client.saving import write
from generate.auto import build
from lab.studies.study import Case, Cases, Study, Table, values
from scheduling.building import build_scheduler
from scheduling.inference import CachedPrefix, Inference, Iteration
from scheduling.prefix_cache import block_keys
from simulate import drive, instant, seconds

LONGEST, BLOCK = 256, 16
MISSING = (
    "vLLM is missing: install lab/benchmarks/requirements-vllm.txt in an environment of its own"
)


class Limits(NamedTuple):
    """Limits of both schedulers."""

    name: str
    rows: int
    token_budget: int
    kv_blocks: int
    watermark: float = 0.0
    caching: bool = False


LIMITS = [
    Limits("ample", 32, 256, 512),
    Limits("chunks", 16, 40, 512),
    Limits("few rows", 4, 128, 512),
    Limits("few blocks", 32, 256, 40),
    Limits("few blocks, chunks", 16, 24, 40),
    Limits("fewest blocks", 8, 64, 18),
    Limits("watermark", 32, 128, 60, watermark=0.1),
    Limits("caching, ample", 32, 256, 2048, caching=True),
    Limits("caching, chunks", 16, 40, 512, caching=True),
    Limits("caching, few blocks, chunks", 16, 24, 40, caching=True),
    Limits("caching, few blocks", 32, 256, 60, caching=True),
    Limits("caching, fewest blocks", 8, 64, 18, caching=True),
    Limits("watermark, null block", 32, 128, 59, watermark=0.1),
]


class Drawn(NamedTuple):
    """A request, and the ids of its answer."""

    at: float
    prompt: list[int]
    completion: list[int]


class Step(NamedTuple):
    """An iteration; the first field that differs is the kind of difference."""

    preempted: frozenset[int]  # requests
    admitted: frozenset[int]
    cached: dict[int, int]  # tokens that each of these need not compute
    chunks: dict[int, int]  # tokens that are computed, by request
    at: float


class Steps(list[Step]):
    """A schedule."""

    running: frozenset[int] = frozenset()  # requests after the last iteration

    def add(
        self,
        at: float,
        rows: Mapping[int, tuple[int, int]],
        running: Iterable[int],
        waiting: Iterable[int],
    ) -> None:
        """rows: of each request the first token computed, and how many."""
        before, self.running = self.running, frozenset(running)
        joined, chunks = self.running - before, {i: n for i, (_, n) in rows.items()}
        cached = {i: rows[i][0] for i in joined}
        self.append(Step(before.intersection(waiting), joined, cached, chunks, at))


def draw(seed: int, requests: int) -> list[Drawn]:
    """Return a trace of prompts with common beginnings, which come in bursts, at one of three
    rates.
    """
    chance = random.Random(seed)
    beginnings = [chance.choices(range(50_000), k=n) for n in (0, 24, 48, 96)]
    gap_s = (0.05, 0.15, 0.5)[seed % 3]
    at, trace = 0.0, []
    for _ in range(requests):
        at += chance.expovariate(1 / gap_s) if chance.random() < 0.7 else 0.0
        own = chance.choices(range(50_000), k=chance.randint(1, 60))
        answer = chance.choices(range(50_000), k=chance.randint(1, 100))
        trace.append(Drawn(at, chance.choice(beginnings) + own, answer))
    return trace


def cost_s(tokens: int) -> float:
    """Return the time of an iteration."""
    return 0.01 + 0.0005 * tokens


def our_schedule(limits: Limits, trace: Sequence[Drawn]) -> Steps:
    """Return the schedule of our scheduler, by vLLM's rules."""
    settings: dict[str, Any] = {
        "model": "fake",
        "max_batch_size": limits.rows,
        "token_budget": limits.token_budget,
        "block_size": BLOCK,
        "kv_cache": f"{limits.kv_blocks}blocks",
        "max_model_len": LONGEST,
        "max_waiting": len(trace),
        "kv_reservation": "demand",
        "watermark": limits.watermark,
        "budget_counts": "all",
        "prefix_caching": limits.caching,
    }
    built, steps = build_scheduler(build("dynamic", settings, {})), Steps()

    def planned(now: float, iteration: Iteration) -> None:
        rows = {row.inference.id: (row.start, row.n_tokens) for row in iteration.rows}
        if rows:
            steps.add(now, rows, built.running, built.waiting)

    def generate(iteration: Iteration) -> list[int]:
        sampled = [row.inference for row in iteration.rows if row.samples]
        return [trace[inference.id].completion[len(inference.tokens)] for inference in sampled]

    def inference(drawn: Drawn) -> Inference:
        prefix = CachedPrefix(block_keys(drawn.prompt, BLOCK)) if limits.caching else None
        return Inference(drawn.prompt, len(drawn.completion), prefix=prefix)

    arrivals = [(drawn.at, [inference(drawn)]) for drawn in trace]
    drive(built, arrivals, lambda i: cost_s(sum(row.n_tokens for row in i.rows)), generate, planned)
    return steps


def vllm_scheduler(limits: Limits) -> Any:
    """Return vLLM's scheduler, for a model that is not computed, with one block more: its null
    block.
    """
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    n_blocks = limits.kv_blocks + 1
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=limits.caching)
    cache.num_gpu_blocks = n_blocks
    scheduling = SchedulerConfig(
        max_num_seqs=limits.rows,
        max_num_batched_tokens=limits.token_budget,
        max_model_len=LONGEST,
        is_encoder_decoder=False,
        watermark=limits.watermark,
    )
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 16, "n_positions": LONGEST}
    shape = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "config.json"), json.dumps(shape))
        model = ModelConfig(model=folder, dtype="float32", skip_tokenizer_init=True)
        config = VllmConfig(model_config=model, scheduler_config=scheduling, cache_config=cache)
    layer = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], layer)]
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(n_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )


def schedule_of_vllm(limits: Limits, trace: Sequence[Drawn]) -> Steps:
    """Return the schedule of vLLM's scheduler."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256) if limits.caching else None
    built, steps, now = vllm_scheduler(limits), Steps(), 0  # picoseconds, as our clock
    coming = list(enumerate(trace))[::-1]
    while coming or built.has_unfinished_requests():
        while coming and instant(coming[-1][1].at) <= now:
            number, drawn = coming.pop()
            params = SamplingParams(max_tokens=len(drawn.completion), ignore_eos=True)
            built.add_request(Request(str(number), drawn.prompt, params, None, block_hasher=hasher))
        output = built.schedule()
        tokens: dict[str, int] = output.num_scheduled_tokens
        if not tokens:
            now = instant(coming[-1][1].at)
            continue
        rows, ids = {}, list[list[int]]()
        for i, n in tokens.items():  # vLLM counts these n as computed already
            request, answer = built.requests[i], trace[int(i)].completion
            rows[int(i)] = (request.num_computed_tokens - n, n)
            whole = request.num_computed_tokens == request.num_tokens
            ids.append([answer[request.num_output_tokens]] if whole else [])
        queues = ([int(r.request_id) for r in queue] for queue in (built.running, built.waiting))
        steps.add(seconds(now), rows, *queues)
        now += instant(cost_s(sum(tokens.values())))
        places = {i: place for place, i in enumerate(tokens)}
        built.update_from_output(output, ModelRunnerOutput(list(tokens), places, ids))
    return steps


def compare(ours: Sequence[Step], vllms: Sequence[Step]) -> tuple[int, str]:
    """Return how many iterations are equal before the first difference, and its kind: a field of
    `Step`; "end" if one schedule is longer; none is "".
    """
    for i, (first, second) in enumerate(zip(ours, vllms)):
        if first != second:
            return i, next(name for name, a, b in zip(Step._fields, first, second) if a != b)
    return min(len(ours), len(vllms)), "" if len(ours) == len(vllms) else "end"


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    """Return counts of vLLM's schedule, and how far ours equals it."""
    if importlib.util.find_spec("vllm") is None:
        raise ServerError(MISSING)
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable(logging.WARNING)
    limits, trace = Limits(**case), draw(seed, n)
    steps = schedule_of_vllm(limits, trace)
    equal, kind = compare(our_schedule(limits, trace), steps)
    later = [i for step in steps for i, n in step.chunks.items() if n > 1 and i not in step.cached]
    return {
        "iterations": len(steps),
        "admitted": sum(len(step.admitted) for step in steps),
        "chunks": len(later),
        "preempted": sum(len(step.preempted) for step in steps),
        "cached": sum(sum(step.cached.values()) for step in steps),
        "equal": equal,
        "kind": kind,
    }


def sums(cases: Cases) -> list[dict[str, Any]]:
    """Return the cases with the sums over their traces, and the kinds of first differences."""
    result = []
    for case in cases:
        kinds = Counter(filter(None, values(case, "kind")))
        found = {name: sum(values(case, name)) for name in COUNTS}
        found["kind"] = ", ".join(f"{kind} {n}" for kind, n in kinds.items()) or "none"
        result.append({**case, "seeds": [found]})
    return result


COUNTS = {
    "iterations": ("iterations", "{:,}"),
    "admitted": ("admitted", "{:,}"),
    "chunks": ("later chunks", "{:,}"),
    "preempted": ("preempted", "{:,}"),
    "cached": ("cached tokens", "{:,}"),
    "equal": ("equal", "{:,}"),
}
STUDY = Study(
    name="vllm_schedule",
    title="Schedules of this server and of vLLM",
    question="Does this server's scheduler plan the same iterations as vLLM's?",
    workload="each case: {seeds} traces of {n} requests, KV blocks of 16 tokens, virtual time",
    requests=120,
    seeds=12,
    cases=lambda n: [limits._asdict() for limits in LIMITS],
    run=run,
    summarized=sums,
    measures={**COUNTS, "kind": ("first differences: traces", "")},
    text="""\
Both schedulers get the same traces and limits, and ours has `--budget-counts all`, vLLM's rule for
the token budget. Counts are sums over a case's traces: vLLM's iterations, requests admitted, chunks
of prompts after the first, preemptions, and tokens found in the prefix cache. *Equal* counts the
iterations before the first difference of a trace; the column after it names the kind of difference,
with the number of traces: requests `preempted` or `admitted`, tokens that a joining request finds
`cached`, `chunks` of tokens that are computed, or the instant (`at`).""",
    tables=[Table(("name", "rows", "token_budget", "kv_blocks", "watermark"))],
)
