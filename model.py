"""GPT-2 in nanoGPT's order and names, one forward pass over a flat list of tokens, the KV cache.

Shapes at line ends: T tokens of all rows, one after another · E width · H heads · D = E / H · L
live tokens of one row · V vocabulary.

Linear layers run over the tokens of all rows at once; only attention knows which token belongs to
which row (selective batching; Orca, OSDI 2022, section 3). It is an argument, so that the oracle
and the engine share every other line (but for kernels/forward.cpp, which tests show to be equal):

    attend(layer, qkv) -> y        qkv: [T, 3, H, D], y: [T, H, D]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F

from config.shapes import Shape

Attend = Callable[[int, Tensor], Tensor]


class Module(nn.Module):
    """A module without hooks: to look for them takes 2% of a step of one row of gpt2."""

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)


class Linear(Module):
    """x W + b with W as [in, out], the order of GPT-2's checkpoints."""

    def __init__(self, n_in: int, n_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class SelfAttention(Module):
    def __init__(self, shape: Shape, layer: int):
        super().__init__()
        self.layer, self.n_head = layer, shape.n_head
        self.c_attn: nn.Module = Linear(shape.n_embd, 3 * shape.n_embd)
        self.c_proj: nn.Module = Linear(shape.n_embd, shape.n_embd)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        qkv = self.c_attn(x).view(x.shape[0], 3, self.n_head, -1)  # [T, 3, H, D]
        return self.c_proj(attend(self.layer, qkv).reshape(x.shape))  # [T, E]


class MLP(Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.c_fc: nn.Module = Linear(shape.n_embd, 4 * shape.n_embd)
        self.gelu: nn.Module = nn.GELU(approximate="tanh")
        self.c_proj: nn.Module = Linear(4 * shape.n_embd, shape.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))  # [T, E]


class AddNorm(nn.LayerNorm):
    """A residual addition and the norm that reads its sum: (x + y, norm(x + y)).

    Both are one kernel on a GPU.
    """

    def forward(  # type: ignore[override]
        self, x: Tensor, y: Tensor, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """tokens: indices of those that are wanted, int64 [N]; None: all."""
        x = x + y if tokens is None else x[tokens] + y[tokens]
        return x, super().forward(x)


class Block(Module):
    def __init__(self, shape: Shape, layer: int):
        super().__init__()
        self.ln_1: nn.Module = AddNorm(shape.n_embd, shape.layer_norm_epsilon)
        self.attn = SelfAttention(shape, layer)
        self.ln_2: nn.Module = AddNorm(shape.n_embd, shape.layer_norm_epsilon)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, y: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Return both after the block. x: the residual stream; y: what is to be added to it."""
        x, y = self.ln_1(x, y)
        x, y = self.ln_2(x, self.attn(y, attend))
        return x, self.mlp(y)


class GPT2(Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        # skips initialisation
        self.wte = nn.Embedding.from_pretrained(torch.empty(shape.vocab_size, shape.n_embd))
        self.wpe = nn.Embedding.from_pretrained(torch.empty(shape.n_ctx, shape.n_embd))
        self.h = nn.ModuleList(Block(shape, layer) for layer in range(shape.n_layer))
        self.ln_f: nn.Module = AddNorm(shape.n_embd, shape.layer_norm_epsilon)
        # a copy of wte (generate/linear.py); None: wte itself
        self.lm_head: nn.Module | None = None

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, sample: Tensor) -> Tensor:
        """Return the logits that follow the tokens at the indices `sample`.

        ids, positions: int64 [T]; sample: int64 [N], indices into T. Returns [N, V] in the weights'
        dtype. The LM head is computed for those N tokens alone.
        """
        x, y = self.wte(ids), self.wpe(positions)  # 2 × [T, E]
        for block in self.h:
            x, y = block(x, y, attend)
        _, x = self.ln_f(x, y, sample)  # [N, E]
        return F.linear(x, self.wte.weight) if self.lm_head is None else self.lm_head(x)  # [N, V]


def causal_attention(layer: int, qkv: Tensor) -> Tensor:
    """Attention inside one sequence, without a cache: the oracle's. [T, 3, H, D] to [T, H, D]."""
    q, k, v = qkv.transpose(0, 2)[None].unbind(2)  # 3 × [1, H, T, D]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)


class KVCache:
    """Keys and values of all rows: a pool of blocks of `block_size` slots, a slot for each token.

    The scheduler decides which row has which blocks. A layer is [blocks, 2, H, block_size, D]: all
    heads' keys of a block are adjacent, and so are their values, so that a row is read in large
    pieces wherever its blocks lie. Memory is touched when it is written, not before.

    dtype int8: the numbers of a key or value of a head are multiples of a step, which is their
    largest magnitude ÷ 127; the steps are `scales`, float32, a layer [blocks, 2, H, block_size]. So
    the cache of a token depends on that token alone.
    """

    def __init__(
        self, shape: Shape, n_blocks: int, block_size: int, dtype: torch.dtype, device: str
    ):
        size = (shape.n_layer, n_blocks, 2, shape.n_head, block_size, shape.head_size)
        self.block_size = block_size
        self.layers = torch.empty(size, dtype=dtype, device=device).unbind(0)
        self.scales: tuple[Tensor, ...] | None = None
        if dtype == torch.int8:
            self.scales = torch.empty(size[:-1], device=device).unbind(0)

    def slots(self, blocks: list[int], start: int, end: int) -> Tensor:
        """Return block and place of tokens start … end − 1 of a row: int64 [2, end − start]."""
        positions = torch.arange(start, end)
        slots = [torch.tensor(blocks)[positions // self.block_size], positions % self.block_size]
        return torch.stack(slots).to(self.layers[0].device)

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Store kv: [N, 2, H, D] at `slots`: [2, N]."""
        block, place = slots
        if self.scales is not None:
            largest = kv.float().abs().amax(-1)  # [N, 2, H]
            self.scales[layer][block, :, :, place] = largest * (1 / 127)
            steps = torch.where(largest < 1e-30, 0.0, largest.new_tensor(127) / largest)
            kv = (kv.float() * steps[..., None]).round().to(torch.int8)
        self.layers[layer][block, :, :, place] = kv

    def read(self, layer: int, blocks: Tensor, length: int) -> Tensor:
        """Return keys and values of the first `length` tokens in `blocks`: a copy, [2, H, L, D].

        int8 ones come as float32.
        """
        kv = _in_order(self.layers[layer][..., :length, :], blocks)[:, :, :length]
        if self.scales is None:
            return kv
        scales = self.scales[layer][..., :length, None]
        return kv * _in_order(scales, blocks)[:, :, :length]


def _in_order(layer: Tensor, blocks: Tensor) -> Tensor:
    """Return the slots of `blocks`, one block after another: [all, 2, H, S, D] to [2, H, L, D].

    S: places in a block.
    """
    return layer.index_select(0, blocks).permute(1, 2, 0, 3, 4).flatten(2, 3)
