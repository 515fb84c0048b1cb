"""A GPU's products in one order of sums, and the model in five launches a layer, in Triton's
interpreter.
"""

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

from config import build, resolve
from generate import loading
from generate.attention import PlainAttention, TritonAttention
from generate.cached import CachedGenerator
from generate.checkpoint import load_model
from generate.fused import FusedGPT2
from generate.linear import pad_head
from generate.norms import TritonAddNorm, fuse_norms
from generate.sampling import sample
from model import GPT2, KVCache
from scheduling.inference import Row
from shapes import Shape
from tests.oracle import enliven, row

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
from triton.runtime.interpreter import GridExecutor

from kernels import products

SHAPE = Shape(n_layer=1, n_head=1, n_embd=16, n_ctx=32, vocab_size=256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_equals_its_layers_and_a_token_has_the_same_bits_alone(
    dtype: torch.dtype, in_order: None
) -> None:
    rng = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=rng).to(dtype)

    x, add, bias = 3 * random(19, 272), random(19, 12), random(12)
    weight = (random(12, 272) / 16).T
    norm = random(272), random(272), 1e-5
    plain = {name: value.float() for name, value in {"x": x, "w": weight, "b": bias}.items()}
    normed = F.layer_norm(plain["x"], (272,), norm[0].float(), norm[1].float(), norm[2])
    gelu = F.gelu(normed @ plain["w"] + plain["b"], approximate="tanh")
    ways: list[tuple[dict[str, Any], Tensor]] = [
        ({"norm": norm, "gelu": True, "bias": bias}, gelu),
        ({"bias": bias, "add": add}, plain["x"] @ plain["w"] + plain["b"] + add.float()),
        ({"norm": norm}, normed @ plain["w"]),
    ]
    near = 1e-5 if dtype == torch.float32 else 0.02
    for around, expected in ways:
        result = products.product(x, weight, **around)
        assert torch.allclose(result.float(), expected, near, near)
        own = {**around, "add": add[18:]} if "add" in around else around
        assert torch.equal(products.product(x[18:], weight, **own), result[18:])


def test_few_tokens_of_gpt2_medium_have_a_program_for_each_multiprocessor_of_an_h100() -> None:
    programs = [n // products.tile(n, torch.bfloat16)["OUTPUTS"] for n in (1024, 3072, 4096)]
    assert programs == [128, 192, 128]


def computed(model: GPT2, *passes: list[Row], triton: bool = True) -> list[Tensor]:
    """Return the logits of the last row of each pass, all in one cache."""
    cache = KVCache(model.shape, 16, 4, torch.float32, "cpu")
    attention = TritonAttention(cache, 40) if triton else PlainAttention(cache)
    generator = CachedGenerator(model, model.shape.vocab_size, attention, sample, 40)
    return [generator.logits(rows)[-1] for rows in passes]


def test_a_row_has_the_same_bits_alone_beside_others_and_in_chunks(
    in_order: None, monkeypatch: pytest.MonkeyPatch
) -> None:
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


class Operations(TorchFunctionMode):
    """Names of PyTorch's operations, of which some launch nothing."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


NO_LAUNCH = {"__get__", "__len__", "stride", "view", "reshape", "new_empty", "empty_like"}
NO_LAUNCH |= {"contiguous"}  # of what is so


@pytest.mark.parametrize(("most", "launches"), [(1, 5 * 24 + 5), (0, 8 * 24 + 6)])
def test_a_step_of_few_tokens_is_five_launches_a_layer(
    most: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many layers as GPT-2-medium has. Nothing is computed."""
    kernels: list[str] = []
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *_, **__: kernels.append(self.fn))
    shape = replace(SHAPE, n_layer=24)
    model = load_model(shape, None, seed=3, dtype=torch.float32, device="cpu")
    fuse_norms(model, TritonAddNorm)
    pad_head(model)
    attention = TritonAttention(KVCache(shape, 4, 4, torch.float32, "cpu"), 8)
    attend = attention.prepare([row(3, 1, [1])])
    one = torch.zeros(1, dtype=torch.int64)
    fused = FusedGPT2(model, most)
    with torch.inference_mode(), Operations() as operations:
        fused(one, one, attend, one)
    assert len(kernels) + sum(name not in NO_LAUNCH for name in operations.names) == launches


@pytest.mark.parametrize(("invariant", "most"), [(False, 32), (True, math.inf)])
def test_passes_of_few_tokens_or_all_take_these_products(
    invariant: bool, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "gpu_is_usable", lambda: True)
    settings = {"model": "gpt2", "weights": "random", "batch_invariant": invariant}
    monkeypatch.setattr(loading, "load_model", lambda *_: GPT2(SHAPE))
    model = loading._load(build("dynamic", settings, {}), None)
    assert isinstance(model, FusedGPT2) and model._most == most
    assert (model.lm_head is None) == invariant
