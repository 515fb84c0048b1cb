"""vLLM's scheduler and ours over the same traces, iteration by iteration: virtual time, seeded.

    python -m studies.vllm_schedule [--seeds 12] [--out DIR]

Both have equal limits, compute nothing, and take as long for an iteration as its tokens say: equal
schedules keep equal clocks. Once two differ they are in different states: of each trace the
iterations before that count as equal, and the first difference is named. Needs
benchmarks/requirements-vllm.txt, in an environment of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from client.machine import command_line, stamp
from compare.report.tables import markdown
from config import build
from scheduling import scheduler
from scheduling.inference import Inference, Iteration
from scheduling.prefix_cache import block_keys
from simulate import drive

Rows = dict[int, tuple[int, int]]  # of each request the first token computed, and how many
LONGEST, BLOCK = 256, 16
REQUESTS = 120  # of a trace
MISSING = "vLLM is missing: install benchmarks/requirements-vllm.txt in an environment of its own"
RULES = ("prefill", "all")  # what our budget bounds: --budget-counts
BUDGET = "decoded tokens beside the budget"
WATERMARK = "watermark of the null block"
SAME = "found in the same iteration"
EVICTED = "evicted before it was looked for"
KINDS = ("preempted", "admitted", "cached", "chunks", "at")  # without a name of their own


@dataclass(frozen=True)
class Case:
    """Limits of both."""

    name: str
    rows: int
    token_budget: int
    kv_blocks: int
    watermark: float = 0.0
    caching: bool = False


CASES = [
    Case("ample", rows=32, token_budget=256, kv_blocks=512),
    Case("chunks", rows=16, token_budget=40, kv_blocks=512),
    Case("few rows", rows=4, token_budget=128, kv_blocks=512),
    Case("few blocks", rows=32, token_budget=256, kv_blocks=40),
    Case("few blocks, chunks", rows=16, token_budget=24, kv_blocks=40),
    Case("fewest blocks", rows=8, token_budget=64, kv_blocks=18),
    Case("watermark", rows=32, token_budget=128, kv_blocks=60, watermark=0.1),
    Case("caching, ample", rows=32, token_budget=256, kv_blocks=2048, caching=True),
    Case("caching, chunks", rows=16, token_budget=40, kv_blocks=512, caching=True),
    Case("caching, few blocks, chunks", rows=16, token_budget=24, kv_blocks=40, caching=True),
    Case("caching, few blocks", rows=32, token_budget=256, kv_blocks=60, caching=True),
    Case("caching, fewest blocks", rows=8, token_budget=64, kv_blocks=18, caching=True),
    Case("watermark, null block", rows=32, token_budget=128, kv_blocks=59, watermark=0.1),
]


class Asked(NamedTuple):
    """A request, and the ids that it gets."""

    at: float
    prompt: list[int]
    completion: list[int]


class Step(NamedTuple):
    """An iteration: when it began, what it computed, who joined before it and who gave way."""

    at: float
    rows: Rows
    admitted: set[int]
    preempted: set[int]

    @property
    def chunks(self) -> dict[int, int]:
        return {request: n for request, (_, n) in self.rows.items()}

    @property
    def later(self) -> list[int]:
        """Chunks of those who had joined before."""
        return [n for request, n in self.chunks.items() if n > 1 and request not in self.admitted]

    @property
    def cached(self) -> dict[int, int]:
        """Tokens that those who joined need not compute."""
        return {request: self.rows[request][0] for request in self.admitted}


class Steps(list[Step]):
    """A schedule; it knows who ran in the iteration before."""

    running: frozenset[int] = frozenset()

    def add(self, at: float, rows: Rows, running: Iterable[int], waiting: Iterable[int]) -> None:
        before, self.running = self.running, frozenset(running)
        self.append(Step(at, rows, {*self.running - before}, {*before.intersection(waiting)}))


def draw(seed: int, requests: int = REQUESTS) -> list[Asked]:
    """A trace: prompts with common beginnings, which come in bursts, at one of three rates."""
    chance = random.Random(seed)
    beginnings = [chance.choices(range(50_000), k=n) for n in (0, 24, 48, 96)]
    gap_s = (0.05, 0.15, 0.5)[seed % 3]
    at, trace = 0.0, []
    for _ in range(requests):
        at += chance.expovariate(1 / gap_s) if chance.random() < 0.7 else 0.0
        own = chance.choices(range(50_000), k=chance.randint(1, 60))
        answer = chance.choices(range(50_000), k=chance.randint(1, 100))
        trace.append(Asked(at, chance.choice(beginnings) + own, answer))
    return trace


def cost_s(tokens: int) -> float:
    """Of an iteration."""
    return 0.01 + 0.0005 * tokens


def ours(case: Case, trace: Sequence[Asked], counts: str) -> Steps:
    limits = {"max_batch_size": case.rows, "token_budget": case.token_budget, "block_size": BLOCK}
    pool = {
        "kv_cache": f"{case.kv_blocks}blocks",
        "max_model_len": LONGEST,
        "max_waiting": len(trace),
    }
    rules: dict[str, Any] = {"kv_reservation": "demand", "watermark": case.watermark}
    rules |= {"budget_counts": counts} | ({"prefix_caching": True} if case.caching else {})
    mine = scheduler.build(build("dynamic", {"model": "fake", **limits, **pool, **rules}, {}))
    served = [
        Inference(
            a.prompt, len(a.completion), keys=block_keys(a.prompt, BLOCK) if case.caching else None
        )
        for a in trace
    ]
    steps = Steps()

    def planned(now: float, iteration: Iteration) -> None:
        rows = {row.inference.id: (row.start, row.n_tokens) for row in iteration.rows}
        if rows:
            steps.add(now, rows, mine.running, mine.waiting)

    def generate(iteration: Iteration) -> list[int]:
        its = [row.inference for row in iteration.rows if row.samples]
        return [trace[inference.id].completion[len(inference.tokens)] for inference in its]

    coming = [(asked.at, [inference]) for asked, inference in zip(trace, served)]
    drive(mine, coming, lambda i: cost_s(sum(row.n_tokens for row in i.rows)), generate, planned)
    return steps


def vllm_scheduler(case: Case) -> Any:
    """vLLM's own, for a model that nobody computes; it keeps a null block, so it gets one more."""
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    n_blocks = case.kv_blocks + 1
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=case.caching)
    cache.num_gpu_blocks = n_blocks
    limits = SchedulerConfig(
        max_num_seqs=case.rows,
        max_num_batched_tokens=case.token_budget,
        max_model_len=LONGEST,
        is_encoder_decoder=False,
        watermark=case.watermark,
    )
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 16, "n_positions": LONGEST}
    shape = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape))
        model = ModelConfig(model=folder, dtype="float32", skip_tokenizer_init=True)
        config = VllmConfig(model_config=model, scheduler_config=limits, cache_config=cache)
    layer = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], layer)]
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(n_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )


def theirs(case: Case, trace: Sequence[Asked]) -> Steps:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256) if case.caching else None
    its, steps, now = vllm_scheduler(case), Steps(), 0.0
    coming = list(enumerate(trace))[::-1]
    while coming or its.has_unfinished_requests():
        while coming and coming[-1][1].at <= now:
            number, asked = coming.pop()
            params = SamplingParams(max_tokens=len(asked.completion), ignore_eos=True)
            its.add_request(Request(str(number), asked.prompt, params, None, block_hasher=hasher))
        output = its.schedule()
        tokens: dict[str, int] = output.num_scheduled_tokens
        if not tokens:
            now = coming[-1][1].at
            continue
        rows, ids = Rows(), list[list[int]]()
        for i, n in tokens.items():  # which its count of computed ones has in it already
            request, answer = its.requests[i], trace[int(i)].completion
            rows[int(i)] = (request.num_computed_tokens - n, n)
            whole = request.num_computed_tokens == request.num_tokens
            ids.append([answer[request.num_output_tokens]] if whole else [])
        queues = ([int(r.request_id) for r in queue] for queue in (its.running, its.waiting))
        steps.add(now, rows, *queues)
        now += cost_s(sum(tokens.values()))
        places = {i: place for place, i in enumerate(tokens)}
        its.update_from_output(output, ModelRunnerOutput(list(tokens), places, ids))
    return steps


def shares_within(step: Step, trace: Sequence[Asked]) -> bool:
    """Whether somebody who joins has blocks that another row computes in the same iteration."""
    for request, cached in step.cached.items():
        its = [*trace[request].prompt, *trace[request].completion]
        for other, (start, n) in step.rows.items():
            last = min(cached, (start + n) // BLOCK * BLOCK)  # of the blocks that are full then
            theirs = [*trace[other].prompt, *trace[other].completion]
            if other != request and last > start and its[:last] == theirs[:last]:
                return True
    return False


def compare(
    mine: Sequence[Step], its: Sequence[Step], case: Case, trace: Sequence[Asked]
) -> tuple[int, str | None]:
    """How many iterations are equal before the first that is not, and what differs there.

    BUDGET: ours computes more tokens than that, since it does not count decoded ones. SAME: vLLM
    gives a block its hash before it is computed, ours once it is. EVICTED: who joins finds more
    with ours, where rows that run take blocks after that, and not before. WATERMARK: who joins
    differs, and the null block makes vLLM's watermark a block larger. Else the first of KINDS, and
    "end" if one goes on where the other is done.
    """
    for i, (first, second) in enumerate(zip(mine, its)):
        if first == second:
            continue
        if sum(first.chunks.values()) > case.token_budget:
            return i, BUDGET
        if case.caching and shares_within(second, trace):
            return i, SAME
        if any(first.cached.get(request, 0) > n for request, n in second.cached.items()):
            return i, EVICTED
        kind = next(kind for kind in KINDS if getattr(first, kind) != getattr(second, kind))
        blocks = [int(case.watermark * n) for n in (case.kv_blocks, case.kv_blocks + 1)]
        return i, WATERMARK if kind == "admitted" and blocks[0] < blocks[1] else kind
    return min(len(mine), len(its)), None if len(mine) == len(its) else "end"


def study(case: Case, seeds: int) -> dict[str, Any]:
    """What vLLM's schedules hold, and how far ours are equal by each rule of the budget."""
    held: Counter[str] = Counter()
    rules: dict[str, Any] = {rule: {"equal": 0, "kinds": Counter()} for rule in RULES}
    for seed in range(seeds):
        trace = draw(seed)
        its = theirs(case, trace)
        held["iterations"] += len(its)
        for step in its:
            held["admitted"] += len(step.admitted)
            held["later chunks"] += len(step.later)
            held["preempted"] += len(step.preempted)
            held["cached tokens"] += sum(step.cached.values())
        for rule, found in rules.items():
            equal, kind = compare(ours(case, trace, rule), its, case, trace)
            found["equal"] += equal
            found["kinds"][kind or "none"] += 1
    return {"case": asdict(case), "traces": seeds, "theirs": held, "ours": rules}


def table(found: Sequence[dict[str, Any]]) -> str:
    limits = ("rows", "token_budget", "kv_blocks", "watermark")
    counts = ("iterations", "admitted", "later chunks", "preempted", "cached tokens")
    ends = [(f"--budget-counts {rule}: equal", "first difference in traces") for rule in RULES]
    rows = [["case", *limits, *counts, *sum(ends, ())]]
    for each in found:
        cells = [f"{each['case'][name]:g}" for name in limits]
        cells += [f"{each['theirs'][name]:,}" for name in counts]
        for rule in each["ours"].values():
            kinds = [f"{kind} {n}" for kind, n in rule["kinds"].items() if kind != "none"]
            cells += [f"{rule['equal']:,}", ", ".join(kinds) or "none"]
        rows.append([each["case"]["name"], *cells])
    return markdown(rows, left=1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.vllm_schedule")
    parser.add_argument("--seeds", type=int, default=12, help="traces of each case (default: 12)")
    parser.add_argument("--out", type=Path, default=Path("runs/vllm_schedule"), help="folder")
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print(f"error: {MISSING}", file=sys.stderr)
        sys.exit(2)
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable(logging.WARNING)
    from vllm import __version__

    found = [study(case, options.seeds) for case in CASES]
    result = {"cases": found, "vllm": __version__} | stamp()
    result["command"] = command_line("python", ["-m", "studies.vllm_schedule", *sys.argv[1:]])
    options.out.mkdir(parents=True, exist_ok=True)
    made = f"vLLM {__version__}; `{result['command']}`, commit {result['commit']}, {result['date']}"
    of = f"{options.seeds} traces of {REQUESTS} requests a case, blocks of {BLOCK} tokens"
    page = f"# Our schedules and vLLM's\n\n{made}: {of}.\n\n{table(found)}\n"
    (options.out / "vllm_schedule.md").write_text(page)
    (options.out / "vllm_schedule.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(found))
    print(f"vllm_schedule.md and .json: {options.out}")


if __name__ == "__main__":
    main()
