"""Iterations that follow one another on the device, without the host in between: ids that one
samples enter the next one there (scheduling/asynchronous.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from generate import memory_for
from generate.buffers import reader
from generate.cached import CachedGenerator
from scheduling.inference import Generator, Iteration


class SampledIds:
    """Memory on the device for the ids of an iteration, `size` at most."""

    def __init__(self, size: int, device: str):
        self._ids = torch.zeros(size, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def keep(self, ids: Tensor) -> None:
        self._ids[: len(ids)] = ids

    def into(self, ids: Tensor) -> Tensor:
        """Return ids, int64 [T], with the kept ones in the places of -1, -2, …"""
        return torch.where(ids < 0, self._ids[(-1 - ids).clamp(min=0)], ids)


class LaunchingGenerator(Generator):
    """An engine that launches an iteration before the host knows the ids of the one before. The
    engine's `known` is `sampled.into`.
    """

    def __init__(self, engine: CachedGenerator, sampled: SampledIds):
        self.n_blocks, self.adapters = engine.n_blocks, engine.adapters
        self._engine, self._sampled = engine, sampled

    def generate(self, iteration: Iteration) -> list[int]:
        return self.launch(iteration)()

    def launch(self, iteration: Iteration) -> Callable[[], list[int]]:
        ids = self._engine.ids(iteration)
        with memory_for(f"an iteration of {len(iteration.rows)} rows"):
            self._sampled.keep(ids)
            return reader(ids)
