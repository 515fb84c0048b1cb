"""Linear layers whose weights are packed once, in the order that a matrix product reads them.

    kernel    kernels/linear.cpp: fetches the next weights while it multiplies; on any processor
    int8      the same with weights and tokens rounded to int8: half of bfloat16's bytes to read
    onednn    PyTorch's own library: in bfloat16 a token's sums depend on how many there are
    triton    kernels/products.py: the same bits for any number of tokens; on a GPU

On a CPU weights of the plain layers (model.Linear) are put into such an order again at every call:
at 8 to 64 tokens that takes as long as the product (lab/benchmarks/README.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F

from generate import kernels
from model import GPT2, Block, Module

INPUTS = 32  # the kernel takes a multiple of them


class PackedLinear(Module):
    """A layer of kernels/linear.cpp. operands: tensors of kernels.Linear, by their names there."""

    def __init__(self, kernel: Any, operands: dict[str, Tensor], weight: Tensor, gelu: bool):
        super().__init__()
        self.kernel = kernel
        self._operands = operands  # keeps the addresses valid
        addresses = {name: tensor.data_ptr() for name, tensor in operands.items()}
        self.n_in, n_out = weight.shape
        n_in = self.n_in + -self.n_in % INPUTS
        self.struct = kernels.Linear(**addresses, n_in=n_in, n_out=n_out, with_gelu=gelu)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] % INPUTS:
            x = F.pad(x, (0, -x.shape[1] % INPUTS))
        x = x.contiguous()  # the kernel takes an address and no strides
        y = x.new_empty(x.shape[0], self.struct.n_out)
        threads = torch.get_num_threads()
        self.kernel(ctypes.byref(self.struct), x.data_ptr(), y.data_ptr(), x.shape[0], threads)
        return y


class KernelLinear(PackedLinear):
    """gelu(x W + b) or x W + b, in the weight's dtype. weight: [in, out].

    Raises kernels.KernelUnavailable where the kernel cannot be loaded.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, gelu: bool = False):
        together = 1 if weight.dtype == torch.float32 else 2
        operands = {"packed": _in_panels(weight, together), "bias": _of_outputs(weight, bias)}
        super().__init__(kernels.function("linear", weight.dtype), operands, weight, gelu)


class Int8Linear(PackedLinear):
    """The same with weights and tokens rounded to int8; x, b and the result keep their dtype.

    A weight becomes the nearest of 255 multiples of a scale, one for each output; so does an
    element of x, with a scale for each token, computed anew in every layer (LLM.int8(), Dettmers et
    al. 2022, section 3.1: vector-wise quantization). Raises kernels.KernelUnavailable.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, gelu: bool = False):
        largest = weight.abs().amax(0).float()  # [out]
        scales = torch.where(largest > 0, largest / 127, 1.0)
        rounded = torch.round(weight.float() / scales).to(torch.int8)
        # the kernel takes tokens as unsigned bytes around 128
        start = -128 * rounded.sum(0, dtype=torch.int32)
        operands = {
            "packed": _in_panels(rounded, 4),
            "start": _of_outputs(weight, start),
            "scales": _of_outputs(weight, scales),
            "bias": _of_outputs(weight, bias),
        }
        super().__init__(kernels.function("linear_int8", weight.dtype), operands, weight, gelu)


def _in_panels(weight: Tensor, together: int) -> Tensor:
    """Return weight: [in, out] as kernels/linear.cpp reads it: [panels, in / together, panel,
    together], filled up with zeros.
    """
    panel = kernels.load().panel_size()
    whole = F.pad(weight, (0, -weight.shape[1] % panel, 0, -weight.shape[0] % INPUTS))
    panels = whole.unflatten(1, (-1, panel)).unflatten(0, (-1, together))
    return panels.permute(2, 0, 3, 1).contiguous()


def _of_outputs(weight: Tensor, values: Tensor | None) -> Tensor:
    """Return values: [out] filled up with zeros to whole panels, floating-point ones as float32."""
    n_out = weight.shape[1]
    values = torch.zeros(n_out) if values is None else values
    whole = F.pad(values, (0, -n_out % kernels.load().panel_size()))
    return whole.float() if whole.is_floating_point() else whole


class OneDNNLinear(Module):
    """gelu(x W + b) or x W + b. weight: [in, out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, gelu: bool = False):
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.T.contiguous())
        self._bias = bias
        self._after: Any = ("gelu", [], "tanh") if gelu else ("none", [], "")

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, *self._after)


class Sums(NamedTuple):
    """A product whose pieces, float32 [pieces, T, out], are to be added in their order, and then
    its bias: [out]. norms.TritonAddNorm does it as it reads them.
    """

    pieces: Tensor
    bias: Tensor


class TritonLinear(Module):
    """gelu(x W + b) or x W + b by generate/kernels/products.py, on a GPU. weight: [in, out]. whole:
    it returns no Sums.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, gelu: bool = False, whole: bool = True):
        from generate.kernels.products import product

        super().__init__()
        self._product, self._bias, self._gelu, self._whole = product, bias, gelu, whole
        self.n_in = len(weight)
        self.weight = weight.T.contiguous()  # [out, in]

    def forward(self, x: Tensor) -> Tensor | Sums:
        y = self._product(x.contiguous(), self.weight, self._bias, self._gelu, self._whole)
        return y if self._bias is None or y.ndim == 2 else Sums(y, self._bias)


KINDS: dict[str, Callable[..., Module]] = {
    "kernel": KernelLinear,
    "int8": Int8Linear,
    "onednn": OneDNNLinear,
    "triton": TritonLinear,
}  # by the setting linear


def pack(model: GPT2, linear: str, adapted: bool = False) -> None:
    """Replace the model's linear layers by packed ones, each weight as soon as its copy is made.

    The LM head becomes a packed copy of wte, which stays for reading rows. adapted: adapters
    will be added to what the layers return.
    """
    # kernels/linear.cpp adds adapters before its gelu
    kind, fused = KINDS[linear], linear in ("kernel", "int8") or not adapted
    # before a residual addition that takes Sums, unless adapters are added first
    before_norm = partial(kind, whole=False) if linear == "triton" and not adapted else kind

    def packed(layer: Any, gelu: bool = False, kind: Callable[..., Module] = kind) -> Module:
        return kind(layer.weight.detach(), layer.bias.detach(), gelu)

    for block in model.h:
        assert isinstance(block, Block)
        attention, mlp = block.attn, block.mlp
        attention.c_attn, mlp.c_fc = packed(attention.c_attn), packed(mlp.c_fc, gelu=fused)
        attention.c_proj = packed(attention.c_proj, kind=before_norm)
        mlp.c_proj = packed(mlp.c_proj, kind=before_norm)
        mlp.gelu = nn.Identity() if fused else mlp.gelu
    wte = model.wte.weight.detach()
    model.lm_head = kind((aligned(wte) if linear == "triton" else wte).T, None)


def aligned(wte: Tensor) -> Tensor:
    """Return a copy of wte with rows of zeros up to a multiple of 64, as 50,257 logits a row are no
    aligned output of a GPU. Samplers read the tokenizer's ids alone.
    """
    return F.pad(wte, (0, 0, 0, -wte.shape[0] % 64))


class PaddedHead(Module):
    """A GPU's LM head of PyTorch's product. Returns [N, V up to a multiple of 64]."""

    def __init__(self, wte: Tensor):
        super().__init__()
        self._weight = aligned(wte.detach())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight)


def pad_head(model: GPT2) -> None:
    """Replace the model's LM head."""
    model.lm_head = PaddedHead(model.wte.weight)
