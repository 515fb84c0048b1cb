"""CUDA graphs: the launches of a forward pass, recorded once and sent to the GPU as one.

A decode step of GPT-2-medium is 170 to 220 launches; sent one by one from Python they take longer
than the GPU needs for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


@functools.cache
def _beside() -> torch.cuda.Stream:
    """Return the one stream of all captures: libraries keep memory for each stream they see."""
    return torch.cuda.Stream()


class Capture:
    """Turns a forward pass into one that replays it. All share memory: the logits of one must be
    read before the next is replayed.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """`forward` must read from and write to the same memory whenever it is called."""
        beside = _beside()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            forward()  # libraries choose and set up what they will launch
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=beside):
            logits = forward()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
