"""Linear layers whose weights are packed once, in the order that a matrix product reads them. CPU.

    kernel    kernels/linear.cpp: fetches the next weights while it multiplies; on any processor
    onednn    PyTorch's own library: bfloat16 where the processor multiplies it natively (AMX)

The plain layers (model.Linear) hand their weights over in PyTorch's order, which is put
into such an order again at every call: at 8 to 64 tokens that takes as long as the
product (benchmarks/README.md).
"""

from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F

import kernels
from model import GPT2, Block, Linear

INPUTS = 32  # the kernel takes a multiple of them


class KernelLinear(nn.Module):
    """gelu(x W + b) or x W + b. weight: [in, out].

    Raises kernels.KernelUnavailable where the kernel cannot be loaded.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, gelu: bool = False):
        super().__init__()
        library = kernels.load()
        if weight.dtype == torch.float32:
            self._kernel, together = library.linear_float32, 1
        else:
            self._kernel, together = library.linear_bfloat16, 2
        self._gelu, self._n_out = gelu, weight.shape[1]
        self._pad = -weight.shape[0] % INPUTS
        self._packed = in_panels(weight, together)
        bias = weight.new_zeros(self._n_out) if bias is None else bias
        self._start = F.pad(bias.float(), (0, -self._n_out % library.panel_size()))
        self._addresses = self._packed.data_ptr(), self._start.data_ptr()

    def forward(self, x: Tensor) -> Tensor:
        if self._pad:
            x = F.pad(x, (0, self._pad))
        x = x.contiguous()  # the kernel is told an address and no strides
        y = x.new_empty(x.shape[0], self._n_out)
        self._kernel(
            x.data_ptr(),
            *self._addresses,
            y.data_ptr(),
            *x.shape,
            self._n_out,
            self._gelu,
            torch.get_num_threads(),
        )
        return y


def in_panels(weight: Tensor, together: int) -> Tensor:
    """Return weight: [in, out] as kernels/linear.cpp reads it: [panels, in / together, panel,
    together], filled up with zeros.
    """
    panel = kernels.load().panel_size()
    whole = F.pad(weight, (0, -weight.shape[1] % panel, 0, -weight.shape[0] % INPUTS))
    return (
        whole.unflatten(1, (-1, panel))
        .unflatten(0, (-1, together))
        .permute(2, 0, 3, 1)
        .contiguous()
    )


class OneDNNLinear(nn.Module):
    """gelu(x W + b) or x W + b. weight: [in, out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, gelu: bool = False):
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.T.contiguous())
        self._bias = bias
        self._after: tuple[str, list[float], str] = (
            ("gelu", [], "tanh") if gelu else ("none", [], "")
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, *self._after)


def pack(model: GPT2, kind: type[KernelLinear] | type[OneDNNLinear]) -> None:
    """Replace the model's linear layers by packed ones, each weight as soon as its copy is made.

    The LM head becomes a packed copy of wte, which stays for reading rows.
    """

    def packed(layer: nn.Module, gelu: bool = False) -> nn.Module:
        assert isinstance(layer, Linear)
        return kind(layer.weight.detach(), layer.bias.detach(), gelu)

    for block in model.h:
        assert isinstance(block, Block)
        attention, mlp = block.attn, block.mlp
        attention.c_attn, attention.c_proj = packed(attention.c_attn), packed(attention.c_proj)
        mlp.c_fc, mlp.c_proj, mlp.gelu = (
            packed(mlp.c_fc, gelu=True),
            packed(mlp.c_proj),
            nn.Identity(),
        )
    model.lm_head = kind(model.wte.weight.detach().T, None)
