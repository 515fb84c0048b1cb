"""Products in one order of sums and five launches a layer, in Triton's interpreter."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from config.shapes import Shape
from generate import assembly, auto
from generate.attention import PlainAttention, TritonAttention
from generate.auto import build
from generate.cached import CachedGenerator
from generate.checkpoint import load_model
from generate.fused import FusedGPT2
from generate.norms import TritonAddNorm, fuse_norms
from generate.sampling import sample
from model import GPT2, KVCache
from scheduling.inference import Row
from tests.oracle import enliven, row

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
from triton.runtime.interpreter import GridExecutor

from generate.kernels import products

gelu = torch.nn.GELU(approximate="tanh")
SHAPE = Shape(n_layer=1, n_head=1, n_embd=16, n_ctx=32, vocab_size=256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_equals_its_layers_and_a_token_alone(dtype: torch.dtype, in_order: None) -> None:
    rng = torch.Generator().manual_seed(0)
    sizes = (19, 272), (12, 272), (12,), (19, 12), (272,), (272,)
    made = [torch.randn(size, generator=rng).to(dtype) for size in sizes]
    x, weight, bias, add, gain, shift = made[0] * 3, made[1].T / 16, *made[2:]
    x32, w, b, a, g, s = (tensor.float() for tensor in (x, weight, *made[2:]))
    normed = F.layer_norm(x32, (272,), g, s)
    near = 1e-5 if dtype == torch.float32 else 0.02
    around: dict[str, Any]
    for around, expected in (
        ({"bias": bias, "norm": (gain, shift, 1e-5), "gelu": True}, gelu(normed @ w + b)),
        ({"bias": bias, "add": add}, x32 @ w + b + a),
        ({"norm": (gain, shift, 1e-5)}, normed @ w),
    ):
        result = products.product(x, weight, **around)
        assert torch.allclose(result.float(), expected, near, near)
        own = around | ({"add": add[18:]} if "add" in around else {})
        assert torch.equal(products.product(x[18:], weight, **own), result[18:])


def test_few_tokens_of_gpt2_medium_have_a_program_for_each_multiprocessor_of_an_h100() -> None:
    programs = [n // products.tile(n, torch.bfloat16)["OUTPUTS"] for n in (1024, 3072, 4096)]
    assert programs == [128, 192, 128]


def computed(model: GPT2, *passes: list[Row], triton: bool = True) -> list[Tensor]:
    """Return the logits of the last row of each pass, all in one cache."""
    cache = KVCache(model.shape, 16, 4, torch.float32, "cpu")
    attention = TritonAttention(cache, 40, 32) if triton else PlainAttention(cache)
    generator = CachedGenerator(model, model.shape.vocab_size, attention, sample, 40)
    return [generator.logits(rows)[-1] for rows in passes]


def test_a_row_has_the_same_bits_alone(in_order: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "FEWEST", 256)  # one program a product
    plain = enliven(load_model(SHAPE, None, seed=3, dtype=torch.float32, device="cpu"))
    fused = FusedGPT2(copy.deepcopy(plain), math.inf)
    prompt = row(0, 9, [5, 2, 7])
    chunk, rest = prompt._replace(n_tokens=5), prompt._replace(start=5, n_tokens=4)
    others = [row(0, 5, [8, 1]), row(0, 1, [])]
    [alone] = computed(fused, [prompt])
    [expected] = computed(plain, [prompt], triton=False)
    assert (alone - expected).abs().max() < 1e-5 * expected.abs().max()
    assert torch.equal(computed(fused, [*others, prompt])[0], alone)
    assert torch.equal(computed(fused, [*others, chunk], [*others[:1], rest])[1], alone)


class Launches(TorchFunctionMode):
    """Counts PyTorch's operations, but for those that launch nothing."""

    NONE = "__get__ __len__ stride view reshape contiguous new_empty empty_like"
    n = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += func.__name__ not in self.NONE.split()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("most", "launches"), [(1, 5 * 24 + 5), (0, 8 * 24 + 6)])
def test_a_step_is_few_launches(most: int, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many layers as GPT-2-medium has. Nothing is computed."""
    kernels: list[None] = []
    monkeypatch.setattr(GridExecutor, "__call__", lambda *_, **__: kernels.append(None))
    model = GPT2(shape := replace(SHAPE, n_layer=24))
    fuse_norms(model, TritonAddNorm)
    cache = KVCache(shape, 4, 4, torch.float32, "cpu")
    attend = TritonAttention(cache, 8, 32).prepare([row(3, 1, [1])])
    fused, one = FusedGPT2(model, most), torch.zeros(1, dtype=torch.int64)
    with torch.inference_mode(), Launches() as others:
        fused(one, one, attend, one)
    assert len(kernels) + others.n == launches


@pytest.mark.parametrize(("invariant", "most"), [(False, 32), (True, math.inf)])
def test_passes_of_few_tokens_are_fused_or_all_if_batch_invariant(
    invariant: bool, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "gpu_is_usable", lambda: True)
    settings = {"model": "gpt2", "weights": "random", "batch_invariant": invariant}
    monkeypatch.setattr(assembly, "load_model", lambda *_: GPT2(SHAPE))
    model = assembly._load(build("dynamic", settings, {}), None)
    assert isinstance(model, FusedGPT2) and model._most == most
    assert (model.lm_head is None) == invariant
