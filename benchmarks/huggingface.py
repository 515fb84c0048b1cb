"""Hugging Face's generate() on benchmarks.burst's requests and weights: what a user writes first.

    python -m benchmarks.huggingface --model gpt2-medium --weights random [--n 64] [--batch 64]
        [any server setting]

Prompts are padded on the left, and a batch runs until its longest completion is done; only what was
asked for counts. Needs transformers (requirements-dev.txt). The last line is JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from benchmarks.common import configs, record, run
from benchmarks.workload import LARGEST, draw
from config import Config, ConfigError, Parser
from model import load_model
from weights import locate

# no engine of ours
UNUSED = frozenset(Config.model_fields) - {
    "model",
    "weights",
    "weights_seed",
    "dtype",
    "device",
    "threads",
}


def measure(config: Config, requests: list[tuple[list[int], int]], batch: int) -> float:
    """Seconds that all requests take, in static batches."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        raise ConfigError(
            "transformers is missing; install requirements-dev.txt (./test.sh does)"
        ) from None
    torch.set_num_threads(config.threads)
    shape, dtype = config.shape, getattr(torch, config.dtype)
    ours = load_model(shape, locate(config), config.weights_seed, dtype, config.device)
    sizes: dict[str, Any] = {
        "n_layer": shape.n_layer,
        "n_head": shape.n_head,
        "n_embd": shape.n_embd,
    }
    sizes |= {"n_positions": shape.n_ctx, "vocab_size": shape.vocab_size}
    # attention's scale is in our weights
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes, layer_norm_epsilon=shape.layer_norm_epsilon))
    model = model.to(config.device, dtype).eval()
    model.transformer.load_state_dict(ours.state_dict())
    del ours

    def generate(part: list[tuple[list[int], int]]) -> None:
        width = max(len(prompt) for prompt, _ in part)
        ids = torch.tensor(
            [[0] * (width - len(prompt)) + prompt for prompt, _ in part], device=config.device
        )
        mask = torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in part],
            device=config.device,
        )
        longest = max(tokens for _, tokens in part)
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )

    with torch.inference_mode():
        generate([(prompt, 2) for prompt, _ in requests[:batch]])
        start = time.perf_counter()
        for i in range(0, len(requests), batch):
            generate(requests[i : i + batch])
        if config.device == "cuda":
            torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = Parser(
        prog="python -m benchmarks.huggingface",
        description="generate() on the burst.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--n", type=int, default=LARGEST, help=f"requests, at most {LARGEST} (default: {LARGEST})"
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=LARGEST,
        help=f"requests in a static batch (default: {LARGEST})",
    )
    options, [config] = configs(parser, sys.argv[1:], lambda known: ["dynamic"], UNUSED)
    if not 1 <= options.n <= LARGEST or options.batch < 1:
        raise ConfigError(f"--n must be from 1 to {LARGEST}, and --batch at least 1")
    if config.shape.vocab_size < 50257:
        raise ConfigError(
            f"the burst's prompts are GPT-2's ids and {config.model} has too few; "
            f"name another --model"
        )
    requests = draw(options.n)
    seconds, tokens = (
        measure(config, requests, options.batch),
        sum(tokens for _, tokens in requests),
    )
    print(
        f"generate(): {options.n} requests, {tokens:,} tokens in {seconds:.1f} s, "
        f"{tokens / seconds:.1f} tok/s"
    )
    found = {"output_throughput": tokens / seconds, "wall_clock_s": seconds, "batch": options.batch}
    print(json.dumps(found | record([config], UNUSED)))


if __name__ == "__main__":
    run(main)
