"""What falls due when. Knows no clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

SPARE = 64  # entries without a meaning that may be kept beside as many as had one

T = TypeVar("T")


class Timers(Generic[T]):
    """Entries by their time. `is_over`: an entry has lost its meaning, and need not be kept."""

    def __init__(self, is_over: Callable[[T], bool]):
        self._is_over = is_over
        self._heap: list[tuple[float, int, T]] = []
        self._added = 0
        self._most = SPARE

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, entry: T) -> None:
        heapq.heappush(self._heap, (at, self._added, entry))
        self._added += 1
        if len(self._heap) > self._most:
            self._heap = [each for each in self._heap if not self._is_over(each[2])]
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + SPARE

    def due(self, now: float) -> Iterator[T]:
        """Take those whose time has come, in its order."""
        while (at := self.next) is not None and at <= now:
            yield heapq.heappop(self._heap)[2]

    @property
    def next(self) -> float | None:
        """When the next one falls due; over ones before it are dropped."""
        while self._heap and self._is_over(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
