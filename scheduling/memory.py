"""KV blocks as integers: which are free, and how many requests have each of the others."""

from __future__ import annotations

from bisect import bisect
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import groupby


class BlockPool:
    """KV blocks by reference count. A full one can be found by the key of what it holds, also when
    nobody refers to it, until it is needed for something else: the one unused for longest first.

    Free blocks that hold nothing are sorted ranges, so that a request gets consecutive ones when
    there are any: memory is read a little faster in order.
    """

    def __init__(self, n_blocks: int):
        self.n_blocks = n_blocks
        self.free_blocks = n_blocks  # those kept, too
        self.shared_blocks = 0  # to which several refer
        self.references = [0] * n_blocks  # of each block
        self._ranges = [(0, n_blocks)]  # (first, end), disjoint, sorted, never touching
        self._found: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}  # the inverse
        self._kept: OrderedDict[int, None] = OrderedDict()  # by when they came free

    def allocate(self, n: int) -> list[int]:
        """Return n blocks: consecutive if any free range is long enough, else from several.

        Raises ValueError if there are too few.
        """
        if n > self.free_blocks:
            raise ValueError(f"{n} blocks wanted, {self.free_blocks} free")
        short = n - (self.free_blocks - len(self._kept))
        if short > 0:
            evicted = [self._kept.popitem(last=False)[0] for _ in range(short)]
            for block in evicted:
                del self._found[self._keys.pop(block)]
            self._give_back(evicted)
        self.free_blocks -= n
        taken = self._take(n)
        for block in taken:
            self.references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Refer to blocks that were found, once more."""
        for block in blocks:
            if not self.references[block]:
                del self._kept[block]
                self.free_blocks -= 1
            self.references[block] += 1
            self.shared_blocks += self.references[block] == 2

    def free(self, blocks: Sequence[int]) -> None:
        """Give a request's blocks back, the last first, so that of those kept a prompt's end goes
        before its beginning.
        """
        blank = []
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block]:
                self.shared_blocks -= self.references[block] == 1
                continue
            self.free_blocks += 1
            if block in self._keys:
                self._kept[block] = None
            else:
                blank.append(block)
        if blank:
            self._give_back(blank)

    @property
    def cached_blocks(self) -> int:
        """Free ones whose content can still be found."""
        return len(self._kept)

    def cache(self, block: int, key: bytes) -> None:
        """A block is full and computed: it can be found, unless another one is already."""
        if key not in self._found:
            self._found[key], self._keys[block] = block, key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of these keys up to the first that there is none of."""
        found = []
        for key in keys:
            if (block := self._found.get(key)) is None:
                break
            found.append(block)
        return found

    def forget_all(self) -> None:
        """Nothing that was computed so far can be found any more."""
        self._found.clear()
        self._keys.clear()
        self._kept.clear()
        self._ranges.clear()  # anew, since merging a whole pool into them takes long
        for used, blocks in groupby(range(self.n_blocks), key=lambda b: self.references[b] > 0):
            if not used:
                first, *others = blocks
                self._ranges.append((first, first + 1 + len(others)))

    def _take(self, n: int) -> list[int]:
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

    def _give_back(self, blocks: Iterable[int]) -> None:
        """To the ranges, merging neighbours."""
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
