"""A generator put together as a Config says: model, parts, KV cache, CUDA graphs, warm-up."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from config.config import Config
from generate.attention import Attention, KernelAttention, PlainAttention, TritonAttention
from generate.buffers import SampledIds
from generate.cached import CachedGenerator
from generate.checkpoint import load_model
from generate.draft_model import DraftModel
from generate.forward import KernelForward, in_one_call
from generate.graphs import Capture
from generate.linear import pack, pad_head
from generate.lora import AdaptedGenerator, AdapterStore, random_adapter, read_adapter
from generate.memory import OutOfMemory, memory_for
from generate.naive import NaiveGenerator
from generate.ngram import Ngram
from generate.norms import NORMS, TritonAddNorm, fuse_norms
from generate.padded import PaddedGenerator
from generate.sampling import Sample, sample, sample_on_cpu, sample_on_gpu
from generate.weights import locate
from model import GPT2, KVCache
from scheduling.inference import Drafter, Generator

SEED = 0  # from which random weights are drawn


def assemble(config: Config, path: Path | None, n_vocab: int) -> Generator:
    """See loading.load_generator."""
    torch.set_num_threads(config.threads)
    with memory_for(f"{config.model} and an iteration of {config.max_batch_size} rows"):
        model = _load(config, path)
        if config.generator == "naive":
            return NaiveGenerator(model, n_vocab)
        if config.generator == "padded":
            return _padded(config, model, n_vocab)
        drafter: Drafter = Ngram()
        if (draft := config.draft_model) is not None:
            engine = _cached(draft, _load(draft, locate(draft)), n_vocab, draft.n_blocks)
            blocks = config.blocks_per_request
            drafter = DraftModel(engine, config.max_batch_size, blocks, config.max_tokens)
        adapters = _adapters(config, model) if config.adapters else None

        def on_pool(n_blocks: int) -> CachedGenerator:
            generator = _cached(config, model, n_vocab, n_blocks, adapters)
            generator.drafter = drafter
            return generator

        return on_pool(config.n_blocks if config.pool_is_known else fitting_blocks(config, on_pool))


def _load(config: Config, path: Path | None) -> GPT2:
    """Return the model with the parts of the settings."""
    dtype = getattr(torch, config.dtype)
    model = load_model(config.shape, path, SEED, dtype, config.device)
    if config.linear != "plain":
        pack(model, config.linear, bool(config.adapters))
    elif config.device == "cuda" and config.generator != "naive":
        pad_head(model)
    if config.linear == "triton":  # whose launches read weights before they wait for a norm
        fuse_norms(model, partial(TritonAddNorm, overlaps=True))
    elif config.norms != "plain":
        fuse_norms(model, NORMS[config.norms])
    return model


def _adapters(config: Config, model: GPT2) -> AdapterStore:
    """Return the adapters of the settings. Raises AdapterError."""
    slots, triton = config.lora_slots, config.attention == "triton"
    adapters = AdapterStore(model, slots, config.max_tokens, triton)
    for name, (folder, rank, seed) in config.adapters.items():
        if folder:
            adapters.add(read_adapter(name, folder, model.shape))
        else:
            adapters.add(random_adapter(name, rank, seed, model.shape))
    return adapters


def _padded(config: Config, model: GPT2, n_vocab: int) -> PaddedGenerator:
    """Return the engine of rectangles, warm."""
    generator = PaddedGenerator(model, n_vocab, _sampler(config), config.padded_prefill)
    prompt_tokens = min(config.max_model_len - 1, config.token_budget)
    generator.warm_up(config.max_batch_size, prompt_tokens)
    return generator


def _cached(
    config: Config,
    model: GPT2,
    n_vocab: int,
    n_blocks: int,
    adapters: AdapterStore | None = None,
) -> CachedGenerator:
    """Return the engine on a pool of n_blocks, captured where it can be, and warm."""
    dtype = getattr(torch, config.kept_as)
    cache = KVCache(config.shape, n_blocks, config.block_size, dtype, config.device)
    attention: Attention = PlainAttention(cache)
    if config.attention == "kernel":
        attention = KernelAttention(cache)
    elif config.attention == "triton":
        attention = TritonAttention(cache, config.max_tokens, config.shape.n_ctx)
    sampled = None
    if config.ahead:
        sampled = SampledIds(config.max_tokens, config.device, config.attention == "triton")
    parts = model, n_vocab, attention, _sampler(config), config.max_tokens, sampled
    generator = AdaptedGenerator(adapters, *parts) if adapters else CachedGenerator(*parts)
    generator.n_blocks = n_blocks
    if isinstance(attention, KernelAttention) and in_one_call(config):
        generator.one_call = KernelForward(model, attention, sampled)
    if config.captures:
        generator.capture(config.decoder_batch_sizes, Capture())
    longest = config.max_model_len - 1
    generator.warm_up(config.max_batch_size, config.token_budget, longest, config.block_size)
    return generator


def _sampler(config: Config) -> Sample:
    return {"kernel": sample_on_cpu, "triton": sample_on_gpu, "plain": sample}[config.sampler]


def fitting_blocks(config: Config, trial: Callable[[int], object]) -> int:
    """Return the KV blocks that fit into kv_cache's share of a GPU, beside weights, CUDA graphs and
    the largest iteration, which are tried, not estimated; without prefix_caching at most as many
    as the rows can use.

    trial(n_blocks): builds an engine on a pool of that size and runs its largest iterations; it is
    thrown away. Raises OutOfMemory if a request of max_model_len does not fit.
    """
    least = config.blocks_per_request
    _release()  # an earlier engine of this process
    engine = trial(least)
    free, total = torch.cuda.mem_get_info()  # beside the trial's memory
    del engine
    _release()
    room = free - (1 - config.pool.amount / 100) * total
    fitting = least + int(room // config.block_bytes)
    if fitting < least:
        raise OutOfMemory(
            f"{config.model}, its largest iteration and a request of {config.max_model_len} tokens "
            f"need {-room / 1e9:.2f} GB more than {config.pool} of this GPU's {total / 1e9:.1f} "
            "GB; lower --max-batch-size, --token-budget or --max-model-len, raise --kv-cache, or "
            "end what else runs on the GPU"
        )
    return fitting if config.prefix_caching else min(fitting, config.n_blocks)


def _release() -> None:
    """Give unused memory back to the GPU: captured passes lie in cycles of references."""
    gc.collect()
    torch.cuda.empty_cache()
