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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from client.calls import ServerError
from compare.report.tables import markdown
from config import build
from lab.studies.study import Cases, Study, values
from scheduling.building import build_scheduler
from scheduling.inference import CachedPrefix, Inference, Iteration
from scheduling.prefix_cache import block_keys
from simulate import drive

Rows = dict[int, tuple[int, int]]  # of each request the first token computed, and how many
LONGEST, BLOCK = 256, 16
MISSING = (
    "vLLM is missing: install lab/benchmarks/requirements-vllm.txt in an environment of its own"
)
RULES = ("prefill", "all")  # values of --budget-counts: tokens that our budget bounds
BUDGET = "decoded tokens beside the budget"
WATERMARK = "watermark of the null block"
SAME = "found in the same iteration"
EVICTED = "evicted before it was looked for"
KINDS = ("preempted", "admitted", "cached", "chunks", "at")  # other differences, by field of Step
COUNTS = ("iterations", "admitted", "later chunks", "preempted", "cached tokens")


@dataclass(frozen=True)
class SharedLimits:
    """Limits of both schedulers."""

    name: str
    rows: int
    token_budget: int
    kv_blocks: int
    watermark: float = 0.0
    caching: bool = False


LIMITS = [
    SharedLimits("ample", 32, 256, 512),
    SharedLimits("chunks", 16, 40, 512),
    SharedLimits("few rows", 4, 128, 512),
    SharedLimits("few blocks", 32, 256, 40),
    SharedLimits("few blocks, chunks", 16, 24, 40),
    SharedLimits("fewest blocks", 8, 64, 18),
    SharedLimits("watermark", 32, 128, 60, watermark=0.1),
    SharedLimits("caching, ample", 32, 256, 2048, caching=True),
    SharedLimits("caching, chunks", 16, 40, 512, caching=True),
    SharedLimits("caching, few blocks, chunks", 16, 24, 40, caching=True),
    SharedLimits("caching, few blocks", 32, 256, 60, caching=True),
    SharedLimits("caching, fewest blocks", 8, 64, 18, caching=True),
    SharedLimits("watermark, null block", 32, 128, 59, watermark=0.1),
]


class Drawn(NamedTuple):
    """A request, and the ids of its answer."""

    at: float
    prompt: list[int]
    completion: list[int]


class Step(NamedTuple):
    """An iteration: its beginning, its rows, and the requests that joined or were preempted."""

    at: float
    rows: Rows
    admitted: set[int]
    preempted: set[int]

    @property
    def chunks(self) -> dict[int, int]:
        return {request: n for request, (_, n) in self.rows.items()}

    @property
    def later(self) -> list[int]:
        """Chunks of requests that had joined before."""
        return [n for request, n in self.chunks.items() if n > 1 and request not in self.admitted]

    @property
    def cached(self) -> dict[int, int]:
        """Tokens that joining requests need not compute."""
        return {request: self.rows[request][0] for request in self.admitted}


class Steps(list[Step]):
    """A schedule."""

    running: frozenset[int] = frozenset()  # requests after the last iteration

    def add(self, at: float, rows: Rows, running: Iterable[int], waiting: Iterable[int]) -> None:
        before, self.running = self.running, frozenset(running)
        self.append(Step(at, rows, {*self.running - before}, {*before.intersection(waiting)}))


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


def our_schedule(limits: SharedLimits, trace: Sequence[Drawn], counts: str) -> Steps:
    """Return the schedule of our scheduler. counts: value of --budget-counts."""
    settings: dict[str, Any] = {
        "model": "fake", "max_batch_size": limits.rows, "token_budget": limits.token_budget,
        "block_size": BLOCK, "kv_cache": f"{limits.kv_blocks}blocks", "max_model_len": LONGEST,
        "max_waiting": len(trace), "kv_reservation": "demand", "watermark": limits.watermark,
        "budget_counts": counts,
    }  # fmt: skip
    if limits.caching:
        settings["prefix_caching"] = True
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


def vllm_scheduler(limits: SharedLimits) -> Any:
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
        Path(folder, "config.json").write_text(json.dumps(shape))
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


def schedule_of_vllm(limits: SharedLimits, trace: Sequence[Drawn]) -> Steps:
    """Return the schedule of vLLM's scheduler."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256) if limits.caching else None
    built, steps, now = vllm_scheduler(limits), Steps(), 0.0
    coming = list(enumerate(trace))[::-1]
    while coming or built.has_unfinished_requests():
        while coming and coming[-1][1].at <= now:
            number, drawn = coming.pop()
            params = SamplingParams(max_tokens=len(drawn.completion), ignore_eos=True)
            built.add_request(Request(str(number), drawn.prompt, params, None, block_hasher=hasher))
        output = built.schedule()
        tokens: dict[str, int] = output.num_scheduled_tokens
        if not tokens:
            now = coming[-1][1].at
            continue
        rows, ids = Rows(), list[list[int]]()
        for i, n in tokens.items():  # vLLM counts these n as computed already
            request, answer = built.requests[i], trace[int(i)].completion
            rows[int(i)] = (request.num_computed_tokens - n, n)
            whole = request.num_computed_tokens == request.num_tokens
            ids.append([answer[request.num_output_tokens]] if whole else [])
        queues = ([int(r.request_id) for r in queue] for queue in (built.running, built.waiting))
        steps.add(now, rows, *queues)
        now += cost_s(sum(tokens.values()))
        places = {i: place for place, i in enumerate(tokens)}
        built.update_from_output(output, ModelRunnerOutput(list(tokens), places, ids))
    return steps


def shares_within(step: Step, trace: Sequence[Drawn]) -> bool:
    """Return whether a joining request has blocks that another row computes in that iteration."""
    for request, cached in step.cached.items():
        ids = [*trace[request].prompt, *trace[request].completion]
        for other, (start, n) in step.rows.items():
            last = min(cached, (start + n) // BLOCK * BLOCK)  # of the blocks that are full then
            other_ids = [*trace[other].prompt, *trace[other].completion]
            if other != request and last > start and ids[:last] == other_ids[:last]:
                return True
    return False


def compare(
    our_steps: Sequence[Step],
    vllm_steps: Sequence[Step],
    limits: SharedLimits,
    trace: Sequence[Drawn],
) -> tuple[int, str | None]:
    """Return how many iterations are equal before the first difference, and its kind.

    BUDGET: ours computes more tokens than the budget, since it does not count decoded ones. SAME:
    vLLM makes a block findable before it is computed, ours afterwards. EVICTED: a joining request
    finds more cached blocks in ours, where running rows take blocks after it, in vLLM before it.
    WATERMARK: other requests join, since the null block makes vLLM's watermark a block larger. Else
    the first of KINDS that differs; "end" if one schedule is longer.
    """
    for i, (first, second) in enumerate(zip(our_steps, vllm_steps)):
        if first == second:
            continue
        if sum(first.chunks.values()) > limits.token_budget:
            return i, BUDGET
        if limits.caching and shares_within(second, trace):
            return i, SAME
        if any(first.cached.get(request, 0) > n for request, n in second.cached.items()):
            return i, EVICTED
        kind = next(kind for kind in KINDS if getattr(first, kind) != getattr(second, kind))
        blocks = [int(limits.watermark * n) for n in (limits.kv_blocks, limits.kv_blocks + 1)]
        return i, WATERMARK if kind == "admitted" and blocks[0] < blocks[1] else kind
    lengths = len(our_steps), len(vllm_steps)
    return min(lengths), None if lengths[0] == lengths[1] else "end"


def run(case: Mapping[str, Any], n: int, seed: int) -> dict[str, Any]:
    """Return counts of vLLM's schedule, and how far ours equals it by each rule of the budget."""
    if importlib.util.find_spec("vllm") is None:
        raise ServerError(MISSING)
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable(logging.WARNING)
    limits, trace = SharedLimits(**case), draw(seed, n)
    steps = schedule_of_vllm(limits, trace)
    counts: dict[str, Any] = dict(zip(COUNTS, map(sum, zip(*map(counted, steps)))))
    for rule in RULES:
        equal, kind = compare(our_schedule(limits, trace, rule), steps, limits, trace)
        counts |= {f"equal, {rule}": equal, f"kinds, {rule}": {kind: 1} if kind else {}}
    return counts


def counted(step: Step) -> tuple[int, ...]:
    """Return the COUNTS of an iteration."""
    cached = sum(step.cached.values())
    return 1, len(step.admitted), len(step.later), len(step.preempted), cached


HOW = """\
Both schedulers get the same traces and limits. Counts are sums over a case's traces: vLLM's
iterations, requests admitted, chunks of prompts after the first, preemptions, and tokens found in
the prefix cache. *Equal* counts the iterations before the first difference of a trace; the column
after it names the kind of difference, with the number of traces. `--budget-counts all` is vLLM's
rule for the token budget, `prefill` is the default here."""


def table(cases: Cases) -> str:
    """Return the table of sums over traces."""
    limits = ("rows", "token_budget", "kv_blocks", "watermark")
    ends = [(f"--budget-counts {rule}: equal", "first differences: traces") for rule in RULES]
    rows = [["case", *limits, *COUNTS, *sum(ends, ())]]
    for case in cases:
        cells = [f"{case[name]:g}" for name in limits]
        cells += [f"{sum(values(case, name)):,}" for name in COUNTS]
        for rule in RULES:
            kinds = sum(map(Counter, values(case, f"kinds, {rule}")), Counter[str]())
            cells.append(f"{sum(values(case, f'equal, {rule}')):,}")
            cells.append(", ".join(f"{kind} {n}" for kind, n in kinds.items()) or "none")
        rows.append([case["name"], *cells])
    return f"{HOW}\n\n{markdown(rows, left=1)}"


STUDY = Study(
    name="vllm_schedule",
    title="Schedules of this server and of vLLM",
    question="Does this server's scheduler plan the same iterations as vLLM's?",
    workload="each case: {seeds} traces of {n} requests, KV blocks of 16 tokens, virtual time",
    requests=120,
    seeds=12,
    cases=lambda n: [asdict(limits) for limits in LIMITS],
    run=run,
    measures={},
    text=table,
    tables=(),
)
