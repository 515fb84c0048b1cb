"""The oracle of the engine, a small model whose blocks matter, and engines of several paths on it.

Rounding may decide a near-tie either way, so the oracle also checks that every decision here has a
margin.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from config.shapes import Shape
from generate.attention import Attention, KernelAttention, PlainAttention, TritonAttention
from generate.buffers import SampledIds
from generate.cached import CachedGenerator
from generate.checkpoint import load_model
from generate.forward import KernelForward
from generate.linear import pack
from generate.lora import AdaptedGenerator, Adapter, AdapterStore
from generate.naive import NaiveGenerator
from generate.norms import KernelAddNorm, fuse_norms
from generate.sampling import ALL, Sample, _largest, _nucleus, sample, sample_on_cpu, uniforms
from model import GPT2, KVCache
from scheduling.inference import Drafter, Generator, Inference, Iteration, Row
from scheduling.policies import Dynamic, NoBatching, Policy, Static, Windowed
from scheduling.sampling import Sampling
from simulate import drive
from tests.virtual import make_scheduler

SHAPE = Shape(n_layer=2, n_head=2, n_embd=32, n_ctx=1024, vocab_size=300)
N_VOCAB = 257  # the tokenizer has fewer ids than the model
MARGIN = 1e-5
MAX_TOKENS = 1100
POLICIES: list[Policy] = [
    NoBatching(), Static(), Static(compact_batches=True),
    Windowed(max_batch_delay_ms=3000, batch_size_target=2), Dynamic(),
]  # fmt: skip
PATHS: dict[str, tuple[Callable[[KVCache], Attention], Sample, str]] = {
    "plain": (PlainAttention, sample, "plain"),
    "kernels": (KernelAttention, sample_on_cpu, "kernel"),
    "kernels in one call": (KernelAttention, sample_on_cpu, "kernel"),
    "kernels and onednn": (KernelAttention, sample_on_cpu, "onednn"),
}


@pytest.fixture(scope="module")
def model() -> GPT2:
    return tiny_model()


def tiny_model() -> GPT2:
    return enliven(load_model(SHAPE, None, seed=3, dtype=torch.float32, device="cpu"))


def enliven(model: GPT2) -> GPT2:
    """Make the blocks matter: random weights of the usual size repeat the last token for ever."""
    for name, parameter in model.named_parameters():
        if name.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight")):
            parameter.mul_(12)
    model.get_parameter("ln_f.weight").mul_(20)
    return model


def row(start: int, n_tokens: int, blocks: list[int], samples: bool = True) -> Row:
    """A row of an iteration: one that decodes, of one token after others, or a prompt's; one
    without blocks is idle.
    """
    ids = [(7 * start + 3 * i) % 250 for i in range(start + n_tokens)]
    n = start if start and n_tokens == 1 else len(ids)
    inference = Inference(ids[:n], 2, tokens=ids[n:])
    return Row(inference, start, n_tokens, blocks, samples, idle=not blocks)


def engine(
    model: GPT2, n_blocks: int, block_size: int, path: str = "kernels in one call",
    adapters: Sequence[Adapter] = (), slots: int = 8, sampled: SampledIds | None = None,
) -> CachedGenerator:  # fmt: skip
    attend, sampler, linear = PATHS[path]
    if linear != "plain" or adapters:
        model = copy.deepcopy(model)
    if linear != "plain":
        pack(model, linear, bool(adapters))
        fuse_norms(model, KernelAddNorm)
    cache = KVCache(model.shape, n_blocks, block_size, model.wte.weight.dtype, "cpu")
    attention = attend(cache)
    generator = CachedGenerator(model, N_VOCAB, attention, sampler, MAX_TOKENS, sampled)
    if adapters:
        store = AdapterStore(
            model, slots, MAX_TOKENS, triton=isinstance(attention, TritonAttention)
        )
        for adapter in adapters:
            store.add(adapter)
        generator = AdaptedGenerator(store, model, N_VOCAB, attention, sampler, MAX_TOKENS)
    if path == "kernels in one call":
        assert isinstance(attention, KernelAttention)
        generator.one_call = KernelForward(model, attention, sampled)
    return generator


def workload(n: int, sampling: Sampling, longest_prompt: int = 40) -> list[Inference]:
    rng = random.Random(5)
    inferences = []
    for i in range(n):
        prompt = [rng.randrange(N_VOCAB) for _ in range(rng.randint(1, longest_prompt))]
        inferences.append(Inference(prompt, rng.randint(1, 20), replace(sampling, seed=i)))
    return inferences


def serve(
    policy: Policy, generator: Generator, inferences: Sequence[Inference], **limits: Any
) -> list[list[int]]:
    """Return the tokens of each, two of which arrive in each iteration."""
    defaults = {"max_batch_size": 5, "token_budget": 24, "n_blocks": 80, "block_size": 4}
    scheduler = make_scheduler(policy, **(defaults | limits))
    arrivals = [(float(i // 2), [inference]) for i, inference in enumerate(inferences)]
    drive(scheduler, arrivals, lambda _: 1.0, generator.generate, drafter=generator.drafter)
    assert scheduler.pool.free_blocks == scheduler.pool.n_blocks
    return [inference.tokens for inference in inferences]


class Guesses(Drafter):
    """Draft tokens of known texts, of which one in five is wrong."""

    def __init__(self, inferences: Sequence[Inference], texts: Sequence[Sequence[int]]):
        self._texts = dict(zip(map(id, inferences), texts))

    def propose(self, wanted: Sequence[tuple[Inference, int]]) -> list[list[int]]:
        proposed = []
        for each, k in wanted:
            n, text = len(each.tokens), self._texts[id(each)]
            proposed.append(
                [token + (17 * at % 5 == 4) for at, token in enumerate(text[n : n + k], n)]
            )
        return proposed


class Oracle(NaiveGenerator):
    """The naive generator, which also checks that no decision hangs on rounding noise."""

    def generate(self, iteration: Iteration) -> list[int]:
        for row in iteration.rows:
            if row.samples and not row.idle:
                self._check_margin(row)
        return super().generate(iteration)

    def _check_margin(self, row: Row) -> None:
        logits = self.logits(row.inference, row.start + row.n_tokens)[0, :N_VOCAB]
        how = row.inference.sampling
        if how.temperature == 0:
            best, second = logits.topk(2).values
            assert best - second > MARGIN, "choose another seed: this decision is a near-tie"
            return
        edges = restricted(logits / how.temperature, how.top_k, how.top_p).double().softmax(-1)
        [u] = uniforms([(how, len(row.inference.tokens))])
        distance = edges.cumsum(-1) - u
        assert distance.abs().min() > 1e-7, "choose another seed: this draw is a near-tie"


def restricted(logits: torch.Tensor, top_k: int | None, top_p: float | None) -> torch.Tensor:
    """One row through the functions of a batch."""
    n = logits.numel()
    k = torch.tensor([min(top_k or n, n)])
    p = torch.tensor([ALL if top_p in (None, 1.0) else top_p], dtype=torch.float64)
    return _nucleus(_largest(logits[None], k, int(k)), p)[0]
