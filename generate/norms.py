"""Residual additions and the norms of their sums, both in one call.

PyTorch's take two: its norm reads from memory what its addition has just written there, and on a
GPU a launch takes longer to begin than to run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from generate import kernels
from generate.linear import Sums
from model import GPT2, AddNorm, Block, Module


class KernelAddNorm(Module):
    """(x + y, norm(x + y)) by kernels/norms.cpp, on a CPU. x, y: [T, E].

    Raises kernels.KernelUnavailable where the kernel cannot be loaded.
    """

    def __init__(self, norm: AddNorm):
        super().__init__()
        self.kernel = kernels.function("add_norm", norm.weight.dtype)
        self._weight, self._bias, self.epsilon = norm.weight, norm.bias, norm.eps
        self.addresses = norm.weight.data_ptr(), norm.bias.data_ptr()

    def forward(self, x: Tensor, y: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if tokens is not None:
            x, y = x[tokens], y[tokens]
        x, y = x.contiguous(), y.contiguous()  # the kernel takes addresses and no strides
        total, out = torch.empty_like(x), torch.empty_like(x)
        given = x.data_ptr(), y.data_ptr(), *self.addresses, total.data_ptr(), out.data_ptr()
        self.kernel(*given, *x.shape, self.epsilon, torch.get_num_threads())
        return total, out


class TritonAddNorm(Module):
    """The same by generate/kernels/add_norm.py, on a GPU. overlaps: with the launch after it."""

    def __init__(self, norm: AddNorm, overlaps: bool = False):
        from generate.kernels.add_norm import add_norm

        super().__init__()
        self._add_norm = add_norm
        self.weight, self.bias = norm.weight, norm.bias
        self.epsilon, self.overlaps = norm.eps, overlaps

    def forward(
        self, x: Tensor, y: Tensor | Sums, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        y, of_y = y if isinstance(y, Sums) else (y, None)
        own = self.weight, self.bias, self.epsilon, self.overlaps
        return self._add_norm(x, y, of_y, tokens, *own)


NORMS: dict[str, Callable[[Any], Module]] = {"kernel": KernelAddNorm, "triton": TritonAddNorm}


def fuse_norms(model: GPT2, kind: Callable[[Any], Module]) -> None:
    """Replace the model's additions and norms, each of which is an AddNorm."""
    for block in model.h:
        assert isinstance(block, Block)
        block.ln_1, block.ln_2 = kind(block.ln_1), kind(block.ln_2)
    model.ln_f = kind(model.ln_f)
