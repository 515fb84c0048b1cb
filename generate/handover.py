"""Keys and values of prompts copied out of the KV cache for another server, or into it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from model import KVCache
from scheduling.handover import Handover
from scheduling.inference import Generator, Iteration


class HandoverGenerator(Generator):
    """The engine of a prefill server, which copies the keys and values of each prompt that it has
    computed (`gives`), or of a decode server, which copies those that come with a request into its
    blocks.
    """

    def __init__(self, engine: Generator, cache: KVCache, gives: bool):
        self.n_blocks, self.drafter = engine.n_blocks, engine.drafter
        self.adapters = engine.adapters
        self._engine, self._gives, self._block_size = engine, gives, cache.block_size
        self._tensors = (*(cache.scales or ()), *cache.layers)

    def generate(self, iteration: Iteration) -> list[int]:
        for row in () if self._gives else iteration.rows:
            handed, n_prompt = row.inference.handed, len(row.inference.prompt_ids)
            if handed is not None and handed.data:
                if row.start == n_prompt:  # else it was preempted, and computes its prompt again
                    self._write(row.blocks[: -(-n_prompt // self._block_size)], handed.data)
                handed.data = bytearray()
        ids = self._engine.generate(iteration)
        for row in iteration.rows if self._gives else ():
            if row.samples and not row.idle:
                n_blocks = -(-len(row.inference.prompt_ids) // self._block_size)
                row.inference.handed = Handover(self._read(row.blocks[:n_blocks]))
        return ids

    @torch.inference_mode()
    def _read(self, blocks: Sequence[int]) -> bytearray:
        parts = [kept[blocks].flatten().view(torch.uint8) for kept in self._tensors]
        return bytearray(torch.cat(parts).cpu().numpy())

    @torch.inference_mode()
    def _write(self, blocks: Sequence[int], data: bytearray) -> None:
        received, at = torch.frombuffer(data, dtype=torch.uint8), 0
        for kept in self._tensors:
            size = len(blocks) * kept[0].numel() * kept.element_size()
            part = received[at : at + size].view(kept.dtype).view(-1, *kept.shape[1:])
            kept[blocks] = part.to(kept.device)
            at += size
