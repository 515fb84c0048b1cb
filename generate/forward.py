"""The model's forward pass as one call of kernels/forward.cpp, where all parts are kernels. CPU.

It calls them as model.GPT2.forward does, so that it comes to the same bits.
"""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import torch
from torch import Tensor

from config.config import Config
from generate import kernels
from generate.attention import KernelAttention
from generate.buffers import SampledIds
from generate.linear import INPUTS, PackedLinear
from generate.norms import KernelAddNorm
from generate.rows import flat
from model import GPT2
from scheduling.inference import Row


def in_one_call(config: Config) -> bool:
    """Return whether all parts are kernels that take each other's output as it lies in memory."""
    kernel = config.linear in ("kernel", "int8") and config.attention == config.norms == "kernel"
    return kernel and config.shape.n_embd % INPUTS == 0


class KernelForward:
    """The logits of rows by a model of PackedLinear and KernelAddNorm, with `attention`. sampled:
    see cached.CachedGenerator.
    """

    def __init__(self, model: GPT2, attention: KernelAttention, sampled: SampledIds | None = None):
        self._sampled = sampled
        self._model, self._attention = model, attention  # whose memory the addresses are of
        self._wte = wte = model.wte.weight
        ln_f, head = model.ln_f, model.lm_head
        assert isinstance(ln_f, KernelAddNorm) and isinstance(head, PackedLinear)
        assert head.struct.n_in == model.shape.n_embd  # see in_one_call
        blocks = [
            _block(block, *addresses) for block, addresses in zip(model.h, attention.addresses)
        ]
        self._kernel = kernels.load().forward
        self._struct = kernels.ModelStruct(
            linear=_address(head.kernel),
            add_norm=_address(ln_f.kernel),
            attention=_address(attention.kernels[wte.dtype]),
            wte=wte.data_ptr(),
            wpe=model.wpe.weight.data_ptr(),
            h=(kernels.Block * len(blocks))(*blocks),
            ln_f=kernels.Norm(*ln_f.addresses),
            lm_head=ctypes.pointer(head.struct),
            n_layer=len(blocks),
            n_head=model.shape.n_head,
            n_vocab=wte.shape[0],
            n_ctx=model.wpe.weight.shape[0],
            width=model.shape.n_embd,
            element=wte.element_size(),
            block_size=attention.cache.block_size,
            epsilon=ln_f.epsilon,
        )

    def __call__(self, rows: list[Row], every: bool = False) -> Tensor:
        """Compute the rows' tokens into the cache; return the logits after rows that sample, or
        after every token: [N, V]. Raises IndexError for an id or a position that the model has not.
        """
        tokens = flat(rows, every)
        ids, samples = tokens.ids, tokens.samples
        if self._sampled is not None:
            known = self._sampled.into(torch.frombuffer(ids, dtype=torch.int64))
            ids[:] = array("q", known.tolist())
        attend = self._attention.prepare(rows, tokens)
        logits = self._wte.new_empty(len(samples), self._wte.shape[0])
        at_ids, at_samples = (each.buffer_info()[0] for each in (ids, samples))
        given = at_ids, *attend.addresses, at_samples, len(ids), len(samples)
        model, threads = ctypes.byref(self._struct), torch.get_num_threads()
        if not self._kernel(model, *given, logits.data_ptr(), threads):
            raise IndexError("an id or a position is out of the model's range")
        return logits


def _block(block: Any, cache: int, scales: int | None) -> kernels.Block:
    norms = (kernels.Norm(*norm.addresses) for norm in (block.ln_1, block.ln_2))
    layers = block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj
    linears = (ctypes.pointer(layer.struct) for layer in layers)
    return kernels.Block(*norms, *linears, cache, scales)  # in the order of its fields


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value
