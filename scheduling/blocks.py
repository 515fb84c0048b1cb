"""Which KV blocks are free, as integers."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class BlockPool:
    """Free KV blocks as sorted ranges: a request gets consecutive blocks when there are any.

    Consecutive blocks let the plain PyTorch attention read a row's keys and values as
    one slice, without gathering them. Free ranges are at most one more than live
    allocations, so a linear scan is cheap.
    """

    def __init__(self, n_blocks: int):
        self.n_blocks = n_blocks
        self.free_blocks = n_blocks
        self._ranges = [(0, n_blocks)]  # (first, end), disjoint, sorted, never touching

    def allocate(self, n: int) -> list[int]:
        """Return n blocks: consecutive if any free range is long enough, else from several.

        Raises ValueError if there are too few.
        """
        if n > self.free_blocks:
            raise ValueError(f"{n} blocks wanted, {self.free_blocks} free")
        self.free_blocks -= n
        for i, (first, end) in enumerate(self._ranges):
            if end - first >= n:
                self._ranges[i : i + 1] = [(first + n, end)] if first + n < end else []
                return list(range(first, first + n))
        taken: list[int] = []
        while len(taken) < n:
            first, end = self._ranges.pop(0)
            stop = min(end, first + n - len(taken))
            taken += range(first, stop)
            if stop < end:
                self._ranges.insert(0, (stop, end))
        return taken

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back, merging neighbours."""
        returned = [(block, block + 1) for block in blocks]
        self.free_blocks += len(returned)
        merged: list[tuple[int, int]] = []
        for first, end in heapq.merge(self._ranges, sorted(returned)):
            if merged and merged[-1][1] == first:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((first, end))
        self._ranges = merged
