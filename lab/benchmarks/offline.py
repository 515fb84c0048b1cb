"""The engine without a server, and requests of the burst."""

from __future__ import annotations

from config.config import Config
from config.settings import ConfigError
from generate.loading import load_generator
from generate.weights import locate
from lab.benchmarks.workload import LARGEST, Prompted, draw
from scheduling.inference import CachedPrefix, Generator, Inference, Row
from scheduling.prefix_cache import block_keys
from scheduling.sampling import Sampling


def load(config: Config) -> Generator:
    """The engine alone, without a scheduler."""
    return load_generator(config, locate(config), config.shape.vocab_size)


def inference(config: Config, prompt: list[int], tokens: int, sampling: Sampling) -> Inference:
    """A request as a server of this config queues it."""
    made = Inference(prompt, tokens, sampling)
    if config.prefix_caching:
        made.prefix = CachedPrefix(block_keys(prompt, config.block_size))
    return made


def burst(config: Config, n: int) -> list[Prompted]:
    """The burst's first n requests, with ids that the model has. Raises ConfigError if there
    are not so many.
    """
    if not 1 <= n <= LARGEST:
        raise ConfigError(f"--n must be from 1 to {LARGEST}")
    n_vocab = config.shape.vocab_size
    return [([token % n_vocab for token in prompt], tokens) for prompt, tokens in draw(n)]


def block_tables(n: int, tokens: int, block_size: int) -> list[list[int]]:
    """KV blocks of n rows of so many tokens, each in blocks of its own."""
    size = -(-tokens // block_size)
    return [list(range(i * size, (i + 1) * size)) for i in range(n)]


def decode_rows(
    n: int, context: int, block_size: int, sampling: Sampling, pending: bool = False
) -> list[Row]:
    """n rows about to compute their token number `context`, and to sample the next one.

    pending: that token is the one that the iteration before samples (scheduling/asynchronous.py).
    """
    prompt = [i % 256 for i in range(context - 1)]
    inferences = (Inference(prompt, 2, sampling, tokens=[~i if pending else 0]) for i in range(n))
    return [
        Row(inference, context - 1, 1, blocks, samples=True, idle=False)
        for inference, blocks in zip(inferences, block_tables(n, context, block_size))
    ]
