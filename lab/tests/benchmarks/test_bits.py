"""Whether `lab.benchmarks.bits` finds products whose bits depend on the number of tokens."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from lab.benchmarks import bits

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
from generate.kernels import products
from tests.generate.test_products import SHAPE


@pytest.mark.usefixtures("in_order")
def test_other_bits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they would be on a GPU, if `few` had another order of sums than `tiles`."""
    monkeypatch.setattr(bits, "COUNTS", (1, 17, 18))
    shape = replace(SHAPE, n_layer=2)
    config: Any = SimpleNamespace(shape=shape, device="cpu", linear="triton", dtype="bfloat16")
    assert bits.other_bits(config) == {
        "h.0.attn.c_attn": [], "h.0.attn.c_proj": [], "h.0.mlp.c_fc": [], "h.0.mlp.c_proj": [],
        "lm_head": [], "attention": [],
    }  # fmt: skip
    right = products.product

    def wrong(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        y = right(x, weight, *rest)
        return y if len(x) > 16 or weight.shape != (48, 16) else y * 1.01

    monkeypatch.setattr(products, "product", wrong)
    found = bits.other_bits(config)
    assert {name: counts for name, counts in found.items() if counts} == {"h.0.attn.c_attn": [1]}
