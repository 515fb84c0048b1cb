"""The last values of a run, in memory that does not grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class Ring:
    """The last `size` values, in memory that is taken at the start and never grows."""

    def __init__(self, size: int, kind: np.dtype):
        self._values = np.full(size, np.zeros((), kind))
        self.seen = 0  # values since it was empty, kept or not

    def clear(self) -> None:
        self.seen = 0

    @property
    def lost(self) -> int:
        """The number of values seen that are no longer kept."""
        return max(0, self.seen - len(self._values))

    def append(self, value: Any) -> None:
        self._values[self.seen % len(self._values)] = value
        self.seen += 1

    def extend(self, values: Sequence[Any] | np.ndarray) -> None:
        size = len(self._values)
        self.seen += max(0, len(values) - size)
        values = values[-size:]
        at = self.seen % size
        before_the_end = values[: size - at]
        self._values[at : at + len(before_the_end)] = before_the_end
        if (rest := len(values) - len(before_the_end)) > 0:
            self._values[:rest] = values[-rest:]
        self.seen += len(values)

    def between(self, first: int, end: int) -> np.ndarray:
        """A copy of the values from number `first` to before `end`, as far as they are kept."""
        first, end = max(first, self.lost), min(end, self.seen)
        if first >= end:
            return self._values[:0].copy()
        first, end = first % len(self._values), (end - 1) % len(self._values) + 1
        if first < end:
            return self._values[first:end].copy()
        return np.concatenate([self._values[first:], self._values[:end]])
