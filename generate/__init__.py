"""The engines behind one seam, `inference.Generator`.

Its generate(iteration) returns one id per row that samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from scheduling.inference import Generator

if TYPE_CHECKING:
    from config import Config
    from generate.cached import CachedGenerator
    from model import GPT2


class OutOfMemory(Exception):
    """A GPU's memory does not hold what was asked; the message names the settings to lower."""


@contextlib.contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Raise OutOfMemory, with a sentence, where the GPU's memory does not hold `what`."""
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        if isinstance(error, torch.AcceleratorError) and "out of memory" not in str(error):
            raise
        raise OutOfMemory(
            f"this GPU's memory does not hold {what}; lower --token-budget, --max-batch-size, "
            "--kv-cache, or end what else runs on the GPU"
        ) from None


def load_generator(config: Config, path: Path | None, n_vocab: int) -> Generator:
    """Build, load and warm up the generator that `config` asks for.

    `path`: the checkpoint, as `weights.locate` returned it. `n_vocab`: ids that the tokenizer can
    decode. torch is imported here, in the thread that will use it, and not at all for the fake.
    Raises OutOfMemory.
    """
    if config.model == "fake":
        from generate.fake import FakeGenerator

        return FakeGenerator(slowdown=config.fake_slowdown)
    import torch

    from model import load_model

    torch.set_num_threads(config.threads)
    with memory_for(f"{config.model} and an iteration of {config.max_batch_size} rows"):
        model = load_model(
            config.shape, path, config.weights_seed, getattr(torch, config.dtype), config.device
        )
        if config.generator == "naive":
            from generate.naive import NaiveGenerator

            return NaiveGenerator(model, n_vocab)
        if config.linear != "plain":
            from generate.linear import pack

            pack(model, config.linear)
        if config.norms == "kernel":
            from generate.norms import KernelAddNorm, fuse_norms

            fuse_norms(model, KernelAddNorm)
        elif config.norms == "triton":
            from generate.gpu import TritonAddNorm
            from generate.norms import fuse_norms

            fuse_norms(model, TritonAddNorm)
        if config.device == "cuda":
            from generate.gpu import pad_head

            pad_head(model)
        if config.pool_is_known:
            return _cached(config, model, n_vocab, config.n_blocks)
        from generate.memory import fitting_blocks

        return _cached(
            config,
            model,
            n_vocab,
            fitting_blocks(config, lambda n: _cached(config, model, n_vocab, n)),
        )


def _cached(config: Config, model: GPT2, n_vocab: int, n_blocks: int) -> CachedGenerator:
    """The engine on a pool of n_blocks, captured where it can be, and warm."""
    import torch

    from generate.attention import Attention, KernelAttention, PlainAttention, TritonAttention
    from generate.cached import CachedGenerator
    from generate.forward import KernelForward, in_one_call
    from generate.sampling import sample, sample_on_cpu
    from model import KVCache

    dtype = getattr(torch, config.kept_as)
    cache = KVCache(config.shape, n_blocks, config.block_size, dtype, config.device)
    max_tokens = config.max_batch_size + config.token_budget
    attention: Attention = PlainAttention(cache)
    one_call = None
    if config.attention == "kernel":
        attention = KernelAttention(cache)
        if in_one_call(config):
            one_call = KernelForward(model, attention)
    elif config.attention == "triton":
        attention = TritonAttention(cache, max_tokens)
    sampler = sample_on_cpu if config.sampler == "kernel" else sample
    generator = CachedGenerator(model, n_vocab, attention, sampler, max_tokens, n_blocks, one_call)
    if config.captures:
        from generate.graphs import Capture

        generator.capture(config.decoder_batch_sizes, Capture())
    generator.warm_up(
        config.max_batch_size, config.token_budget, config.max_model_len - 1, config.block_size
    )
    return generator
