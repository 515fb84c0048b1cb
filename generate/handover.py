"""Keys and values of prompts copied out of the KV cache for another server, or into it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model import KVCache
from scheduling.handover import Handover
from scheduling.inference import Generator, Iteration


@torch.inference_mode()
def read(cache: KVCache, blocks: Sequence[int]) -> bytearray:
    """Return a copy of KV blocks: int8's scales, and layer after layer."""
    parts = [kept[blocks].flatten().view(torch.uint8) for kept in _tensors(cache)]
    return bytearray(torch.cat(parts).cpu().numpy())


@torch.inference_mode()
def write(cache: KVCache, blocks: Sequence[int], data: bytearray) -> None:
    """Copy what `read` returned into as many blocks."""
    received = torch.frombuffer(data, dtype=torch.uint8).to(cache.layers[0].device)
    for kept in _tensors(cache):
        size = len(blocks) * kept[0].numel() * kept.element_size()
        part, received = received[:size], received[size:]
        kept[blocks] = part.view(kept.dtype).view(-1, *kept.shape[1:])


def _tensors(cache: KVCache) -> Sequence[Tensor]:
    return (*(cache.scales or ()), *cache.layers)


class HandoverGenerator(Generator):
    """The engine of a prefill server, which copies the keys and values of each prompt that it has
    computed (`gives`), or of a decode server, which copies those that come with a request into its
    blocks.
    """

    def __init__(self, engine: Generator, cache: KVCache, gives: bool):
        self.n_blocks, self.drafter = engine.n_blocks, engine.drafter
        self.adapters = engine.adapters
        self._engine, self._cache, self._gives = engine, cache, gives

    def generate(self, iteration: Iteration) -> list[int]:
        size = self._cache.block_size
        for row in () if self._gives else iteration.rows:
            handed, n_prompt = row.inference.handed, len(row.inference.prompt_ids)
            if handed is not None and handed.data:
                if row.start == n_prompt:  # else it was preempted, and computes its prompt again
                    write(self._cache, row.blocks[: -(-n_prompt // size)], handed.data)
                handed.data = bytearray()
        ids = self._engine.generate(iteration)
        for row in iteration.rows if self._gives else ():
            if row.samples and not row.idle:
                n_blocks = -(-len(row.inference.prompt_ids) // size)
                row.inference.handed = Handover(read(self._cache, row.blocks[:n_blocks]))
        return ids
