"""The forward pass in one call comes to the bits of the kernels called one by one, of all types."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from config import build
from generate import load_generator
from generate.cached import CachedGenerator
from generate.forward import KernelForward
from generate.linear import KINDS as LINEAR
from scheduling.inference import Inference, Row
from tests.oracle import row
from weights import locate

# rows that decode, a first chunk, a later one that samples nothing, an idle row
BATCHES = {
    "one": [row(200, 1, list(range(20, 33)))],
    "many": [row(i, 1, [2 * i, 2 * i + 1]) for i in range(30)],
    "mixed": [
        row(17, 1, [3, 9]),
        row(0, 130, [1, 4, 7, *range(50, 56)]),
        row(16, 11, [8, 6], samples=False),
        row(0, 1, []),
        row(40, 1, [11, 10, 12]),
    ],
    "no samples": [row(0, 20, [1, 2], samples=False)],
}


def folder(path: Path, width: int) -> str:
    """A model of two heads."""
    sizes = {"n_layer": 3, "n_head": 2, "n_embd": width, "vocab_size": 300, "n_positions": 256}
    path.joinpath("config.json").write_text(json.dumps({"model_type": "gpt2"} | sizes))
    return str(path)


def loaded(model: str, **settings: str) -> CachedGenerator:
    given = {"model": model, "weights": "random", "tokenizer": "bytes", "device": "cpu"}
    config = build("dynamic", given | {"dtype": "float32", "kv_cache": "70blocks"} | settings, {})
    generator = load_generator(config, locate(config), 257)
    assert isinstance(generator, CachedGenerator)
    return generator


def computed(
    generator: CachedGenerator,
    one_call: Callable[[list[Row], bool], Tensor] | None,
    rows: list[Row],
) -> tuple[Tensor, list[Tensor]]:
    """Return the logits, and the tensors of the cache after them."""
    cache, rng = generator.attention.cache, torch.Generator().manual_seed(0)
    for layer in cache.layers:
        layer.copy_(torch.randint(-2, 3, layer.shape, generator=rng))
    for scale in cache.scales or ():
        scale.uniform_(0.5, 1, generator=rng)
    generator.one_call = one_call
    logits = generator.logits(rows).clone()
    return logits, [tensor.clone() for tensor in (*cache.layers, *(cache.scales or ()))]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("linear", ["kernel", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [32, 128])  # heads of 16 and of 64
def test_one_call_comes_to_the_bits_of_many_and_of_each_row_alone(
    width: int, dtype: str, linear: str, kv_dtype: str, batch: str, threads: int, tmp_path: Path
) -> None:
    generator = loaded(folder(tmp_path, width), dtype=dtype, linear=linear, kv_dtype=kv_dtype)
    torch.set_num_threads(threads)
    one_call = generator.one_call
    assert isinstance(one_call, KernelForward)
    assert type(generator.model.lm_head) is LINEAR[linear]
    assert (generator.attention.cache.scales is None) == (kv_dtype == "auto")
    logits, kept = computed(generator, one_call, BATCHES[batch])
    expected, also_kept = computed(generator, None, BATCHES[batch])
    assert torch.equal(logits, expected) and len(logits) == sum(r.samples for r in BATCHES[batch])
    assert all(torch.equal(a, b) for a, b in zip(kept, also_kept))
    for alone, expected in zip((each for each in BATCHES[batch] if each.samples), logits):
        assert torch.equal(computed(generator, one_call, [alone])[0][0], expected)


@pytest.mark.parametrize("ids", [[-1, 5], [5, 300]])
def test_ids_that_the_model_has_not_are_refused(ids: list[int], tmp_path: Path) -> None:
    generator = loaded(folder(tmp_path, 32), linear="kernel")
    rows = [Row(Inference(ids, 1), 0, 2, [1], samples=True, idle=False)]
    for one_call in (generator.one_call, None):
        with pytest.raises(IndexError):
            computed(generator, one_call, rows)
    assert computed(generator, None, BATCHES["one"])[0].isfinite().all()


def test_it_is_taken_where_every_part_is_a_kernel(tmp_path: Path) -> None:
    model = folder(tmp_path, 64)
    assert isinstance(loaded(model, linear="kernel").one_call, KernelForward)
    for other in ({"linear": "onednn"}, {"attention": "plain"}, {"norms": "plain"}):
        assert loaded(model, **{"linear": "kernel", **other}).one_call is None


def test_layers_of_odd_widths_are_called_one_by_one(tmp_path: Path) -> None:
    """Their inputs are filled up with zeros in between."""
    model = folder(tmp_path, 48)
    generator = loaded(model, linear="kernel")
    assert generator.one_call is None
    ours, plain = (
        computed(each, None, BATCHES["mixed"])[0]
        for each in (generator, loaded(model, kernels="plain"))
    )
    assert torch.allclose(ours, plain, atol=1e-4)
