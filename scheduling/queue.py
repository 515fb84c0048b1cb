"""Waiting requests: by arrival, by the key of their order, by user; and timers."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from sortedcontainers import SortedDict

from scheduling.inference import Inference, State

SPARE = 64  # obsolete entries that may be kept, besides as many as are valid

T = TypeVar("T")


class Timers(Generic[T]):
    """Entries by time. `is_obsolete`: returns whether an entry is no longer needed."""

    def __init__(self, is_obsolete: Callable[[T], bool]):
        self._is_obsolete = is_obsolete
        self._heap: list[tuple[float, int, T]] = []
        self._added = 0
        self._most = SPARE

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, entry: T) -> None:
        heapq.heappush(self._heap, (at, self._added, entry))
        self._added += 1
        if len(self._heap) > self._most:
            self._heap = [item for item in self._heap if not self._is_obsolete(item[2])]
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + SPARE

    def due(self, now: float) -> Iterator[T]:
        """Remove and return the entries whose time has come, the earliest first."""
        while (at := self.next) is not None and at <= now:
            yield heapq.heappop(self._heap)[2]

    @property
    def next(self) -> float | None:
        """Time of the next valid entry."""
        while self._heap and self._is_obsolete(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


class Queue:
    """Waiting inferences, all or those of one bin. Keys are unique, and do not change meanwhile."""

    def __init__(self) -> None:
        self.by_arrival: SortedDict[int, Inference] = SortedDict()
        self.by_key: SortedDict[tuple[Any, ...], Inference] = SortedDict()
        self.by_user: dict[str | None, SortedDict[int, Inference]] = {}

    def __len__(self) -> int:
        return len(self.by_arrival)

    def add(self, inference: Inference, by_user: bool) -> None:
        """Add an inference. by_user: also among those of its user, which costs memory a user."""
        self.by_key[inference.standing.key] = inference  # first: keys may not compare
        self.by_arrival[inference.id] = inference
        if by_user:
            self.by_user.setdefault(inference.user, SortedDict())[inference.id] = inference

    def remove(self, inference: Inference) -> None:
        del self.by_arrival[inference.id], self.by_key[inference.standing.key]
        if inference.user in self.by_user:
            of_user = self.by_user[inference.user]
            del of_user[inference.id]
            if not of_user:
                del self.by_user[inference.user]

    @property
    def oldest(self) -> list[Inference]:
        """Waiting members of the request that came first; none if none waits."""
        members: list[Inference] = []
        for inference in self.by_arrival.values():
            if members and inference.group != members[0].group:
                break
            members.append(inference)
        return members


class WaitingQueue:
    """All WAITING inferences: one queue, or one for each bin.

    key: returns the place of an inference. by_user: queues are asked for the requests of a user.
    """

    def __init__(self, key: Callable[[Inference], tuple[Any, ...]], n_bins: int, by_user: bool):
        self.by_id: dict[int, Inference] = {}
        self.queues = [Queue() for _ in range(n_bins)]
        self._key, self._by_user = key, by_user

    def put(self, inference: Inference) -> None:
        """Put an inference at the place that its key gives it now; if that raises, nowhere."""
        inference.state = State.WAITING
        inference.standing.key = self._key(inference)
        self.queues[inference.standing.bin].add(inference, self._by_user)
        self.by_id[inference.id] = inference

    def take(self, inference: Inference) -> None:
        """Take an inference from its place."""
        del self.by_id[inference.id]
        self.queues[inference.standing.bin].remove(inference)
