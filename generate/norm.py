"""A block's additions and norms as one launch each. GPU.

Between the products of a decode step lie launches that take longer to begin than to run, so fewer of them are what helps.
"""

from __future__ import annotations

import torch.nn as nn
from torch import Tensor

from kernels.add_norm import add_norm
from model import GPT2, AddNorm, Block


class TritonAddNorm(nn.Module):
    """(x + y, norm(x + y)) by kernels/add_norm.py."""

    def __init__(self, norm: AddNorm):
        super().__init__()
        self.weight, self.bias, self._epsilon = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return add_norm(x, y, self.weight, self.bias, self._epsilon)


def fuse(model: GPT2) -> None:
    """Replace the model's additions and norms by the kernel; the weights stay where they are."""

    def fused(norm: nn.Module) -> nn.Module:
        assert isinstance(norm, AddNorm)
        return TritonAddNorm(norm)

    for block in model.h:
        assert isinstance(block, Block)
        block.ln_1, block.ln_2 = fused(block.ln_1), fused(block.ln_2)
    model.ln_f = fused(model.ln_f)
