"""KV blocks copied to a pool in the host's memory, and back, before an iteration."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from model import KVCache
from scheduling.ahead import launched
from scheduling.inference import Generator, Iteration

Copies = Sequence[tuple[int, int]]  # numbers of blocks: from, to


class HostPool:
    """So many KV blocks in the host's memory, in a layer's order and type, with int8's scales."""

    def __init__(self, cache: KVCache, n_blocks: int):
        self._tensors = [  # of the device, and of the host: page-locked, so that a GPU reads it
            (kept, kept.new_empty(size, device="cpu", pin_memory=kept.is_cuda))
            for kept in (*cache.layers, *(cache.scales or ()))
            for size in [(n_blocks, *kept.shape[1:])]
        ]

    @torch.inference_mode()
    def copy(self, out: Copies, back: Copies) -> None:
        """Copy blocks to the host, and then others from it. A GPU does so while the host goes on,
        in order with all else that it computes.
        """
        for block, place in out:
            for device, host in self._tensors:
                host[place].copy_(device[block], non_blocking=True)
        for place, block in back:
            for device, host in self._tensors:
                device[block].copy_(host[place], non_blocking=True)


class SwappingGenerator(Generator):
    """The engine with a host pool."""

    def __init__(self, engine: Generator, cache: KVCache, n_blocks: int):
        """n_blocks: of the host."""
        self.n_blocks, self.drafter = engine.n_blocks, engine.drafter
        self.adapters = engine.adapters
        self._engine, self.host = engine, HostPool(cache, n_blocks)

    def generate(self, iteration: Iteration) -> list[int]:
        return self.launch(iteration)()

    def launch(self, iteration: Iteration) -> Callable[[], list[int]]:
        self.host.copy(iteration.swap_out, iteration.swap_in)
        return launched(self._engine, iteration)
