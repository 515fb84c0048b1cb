"""Hugging Face's generate() on benchmarks.burst's requests and weights: a user's first program.

    python -m benchmarks.huggingface --model gpt2-medium --weights random [--n 64]
        [any setting of the engine]

One static batch: prompts are padded on the left, and it runs until the longest completion is done;
of each only the requested tokens count. Needs transformers (requirements-dev.txt).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.harness import Benchmark, run
from benchmarks.offline import burst, refuse_few_ids
from benchmarks.workload import LARGEST, Prompted
from config import Config, ConfigError
from generate.checkpoint import load_model
from weights import locate

SETTINGS = {"model", "weights", "weights_seed", "dtype", "device", "threads"}  # of its own engine
BENCHMARK = Benchmark(
    "huggingface",
    "generate() on the burst.",
    {"--n": (LARGEST, f"requests, at most {LARGEST}")},
    {*Config.model_fields} - SETTINGS,
)


def load(config: Config) -> Any:
    """Hugging Face's GPT-2 with our weights."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        raise ConfigError(
            "transformers is missing; install requirements-dev.txt (./test.sh does)"
        ) from None
    shape, dtype = config.shape, getattr(torch, config.dtype)
    ours = load_model(shape, locate(config), config.weights_seed, dtype, config.device)
    names = ("n_layer", "n_head", "n_embd", "vocab_size")
    sizes: dict[str, Any] = {name: getattr(shape, name) for name in names}
    sizes |= {"n_positions": shape.n_ctx, "layer_norm_epsilon": shape.layer_norm_epsilon}
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes))
    model = model.to(config.device, dtype).eval()
    model.transformer.load_state_dict(ours.state_dict())  # attention's scale is in our weights
    return model


def generate(model: Any, device: str, requests: Sequence[Prompted]) -> None:
    """Serve requests as one static batch."""
    width = max(len(prompt) for prompt, _ in requests)
    padding = [width - len(prompt) for prompt, _ in requests]
    ids = [[0] * n + prompt for n, (prompt, _) in zip(padding, requests)]
    mask = [[0] * n + [1] * (width - n) for n in padding]
    model.generate(
        torch.tensor(ids, device=device),
        attention_mask=torch.tensor(mask, device=device),
        max_new_tokens=max(tokens for _, tokens in requests),
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    if device == "cuda":
        torch.cuda.synchronize()


def measure(config: Config, requests: Sequence[Prompted]) -> float:
    """Seconds that all requests take."""
    torch.set_num_threads(config.threads)
    model = load(config)
    with torch.inference_mode():
        generate(model, config.device, [(prompt, 2) for prompt, _ in requests])
        start = time.perf_counter()
        generate(model, config.device, requests)
    return time.perf_counter() - start


def main() -> None:
    options, [config] = BENCHMARK.engine_configs()
    requests = burst(options.n)
    refuse_few_ids(config)
    seconds = measure(config, requests)
    tokens = sum(tokens for _, tokens in requests)
    print(
        f"generate(): {options.n} requests, {tokens:,} tokens in {seconds:.1f} s, "
        f"{tokens / seconds:.1f} tok/s"
    )
    result = {"output_throughput": tokens / seconds, "wall_clock_s": seconds}
    print(json.dumps(result | BENCHMARK.record([config])))


if __name__ == "__main__":
    run(main)
