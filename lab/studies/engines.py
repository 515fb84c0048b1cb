"""The server's scheduler and engine without HTTP, an iteration at a time."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch

from config import Config
from generate.auto import build
from generate.loading import load_generator
from generate.weights import locate
from scheduling.inference import Generator, Iteration
from scheduling.scheduler import Scheduler

BYTES = 257  # ids that rows may have: every tokenizer has them
MODELS: dict[str, dict[str, Any]] = {
    "demo": {"model": "demo"},
    "GPT-2 124M": {"model": "gpt2", "weights": "random", "tokenizer": "bytes"},
}


@functools.cache
def engine(**settings: Any) -> tuple[Config, Generator]:
    """Return a server's config by its settings, and its engine."""
    config = build("dynamic", settings, {})
    torch.set_num_threads(config.threads)
    return config, load_generator(config, locate(config), BYTES)


def iterate(scheduler: Scheduler, generator: Generator) -> Iteration:
    """Plan and compute an iteration."""
    now = time.perf_counter()
    iteration, _ = scheduler.schedule(now)
    scheduler.apply(iteration, generator.generate(iteration), now)
    return iteration
