"""Attention of an iteration's rows, each over its own blocks of the KV cache.

Three ways, one result but for rounding:

    PlainAttention     PyTorch's scaled_dot_product_attention, called once a row; any device
    KernelAttention    kernels/attention.cpp, called once for all rows; CPU
    TritonAttention    generate/kernels/paged_attention.py, called once for all rows; GPU

`prepare(rows)`, called once an iteration, returns the `attend` that the model calls once a layer.
"""

from __future__ import annotations

import ctypes
import mmap
from array import array
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from generate import kernels
from generate.buffers import Put
from generate.rows import Tables, Tokens, flat
from model import Attend, KVCache
from scheduling.inference import Row


class Attention(Protocol):
    cache: KVCache
    put_bytes: int  # that `prepare` puts for a token at most

    def prepare(
        self, rows: list[Row], tokens: Tokens | None = None, put: Put | None = None
    ) -> Attend:
        """tokens: `flat(rows)`, if it is known. put: says where on the device an array will be
        before `attend` is called; None: it is copied at once.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Span:
    """Places of a row's tokens: queries in the flat list, keys and values in the cache."""

    first: int
    end: int
    blocks: Tensor | None  # the KV blocks up to the last query; None: the row has none any more
    length: int  # tokens up to the last query
    mask: Tensor | None  # live tokens of each query, for a later chunk: bool [T, L]


LARGE_PAGE = 1 << 21  # bytes


def prefer_large_pages(memory: torch.UntypedStorage) -> None:
    """Ask Linux, which may give them to programs that ask, for pages of 2 MB: with those of 4 kB
    what attention fetches ahead often waits for a page table.
    """
    begin = -(-memory.data_ptr() // LARGE_PAGE) * LARGE_PAGE
    end = (memory.data_ptr() + memory.nbytes()) // LARGE_PAGE * LARGE_PAGE
    if begin < end:  # it may refuse: then they stay small
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)


class PlainAttention:
    put_bytes = 0

    def __init__(self, cache: KVCache):
        self.cache = cache
        self._device = cache.layers[0].device

    def prepare(
        self, rows: list[Row], tokens: Tokens | None = None, put: Put | None = None
    ) -> Attend:
        n = 0  # tokens so far
        stored: list[int] = []  # indices into the flat list of the tokens that have a slot
        slots: list[Tensor] = []  # where these are stored
        spans: list[_Span] = []
        for row in rows:
            first, end = n, row.start + row.n_tokens
            n += row.n_tokens
            blocks = None
            if row.blocks:
                stored += range(first, n)
                slots.append(self.cache.slots(row.blocks, row.start, end))
                used = row.blocks[: -(-end // self.cache.block_size)]
                blocks = torch.tensor(used, device=self._device)
            spans.append(_Span(first, n, blocks, end, self._mask(row, end)))
        write_to = torch.cat(slots, 1) if slots else None
        write_from = torch.tensor(stored, device=self._device)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            if write_to is not None:
                self.cache.write(layer, write_to, qkv[write_from, 1:])
            q, _, v = qkv.transpose(0, 2)[None].unbind(2)  # 3 × [1, H, T, D]
            outputs = []
            for span in spans:
                queries = q[:, :, span.first : span.end]
                # an idle row whose cache was given back attends to itself alone
                if span.blocks is None:
                    outputs.append(v[:, :, span.first : span.end])
                    continue
                kv = self.cache.read(layer, span.blocks, span.length).to(qkv.dtype)
                keys, values = kv[:, None]  # 2 × [1, H, L, D]
                causal = span.mask is None and span.end - span.first > 1
                outputs.append(
                    F.scaled_dot_product_attention(
                        queries, keys, values, span.mask, is_causal=causal
                    )
                )
            return torch.cat(outputs, 2)[0].transpose(0, 1)  # [T, H, D]

        return attend

    def _mask(self, row: Row, end: int) -> Tensor | None:
        if row.n_tokens == 1 or row.start == 0:
            return None
        queries = torch.arange(row.start, end, device=self._device)[:, None]
        return torch.arange(end, device=self._device)[None] <= queries


class KernelAttention:
    """Raises kernels.KernelUnavailable where the kernel cannot be loaded."""

    put_bytes = 0

    def __init__(self, cache: KVCache):
        self.cache = cache  # keeps the addresses valid
        prefer_large_pages(cache.layers[0].untyped_storage())
        scales = cache.scales or [None] * len(cache.layers)
        self.addresses = [
            (layer.data_ptr(), None if scale is None else scale.data_ptr())
            for layer, scale in zip(cache.layers, scales)
        ]
        name = "paged_attention" if cache.scales is None else "paged_attention_int8"
        self.kernels = {  # by the type of the queries
            dtype: kernels.function(name, dtype) for dtype in (torch.float32, torch.bfloat16)
        }

    def prepare(
        self, rows: list[Row], tokens: Tokens | None = None, put: Put | None = None
    ) -> KernelAttend:
        return KernelAttend(self, rows, tokens or flat(rows))


class KernelAttend:
    """An iteration as kernels/attention.cpp reads it: each token's position in its row, where its
    row's blocks are listed, and whether it is of the prompt. A row without blocks has −1.
    """

    def __init__(self, attention: KernelAttention, rows: list[Row], tokens: Tokens):
        self._attention = attention
        tables, blocks, in_prompt = array("q"), array("q"), array("b")
        for row in rows:
            tables.extend([len(blocks) if row.blocks else -1] * row.n_tokens)
            blocks.extend(row.blocks)
            of_prompt = len(row.inference.prompt_ids) - row.start
            of_prompt = max(0, min(of_prompt, row.n_tokens))
            in_prompt.frombytes(b"\1" * of_prompt + bytes(row.n_tokens - of_prompt))
        self._arrays = tokens.positions, tables, blocks, in_prompt  # keeps the addresses valid
        self.addresses = [each.buffer_info()[0] for each in self._arrays]

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        qkv = qkv.contiguous()  # the kernel takes an address and no strides
        n_tokens, _, n_head, head_size = qkv.shape
        y = qkv.new_empty(n_tokens, n_head, head_size)  # [T, H, D]
        given = qkv.data_ptr(), y.data_ptr(), *self._attention.addresses[layer], *self.addresses
        sizes = n_tokens, n_head, self._attention.cache.block_size, head_size
        self._attention.kernels[qkv.dtype](*given, *sizes, torch.get_num_threads())
        return y


class TritonAttention:
    """Describes an iteration's rows in one array, which a captured `attend` reads again: captured
    for as many tokens, in rows of one token each, it computes whatever rows were prepared last.

    max_tokens: of an iteration; longest: tokens of a row.
    """

    def __init__(self, cache: KVCache, max_tokens: int, longest: int):
        from generate.kernels import paged_attention

        self._kernel = paged_attention
        self.cache = cache
        self.put_bytes = 4 * paged_attention.TILE
        layer = cache.layers[0]
        self._tables = Tables(max_tokens, -(-longest // cache.block_size), layer.device)
        self.shared = paged_attention.shared(layer, longest)

    def prepare(
        self, rows: list[Row], tokens: Tokens | None = None, put: Put | None = None
    ) -> Attend:
        tokens = tokens or flat(rows)
        tiles, n_tiles = self._tiles(tokens)
        tables = self._tables.tensor
        described = put(tiles) if put else torch.from_numpy(tiles).to(tables.device)
        given = described, tables, n_tiles, *self.shared

        def attend(layer: int, qkv: Tensor) -> Tensor:
            return self._kernel.paged_attention(qkv, self.cache.layers[layer], *given)

        return attend

    def _tiles(self, tokens: Tokens) -> tuple[np.ndarray[Any, Any], int]:
        """Return the tiles as kernels/paged_attention.py describes them, and how many they are."""
        most, n, n_rows = self._kernel.QUERIES, len(tokens.positions), len(tokens.counts)
        table = self._tables.begins(tokens.blocks)  # [rows]
        position = np.frombuffer(tokens.positions, np.int64)
        # each tile's first token, its number of tokens, and that of its row's tokens before it
        first, size, before = np.arange(n), np.ones(1, int), np.zeros(1, int)
        if n > n_rows:
            counts = np.array(tokens.counts)
            n_tiles = -(-counts // most)  # [rows]
            row = np.repeat(np.arange(n_rows), n_tiles)  # [tiles]
            before = most * (np.arange(len(row)) - (n_tiles.cumsum() - n_tiles)[row])
            first = (counts.cumsum() - counts)[row] + before
            size, table = np.minimum(most, counts[row] - before), table[row]
            position = position[first]
        # a captured launch has a tile for each token
        tiles = np.zeros((n, self._kernel.TILE), np.int32)
        used = tiles[: len(first)].T
        used[0], used[1], used[4] = first, size, table
        # a row without blocks attends to this iteration's tokens alone
        used[3] = np.where(table < 0, before, position)
        used[2] = used[3] - before
        return tiles, len(first)
