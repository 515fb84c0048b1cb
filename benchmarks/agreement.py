"""Whether the engine computes what the oracle does, on the device that serves: fast equals plain.

    python -m benchmarks.agreement --model gpt2-medium --weights random [--n 8] [--tokens 24]
        [any server setting]

In float32 the engine serves requests in `dynamic` and in `static`, greedy and drawn, with long
prompts in chunks and decode rows padded as the settings say, and every id must be the oracle's
(generate/naive.py, no cache, a request at a time), unless the oracle itself was undecided by less
than rounding. In bfloat16, where ties are common, it compares logits. Ends with exit code 1 where
they differ. The last line is JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import NO_HTTP, asked, configs, record, run
from benchmarks.workload import draw
from config import Config, ConfigError, Parser
from generate import load_generator
from generate.cached import CachedGenerator
from generate.naive import NaiveGenerator
from generate.sampling import uniform
from scheduling import scheduler
from scheduling.inference import Generator, Inference, Row, Sampling
from simulate import drive
from weights import locate

UNUSED = NO_HTTP | {"mode", "loop_interval_ms"}  # two modes, and no manager
# a decision of the oracle closer than this may go either way: the sums' order differs
LOGIT_MARGIN = 1e-3
DRAW_MARGIN = 1e-5
# tokens of prompts that no graph holds, and of which attention reads several rounds of keys
LONG = (300, 700)
# of the largest logit; bfloat16 keeps 8 bits, and some hundred sums lie one after another
BFLOAT16_TOLERANCE = 0.05


def serve(config: Config, generator: Generator, inferences: Sequence[Inference]) -> None:
    drive(
        scheduler.build(config),
        [(0.0, [inference]) for inference in inferences],
        lambda _: 0.0,
        generator.generate,
    )


def undecided(logits: Tensor, sampling: Sampling, index: int) -> bool:
    """Whether the oracle's choice, after logits [V], hangs on rounding."""
    if sampling.temperature == 0:
        best, second = logits.topk(2).values.tolist()
        return bool(best - second < LOGIT_MARGIN)
    edges = (logits / sampling.temperature).double().softmax(-1).cumsum(-1)
    return bool((edges - uniform(sampling.seed, index)).abs().min() < DRAW_MARGIN)


def same_ids(config: Config, static: Config, n: int, tokens: int) -> dict[str, Any]:
    """Float32: how many of n requests and LONG ones, half of them greedy, get the oracle's ids.

    They are served in two modes, with the settings of `config` and of `static`.
    """
    n_vocab, path = config.shape.vocab_size, locate(config)
    long = [list(range(min(length, config.max_model_len - tokens))) for length in LONG]
    prompts = [prompt for prompt, _ in draw(n)] + long
    requests = [
        ([i % n_vocab for i in prompt], Sampling(float(i % 2), seed=i))
        for i, prompt in enumerate(prompts)
    ]
    plain = config.model_copy(
        update={
            "generator": "naive",
            "linear": "plain",
            "decoder_batch_sizes": (),
            "prefix_caching": False,
            "order": "fcfs",
        }
    )
    found, also, expected = (
        [asked(each, prompt, tokens, sampling) for prompt, sampling in requests]
        for each in (config, static, plain)
    )
    generator = load_generator(config, path, n_vocab)
    serve(config, generator, found)
    serve(static, generator, also)
    del generator  # its memory is the oracle's now
    oracle = load_generator(plain, path, n_vocab)
    assert isinstance(oracle, NaiveGenerator)
    serve(plain, oracle, expected)
    result = {"requests": 2 * len(requests), "equal": 0, "undecided": 0, "different": 0}
    for mine, theirs in zip(found + also, expected * 2):
        first = next(
            (i for i, (a, b) in enumerate(zip(mine.tokens, theirs.tokens)) if a != b), None
        )
        if first is None:
            result["equal"] += 1
            continue
        with torch.inference_mode():
            logits = oracle.logits(theirs, len(theirs.prompt_ids) + first)[0].float()
        result["undecided" if undecided(logits, theirs.sampling, first) else "different"] += 1
    return result


def near_logits(config: Config, n: int) -> dict[str, float]:
    """Bfloat16: how far logits are apart at most, after a prompt and after one more token."""
    n_vocab, path = config.shape.vocab_size, locate(config)
    generator = load_generator(config, path, n_vocab)
    oracle = load_generator(
        config.model_copy(update={"generator": "naive", "linear": "plain"}), path, n_vocab
    )
    assert isinstance(generator, CachedGenerator) and isinstance(oracle, NaiveGenerator)
    each = -(-65 // config.block_size)
    inferences = [Inference([i % n_vocab for i in prompt], 2, tokens=[1]) for prompt, _ in draw(n)]
    blocks = [list(range(i * each, (i + 1) * each)) for i in range(n)]
    worst = largest = 0.0
    for decode in (False, True):
        rows = []
        for inference, mine in zip(inferences, blocks):
            length = len(inference.prompt_ids)
            rows.append(
                Row(
                    inference,
                    length if decode else 0,
                    1 if decode else length,
                    mine,
                    samples=True,
                    idle=False,
                )
            )
        # prompts one by one; a graph's logits are overwritten by the next's
        found = (
            generator.logits(rows)
            if decode
            else torch.cat([generator.logits([row]).clone() for row in rows])
        )
        with torch.inference_mode():
            expected = torch.cat(
                [oracle.logits(row.inference, row.start + row.n_tokens) for row in rows]
            ).float()
        worst = max(worst, float((found[:, :n_vocab].float() - expected).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    return {
        "largest_difference": worst,
        "largest_logit": largest,
        "tolerance": BFLOAT16_TOLERANCE * largest,
    }


def main() -> None:
    parser = Parser(
        prog="python -m benchmarks.agreement",
        description="The engine against the oracle.",
        allow_abbrev=False,
    )
    parser.add_argument("--n", type=int, default=8, help="requests (default: 8)")
    parser.add_argument(
        "--tokens", type=int, default=24, help="completion tokens of each (default: 24)"
    )
    options, [config, static] = configs(
        parser,
        sys.argv[1:],
        lambda known: ["dynamic", "static"],
        UNUSED,
        token_budget=lambda known: 280,
        kv_cache=lambda known: "1GB",  # the oracle needs memory beside the engine
    )
    if (
        not 1 <= options.n <= min(64, config.max_batch_size)
        or not 1 <= options.tokens <= config.max_model_len - 64
    ):
        raise ConfigError(
            "--n must be from 1 to 64 and --max-batch-size, "
            "and --tokens leave room for a prompt of 64"
        )
    first, second = (c.model_copy(update={"dtype": "float32"}) for c in (config, static))
    ids = same_ids(first, second, options.n, options.tokens)
    print(
        f"float32: {ids['equal']} of {ids['requests']} requests have the oracle's ids; "
        f"{ids['undecided']} part where the oracle itself was undecided, "
        f"{ids['different']} elsewhere"
    )
    logits = near_logits(config.model_copy(update={"dtype": "bfloat16"}), options.n)
    print(
        f"bfloat16: logits differ from the oracle's by {logits['largest_difference']:.3f} at most; "
        f"the largest is {logits['largest_logit']:.1f}, and {logits['tolerance']:.3f} is allowed"
    )
    agrees = not ids["different"] and logits["largest_difference"] <= logits["tolerance"]
    print(
        json.dumps(
            {"agrees": agrees, "float32": ids, "bfloat16": logits}
            | record([config, static], UNUSED)
        )
    )
    if not agrees:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
