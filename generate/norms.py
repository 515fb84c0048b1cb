"""Residual additions and the norms that read their sums, both in one call. CPU.

PyTorch's take two calls, and its norm reads from memory what its addition has just written there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
from torch import Tensor

import kernels
from model import GPT2, AddNorm, Block, Module


class KernelAddNorm(Module):
    """(x + y, norm(x + y)) by kernels/norms.cpp. x, y: [T, E].

    Raises kernels.KernelUnavailable where the kernel cannot be loaded.
    """

    def __init__(self, norm: AddNorm):
        super().__init__()
        library = kernels.load()
        self.kernel = {
            torch.float32: library.add_norm_float32,
            torch.bfloat16: library.add_norm_bfloat16,
        }[norm.weight.dtype]
        self._weight, self._bias, self.epsilon = norm.weight, norm.bias, norm.eps
        self.addresses = norm.weight.data_ptr(), norm.bias.data_ptr()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = x.contiguous(), y.contiguous()  # the kernel is told addresses and no strides
        total, out = torch.empty_like(x), torch.empty_like(x)
        self.kernel(
            x.data_ptr(),
            y.data_ptr(),
            *self.addresses,
            total.data_ptr(),
            out.data_ptr(),
            *x.shape,
            self.epsilon,
            torch.get_num_threads(),
        )
        return total, out


def fuse_norms(model: GPT2, kind: Callable[[AddNorm], nn.Module]) -> None:
    """Replace the model's additions and norms."""

    def fused(norm: nn.Module) -> nn.Module:
        assert isinstance(norm, AddNorm)
        return kind(norm)

    for block in model.h:
        assert isinstance(block, Block)
        block.ln_1, block.ln_2 = fused(block.ln_1), fused(block.ln_2)
    model.ln_f = fused(model.ln_f)
