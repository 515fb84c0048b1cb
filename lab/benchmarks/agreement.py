"""The engine against the oracle, on the device that serves: fast equals plain.

    python -m lab.benchmarks.agreement --model gpt2-medium --weights random [--n 8] [--tokens 24]
        [any server setting]

In float32 the engine serves requests in the four modes, greedy and drawn, with long prompts in
chunks and decode rows padded as the settings say, and every id must be the oracle's
(generate/naive.py, no cache, a request at a time), unless the oracle itself was undecided by less
than rounding. In bfloat16, where ties are common, it compares logits. Each product of ours and
attention must have the same bits for any number of tokens, too (lab/benchmarks/bits.py): on a GPU
with `--linear triton`, on a CPU with `kernel` in both types and with `int8`. Ends with exit code 1
where they differ.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compare.variants import BASIC
from config.config import Config
from config.settings import ConfigError
from generate import kernels
from generate.cached import CachedGenerator
from generate.naive import NaiveGenerator
from generate.sampling import uniforms
from lab.benchmarks.bits import COUNTS, other_bits
from lab.benchmarks.harness import NO_HTTP, Benchmark, run
from lab.benchmarks.offline import block_tables, burst, inference, load
from scheduling.building import build_scheduler
from scheduling.inference import Generator, Inference, Row
from scheduling.sampling import Sampling
from simulate import drive

# a decision of the oracle closer than this may go either way: the sums' order differs
LOGIT_MARGIN, DRAW_MARGIN = 1e-3, 1e-5
# tokens of prompts that no graph holds, and of which attention reads several rounds of keys
LONG = (300, 700)
# a share of the largest logit; bfloat16 keeps 8 bits, and some hundred sums lie one after another
BFLOAT16_TOLERANCE = 0.05
PLAIN = {
    "generator": "naive", "linear": "plain", "decoder_batch_sizes": (), "prefix_caching": False,
    "order": "fcfs",
}  # fmt: skip
BENCHMARK = Benchmark(
    "agreement",
    __doc__,
    {"--n": (8, "requests"), "--tokens": (24, "completion tokens of each request")},
    NO_HTTP | {"mode", "loop_interval_ms"},  # all modes, and no manager
    of_engine=True,
)


def oracle_of(config: Config) -> NaiveGenerator:
    oracle = load(config.model_copy(update=PLAIN))
    assert isinstance(oracle, NaiveGenerator)
    return oracle


def undecided(logits: Tensor, sampling: Sampling, index: int) -> bool:
    """Return whether the oracle's choice, after logits [V], hangs on rounding."""
    if sampling.temperature == 0:
        best, second = logits.topk(2).values.tolist()
        return bool(best - second < LOGIT_MARGIN)
    edges = (logits / sampling.temperature).double().softmax(-1).cumsum(-1)
    [u] = uniforms([(sampling, index)])
    return bool((edges - u).abs().min() < DRAW_MARGIN)


def same_ids(configs: Sequence[Config], n: int, tokens: int) -> dict[str, Any]:
    """Float32: how many of n requests and LONG ones, half of them greedy, get the oracle's ids.

    They are served with the settings of each config, a mode each, by the first one's engine.
    """
    [config, *_] = configs
    prompts = [prompt for prompt, _ in burst(config, n)]
    prompts += [[i % 256 for i in range(min(long, config.max_model_len - tokens))] for long in LONG]
    sampled = [Sampling(float(i % 2), seed=i) for i in range(len(prompts))]

    def served(config: Config, generator: Generator) -> list[Inference]:
        asked = [inference(config, ids, tokens, how) for ids, how in zip(prompts, sampled)]
        arrivals = [(0.0, [each]) for each in asked]
        drive(build_scheduler(config), arrivals, lambda _: 0.0, generator.generate)
        return asked

    engine = load(config)
    inferences = [each for config in configs for each in served(config, engine)]
    del engine  # its memory is the oracle's now
    oracle = oracle_of(config)
    expected = len(configs) * served(config.model_copy(update=PLAIN), oracle)
    verdicts = Counter(verdict(oracle, *pair) for pair in zip(expected, inferences))
    return {"requests": len(inferences), "equal": 0, "undecided": 0, "different": 0} | verdicts


def verdict(oracle: NaiveGenerator, expected: Inference, found: Inference) -> str:
    """Compare an engine's tokens with the oracle's: equal, undecided or different."""
    pairs = enumerate(zip(found.tokens, expected.tokens))
    first = next((i for i, (ours, oracles) in pairs if ours != oracles), None)
    if first is None:
        return "equal"
    with torch.inference_mode():
        logits = oracle.logits(expected, len(expected.prompt_ids) + first)[0].float()
    return "undecided" if undecided(logits, expected.sampling, first) else "different"


@torch.inference_mode()
def near_logits(config: Config, n: int) -> dict[str, float]:
    """Bfloat16: how far logits are apart at most, after a prompt and after one more token."""
    engine, oracle = load(config), oracle_of(config)
    assert isinstance(engine, CachedGenerator)
    prompts, decode = [], []
    for blocks, (prompt, _) in zip(block_tables(n, 65, config.block_size), burst(config, n)):
        inference = Inference(prompt, 2, tokens=[1])
        prompts.append(Row(inference, 0, len(prompt), blocks, samples=True, idle=False))
        decode.append(Row(inference, len(prompt), 1, blocks, samples=True, idle=False))
    worst = largest = 0.0
    for rows in (*([row] for row in prompts), decode):
        logits = engine.logits(rows)[:, : config.shape.vocab_size].float()
        of_rows = [oracle.logits(row.inference, row.start + row.n_tokens) for row in rows]
        expected = torch.cat(of_rows).float()
        worst = max(worst, float((logits - expected).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    tolerance = BFLOAT16_TOLERANCE * largest
    return {"largest_difference": worst, "largest_logit": largest, "tolerance": tolerance}


def ours(config: Config) -> dict[tuple[str, str], Config]:
    """Return configs for each kind of our products here and each type that it computes in."""
    pairs: list[tuple[str, str]] = []
    if config.device == "cpu" and not kernels.why_unavailable():
        pairs = [("kernel", "float32"), ("kernel", "bfloat16"), ("int8", "bfloat16")]
    elif config.linear == "triton":
        pairs = [("triton", "bfloat16")]
    each = (config.model_copy(update={"linear": linear, "dtype": dtype}) for linear, dtype in pairs)
    return dict(zip(pairs, each))


def main() -> None:
    options, configs = BENCHMARK.configs(
        BASIC[::-1],
        token_budget=280,
        kv_cache="1GB",  # the oracle needs memory beside the engine
    )
    if options.n > configs[0].max_batch_size:
        raise ConfigError("--n must be at most --max-batch-size")
    if not 1 <= options.tokens <= configs[0].max_model_len - 64:
        raise ConfigError("--tokens must be at least 1 and leave room for a prompt of 64")
    float32 = [config.model_copy(update={"dtype": "float32"}) for config in configs]
    ids = same_ids(float32, options.n, options.tokens)
    print(
        f"float32: {ids['equal']} of {ids['requests']} requests have the oracle's ids; "
        f"{ids['undecided']} part where the oracle itself was undecided, "
        f"{ids['different']} elsewhere"
    )
    logits = near_logits(configs[0].model_copy(update={"dtype": "bfloat16"}), options.n)
    print(
        f"bfloat16: logits differ from the oracle's by {logits['largest_difference']:.3f} at most; "
        f"the largest is {logits['largest_logit']:.1f}, and {logits['tolerance']:.3f} is allowed"
    )
    others = {" ".join(how): other_bits(config) for how, config in ours(configs[0]).items()}
    for how, found in others.items():
        differing = ", ".join(f"{name} at {counts}" for name, counts in found.items() if counts)
        print(f"{how}: bits at {COUNTS[0]} to {COUNTS[-1]} tokens: {differing or 'the same'}")
    agrees = not ids["different"] and logits["largest_difference"] <= logits["tolerance"]
    agrees = agrees and not any(any(found.values()) for found in others.values())
    result = {"agrees": agrees, "float32": ids, "bfloat16": logits, "other_bits": others}
    print(json.dumps(result | BENCHMARK.record(configs)))
    if not agrees:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
