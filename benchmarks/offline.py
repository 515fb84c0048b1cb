"""A server without HTTP, and requests of the burst for it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.workload import LARGEST, Prompted, draw
from config import Config, ConfigError
from generate import load_generator
from generate.cached import CachedGenerator
from scheduling.inference import Inference, IterationRecord, Row
from scheduling.prefix_cache import block_keys
from scheduling.sampling import Sampling
from serving import Server
from weights import locate


def load_engine(config: Config) -> CachedGenerator:
    """The engine alone, without a scheduler."""
    engine = load_generator(config, locate(config), config.shape.vocab_size)
    assert isinstance(engine, CachedGenerator)
    return engine


def inference(config: Config, prompt: list[int], tokens: int, sampling: Sampling) -> Inference:
    """A request as a server of this config queues it."""
    keys = block_keys(prompt, config.block_size) if config.prefix_caching else None
    return Inference(prompt, tokens, sampling, keys=keys)


def burst(n: int) -> list[Prompted]:
    """The first n requests of the burst. Raises ConfigError if it has not so many."""
    if not 1 <= n <= LARGEST:
        raise ConfigError(f"--n must be from 1 to {LARGEST}")
    return draw(n)


def refuse_few_ids(config: Config) -> None:
    """Raise ConfigError for a model that lacks some of the burst's ids."""
    if config.shape.vocab_size < 50257:
        raise ConfigError(
            f"the burst's prompts are GPT-2's ids and {config.model} has too few; "
            f"name another --model"
        )


def refuse_what_does_not_fit(config: Config, rows: Sequence[int], contexts: Sequence[int]) -> None:
    """Raise ConfigError for steps that this model or engine cannot compute."""
    if max(contexts) > config.max_model_len:
        raise ConfigError(
            f"this model's rows hold at most {config.max_model_len} tokens; lower --contexts or "
            f"--prompts"
        )
    if max(rows) > config.max_batch_size:
        raise ConfigError(
            f"--rows {max(rows)}: the engine is built for --max-batch-size "
            f"{config.max_batch_size} at most"
        )


def block_tables(n: int, tokens: int, block_size: int, first: int = 0) -> list[list[int]]:
    """KV blocks of n rows of so many tokens, each in blocks of its own from `first` on."""
    size = -(-tokens // block_size)
    return [list(range(first + i * size, first + (i + 1) * size)) for i in range(n)]


def decode_rows(n: int, context: int, block_size: int) -> list[Row]:
    """n rows about to compute their token number `context`."""
    prompt = [i % 256 for i in range(context)]
    return [
        Row(Inference(prompt, 1), context - 1, 1, blocks, samples=True, idle=False)
        for blocks in block_tables(n, context, block_size)
    ]


class OfflineServer:
    """A server without HTTP; it observes and keeps every iteration."""

    def __init__(self, config: Config):
        self.iterations: list[IterationRecord] = []
        self._config = config
        start = time.perf_counter()
        self.manager = Server(config).manager
        self.manager.observe(self)
        if not self.manager.wait_until_loaded():
            raise self.manager.failure or RuntimeError("the engine did not load")
        self.load_s = time.perf_counter() - start

    def iteration(self, record: IterationRecord) -> None:
        self.iterations.append(record)

    def answered(self, inference: Inference) -> None:
        pass

    def serve(
        self, requests: Sequence[Prompted], sampling: Sampling
    ) -> tuple[float, list[Inference]]:
        """Serve requests that come all at once; return seconds and inferences."""
        self.iterations.clear()
        inferences = [inference(self._config, *request, sampling) for request in requests]
        start = time.perf_counter()
        self.manager.enqueue(inferences)
        wait_for(inferences)
        return time.perf_counter() - start, inferences


def wait_for(inferences: Sequence[Inference]) -> None:
    for each in inferences:
        each.done.wait()
        if each.error:
            raise each.error
