"""The engines behind one seam, `inference.Generator`: generate(iteration) -> one id per row that samples."""

from __future__ import annotations

from pathlib import Path

from config import Config
from inference import Generator


def load_generator(config: Config, path: Path | None, n_vocab: int) -> Generator:
    """Build, load and warm up the generator that `config` asks for.

    `path`: the checkpoint, as `weights.locate` returned it. `n_vocab`: ids that the tokenizer can decode.
    torch is imported here, in the thread that will use it, and not at all for the fake.
    """
    if config.model == "fake":
        from generate.fake import FakeGenerator

        return FakeGenerator()
    import torch

    from model import load_model

    torch.set_num_threads(config.threads)
    model = load_model(config.shape, path, config.seed, getattr(torch, config.dtype), config.device)
    if config.generator == "naive":
        from generate.naive import NaiveGenerator

        return NaiveGenerator(model, n_vocab)
    from generate.attention import KernelAttention, PlainAttention
    from generate.cached import CachedGenerator
    from generate.linear import KernelLinear, OneDNNLinear, pack
    from generate.sampling import sample, sample_on_cpu
    from model import KVCache

    if config.linear != "plain":
        pack(model, KernelLinear if config.linear == "kernel" else OneDNNLinear)
    cache = KVCache(config.shape, config.n_blocks, config.block_size, model.wte.weight.dtype, config.device)
    if config.attention == "kernel":
        generator = CachedGenerator(model, n_vocab, KernelAttention(cache), sample_on_cpu)
    else:
        generator = CachedGenerator(model, n_vocab, PlainAttention(cache), sample)
    generator.warm_up(config.max_batch_size, min(config.token_budget, config.max_model_len - 1), config.block_size)
    return generator
