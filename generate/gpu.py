"""What a GPU has instead of the plain model's parts.

That is an addition and its norm in one launch, and an LM head of even width.
Between the products of a decode step lie launches that take longer to begin than to
run, so fewer of them are what helps.
"""

from __future__ import annotations

import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F

from kernels.add_norm import add_norm
from model import GPT2, AddNorm


class TritonAddNorm(nn.Module):
    """(x + y, norm(x + y)) by kernels/add_norm.py."""

    def __init__(self, norm: AddNorm):
        super().__init__()
        self.weight, self.bias, self._epsilon = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return add_norm(x, y, self.weight, self.bias, self._epsilon)


class PaddedHead(nn.Module):
    """The LM head as a copy of wte with rows of zeros up to a multiple of 64.

    50,257 logits a row are no aligned output. Returns [N, V up to a multiple of 64]; whoever
    samples looks at the tokenizer's ids alone.
    """

    def __init__(self, weight: Tensor):
        super().__init__()
        self._weight = F.pad(weight.detach(), (0, 0, 0, -weight.shape[0] % 64))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight)


def pad_head(model: GPT2) -> None:
    """Replace the model's LM head."""
    model.lm_head = PaddedHead(model.wte.weight)
