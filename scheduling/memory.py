"""KV blocks as integers: which are free, and which an inference has.

The scheduler's pool is a `PrefixCache`, whose blocks may belong to several inferences.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence

from scheduling.inference import Inference


class BlockPool:
    """Free blocks as sorted ranges: a request gets consecutive ones, which are read faster."""

    def __init__(self, n_blocks: int, block_size: int):
        self.n_blocks = n_blocks
        self.free_blocks = n_blocks
        self.block_size = block_size
        self._ranges = [(0, n_blocks)]  # (first, end), disjoint, sorted, never touching

    def reserve(self, inference: Inference, tokens: int) -> None:
        """Extend an inference's blocks for so many tokens; in place, since its row has the list."""
        missing = -(-tokens // self.block_size) - len(inference.blocks)
        inference.blocks += self.allocate(max(0, missing))

    def release(self, inference: Inference) -> None:
        """Free all blocks of an inference; a row that is being computed keeps its list."""
        self.free(inference.blocks)
        inference.blocks = []

    def allocate(self, n: int) -> list[int]:
        """Return n blocks, consecutive if possible. Raises ValueError if there are too few."""
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

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back."""
        self.free_blocks += len(blocks)
        self._insert(blocks)

    def _insert(self, blocks: Iterable[int]) -> None:
        """Add blocks to the free ranges, merging neighbours."""
        ranges, runs = self._ranges, list[list[int]]()
        for block in sorted(blocks):
            if runs and runs[-1][1] == block:
                runs[-1][1] += 1
            else:
                runs.append([block, block + 1])
        for first, end in runs:
            i = bisect(ranges, (first,))
            if i < len(ranges) and ranges[i][0] == end:
                _, end = ranges.pop(i)
            if i and ranges[i - 1][1] == first:
                i -= 1
                first, _ = ranges.pop(i)
            ranges.insert(i, (first, end))
