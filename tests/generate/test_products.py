"""Linear layers in Triton's interpreter: values, one order of sums, and launches of a step."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from config.shapes import SHAPES, Shape
from generate import assembly, auto
from generate.attention import PlainAttention, TritonAttention
from generate.auto import build
from generate.cached import CachedGenerator
from generate.checkpoint import load_model
from generate.linear import PaddedHead, Sums, TritonLinear, pack
from generate.norms import TritonAddNorm, fuse_norms
from generate.sampling import sample
from model import GPT2, AddNorm, KVCache
from scheduling.inference import Row
from tests.counts import nightly_but
from tests.oracle import enliven, row

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
from triton.runtime.interpreter import GridExecutor

from generate.kernels import products

gelu = torch.nn.GELU(approximate="tanh")
SHAPE = Shape(n_layer=1, n_head=1, n_embd=16, n_ctx=32, vocab_size=256)
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces."""
    monkeypatch.setattr(products, "PIECE", 128)


def whole(product: Tensor | Sums) -> Tensor:
    if not isinstance(product, Sums):
        return product
    norm = AddNorm(product.bias.shape).to(product.bias.dtype).requires_grad_(False)
    return TritonAddNorm(norm)(
        torch.zeros(product.pieces[0].shape, dtype=norm.weight.dtype), product
    )[0]


def operands(n_tokens: int, n_in: int, n_out: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, a weight and a bias, seeded."""
    rng = torch.Generator().manual_seed(n_in)
    sizes = (n_tokens, n_in), (n_out, n_in), (n_out,)
    x, weight, bias = (torch.randn(size, generator=rng) for size in sizes)
    return x.to(dtype), (weight * n_in**-0.5).to(dtype), bias.to(dtype)


# one piece, two and three, of which none is whole
@pytest.mark.parametrize("n_in", [72, 150, 300])
@pytest.mark.parametrize("n_tokens", [5, 70])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_a_product_has_pytorchs_values(n_in: int, n_tokens: int, dtype: torch.dtype) -> None:
    x, weight, bias = operands(n_tokens, n_in, 40, dtype)
    plain = x.float() @ weight.float().T
    near = 1e-5 if dtype == FLOAT32 else 0.02
    around: dict[str, Any]
    for around, expected in (
        ({}, plain),
        ({"bias": bias}, plain + bias.float()),
        ({"bias": bias, "gelu": True}, gelu(plain + bias.float())),
    ):
        result = products.product(x, weight, **around)
        assert result.dtype == dtype and torch.allclose(result.float(), expected, near, near)


# as many pieces as each product of GPT-2-medium, and outputs on the same side of HEAD
PRODUCTS = {
    "c_attn": (256, 96), "c_proj": (256, 32), "c_fc": (256, 128), "mlp.c_proj": (1024, 32),
    "lm_head": (256, 140),
}  # fmt: skip
COUNTS = (1, 5, 16, 17, 32, 33, 64, 128, 130)


@pytest.mark.parametrize(("name", "dtype"), nightly_but(
    [("lm_head", BFLOAT16), ("c_proj", FLOAT32)],
    [*((name, BFLOAT16) for name in PRODUCTS), ("c_proj", FLOAT32)],
))  # fmt: skip
def test_a_token_has_the_same_bits_beside_any_number(
    name: str, dtype: torch.dtype, in_order: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, value in {"HEAD": 130, "MANY": 128}.items():
        monkeypatch.setattr(products, limit, value)
    n_in, n_out = PRODUCTS[name]
    x, weight, bias = operands(COUNTS[-1], n_in, n_out, dtype)
    layer = TritonLinear(weight.T, bias, name == "c_fc", whole="c_proj" not in name)
    tiles = [products.tile(n, n_in, n_out, dtype, layer._whole)[1] for n in COUNTS]
    n_kinds = {"c_proj": 4, "mlp.c_proj": 5, "lm_head": 2}.get(name, 3)
    assert len({tuple(each.items()) for each in tiles}) == (2 if dtype == FLOAT32 else n_kinds)
    expected = whole(layer(x))
    assert torch.equal(expected, products.product(x, weight, bias, name == "c_fc"))
    for n in COUNTS:
        assert torch.equal(whole(layer(x[-n:])), expected[-n:]), n


def test_pieces_are_added_in_order_and_as_the_norm_adds_them(in_order: None) -> None:
    x, weight, bias = operands(33, 1000, 48, BFLOAT16)
    layer, others = TritonLinear(weight.T, bias, whole=False), torch.randn(33, 48).bfloat16()
    norm = TritonAddNorm(AddNorm(48).bfloat16().requires_grad_(False))
    expected = norm(others, products.product(x, weight, bias))
    for n in (16, 33):
        sums = layer(x[:n])
        assert isinstance(sums, Sums) and len(sums.pieces) == 8
        pieces = [
            products.product(x[:n, i : i + 128].contiguous(), weight[:, i : i + 128].contiguous())
            for i in range(0, 1000, 128)
        ]
        found = torch.stack(pieces).float()
        assert torch.allclose(sums.pieces, found, 0.01, 0.01)
        some = torch.tensor([4, 0])
        for all_, few, right in zip(norm(others[:n], sums), norm(others[:n], sums, some), expected):
            assert torch.equal(all_, right[:n]) and torch.equal(few, right[some])


def test_few_tokens_have_their_weights_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all of GPT-2's sizes, but for the head and the wide layers of the largest two."""
    monkeypatch.undo()  # `small`
    for name, shape in SHAPES.items():
        width, n_vocab = shape.n_embd, shape.vocab_size + -shape.vocab_size % 64
        for n_in, n_out in ((width, 3 * width), (width, n_vocab), (4 * width, width)):
            for n in (1, 16, 32, 33, 128, 512, 513, 2048):
                kernel, sizes = products.tile(n, n_in, n_out, BFLOAT16, n_out != width)
                pieces, split = -(-n_in // products.PIECE), sizes["SPLIT"]
                fits = pieces <= 2 or n_out == width
                few = n <= 32 and n_out < 30_000 and fits
                assert few == (kernel is products.few_kernel), (name, n_in, n_out, n)
                whole = n_out != width or n > 512 or (n <= 4 and pieces <= 2)
                assert split == (1 if whole else pieces)


def computed(model: GPT2, *passes: list[Row], triton: bool = True) -> list[Tensor]:
    """Return the logits of the last row of each pass, all in one cache."""
    cache = KVCache(model.shape, 16, 4, FLOAT32, "cpu")
    attention = TritonAttention(cache, 40, 32) if triton else PlainAttention(cache)
    generator = CachedGenerator(model, model.shape.vocab_size, attention, sample, 40)
    return [generator.logits(rows)[-1] for rows in passes]


def test_a_row_has_the_same_bits_alone(in_order: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "PIECE", 32)
    plain = enliven(load_model(SHAPE, None, seed=3, dtype=FLOAT32, device="cpu"))
    ours = copy.deepcopy(plain)
    pack(ours, "triton")
    fuse_norms(ours, partial(TritonAddNorm, overlaps=True))
    prompt = row(0, 9, [5, 2, 7])
    chunk, rest = prompt._replace(n_tokens=5), prompt._replace(start=5, n_tokens=4)
    others = [row(0, 5, [8, 1]), row(0, 1, [])]
    [alone] = computed(ours, [prompt])
    [expected] = computed(plain, [prompt], triton=False)
    assert (alone - expected).abs().max() < 1e-5 * expected.abs().max()
    assert torch.equal(computed(ours, [*others, prompt])[0], alone)
    assert torch.equal(computed(ours, [*others, chunk], [*others[:1], rest])[1], alone)


class Launches(TorchFunctionMode):
    """Counts PyTorch's operations, but for those that launch nothing."""

    NONE = "__get__ __len__ stride view reshape contiguous new_empty empty_like"
    n = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += func.__name__ not in self.NONE.split()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("linear", "of_layer"), [("triton", 7), ("plain", 8)])
def test_a_step_is_few_launches(
    linear: str, of_layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many layers as GPT-2-medium has. Nothing is computed."""
    kernels: list[None] = []
    monkeypatch.setattr(GridExecutor, "__call__", lambda *_, **__: kernels.append(None))
    model = GPT2(shape := replace(SHAPE, n_layer=24))
    if linear == "triton":
        pack(model, linear)
    fuse_norms(model, TritonAddNorm)
    cache = KVCache(shape, 4, 4, FLOAT32, "cpu")
    attend = TritonAttention(cache, 8, 32).prepare([row(3, 1, [1])])
    one = torch.zeros(1, dtype=torch.int64)
    with torch.inference_mode(), Launches() as others:
        model(one, one, attend, one)
    assert len(kernels) + others.n == of_layer * 24 + 4


@pytest.mark.parametrize("more", [{}, {"lora_random": "2:8"}])
def test_a_gpu_has_pytorchs_layers_or_ours(
    more: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With adapters, which come before a gelu, that is not part of a product."""
    monkeypatch.setattr(auto, "gpu_is_usable", lambda: True)
    monkeypatch.setattr(assembly, "load_model", lambda *_: GPT2(replace(SHAPE, vocab_size=257)))

    def loaded(**settings: str) -> GPT2:
        given = {"model": "gpt2", "weights": "random", **more}
        return assembly._load(build("dynamic", given | settings, {}), None)

    chosen = build("dynamic", {"model": "gpt2", "weights": "random", **more}, {}).linear
    assert chosen == ("plain" if more else "triton"), "beside adapters ours have not run"
    plain: Any = loaded(linear="plain")
    assert isinstance(plain.lm_head, PaddedHead) and not plain.ln_f.overlaps
    model: Any = loaded(linear="triton")
    mlp = model.h[0].mlp
    assert isinstance(mlp.c_fc, TritonLinear) and model.ln_f.overlaps
    assert isinstance(mlp.gelu, torch.nn.GELU) == bool(more) != mlp.c_fc._gelu
    assert model.lm_head.weight.shape == (320, 16)
