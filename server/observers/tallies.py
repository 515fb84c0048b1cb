"""Counts of each user's requests, of those at each priority, and of each adapter's.

Bounded, however many users there are: the first MOST_NAMES have a tally of their own, and all later
ones share one. Callers hold a lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scheduling.inference import Inference
from stats import MEASURES

MOST_NAMES = 32
# a user of this name is one of them
OTHERS = "(others)"
# as the states of an inference, and of one that never became any
ENDINGS = ("finished", "failed", "cancelled", "expired", "refused")
# measures that are summed up, and kept of the latest answers
KEPT = {name: MEASURES[name] for name in ("e2el", "queue_time")}
TIMES = np.dtype([(name, float) for name in KEPT])


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
        if len(self._values):
            self._values[self.seen % len(self._values)] = value
        self.seen += 1

    def extend(self, values: Sequence[Any] | np.ndarray) -> None:
        size, n = len(self._values), len(values)
        kept = min(n, size)
        self.seen += n
        self._values[np.arange(self.seen - kept, self.seen) % size] = values[n - kept :]

    def between(self, first: int, end: int) -> np.ndarray:
        """A copy of the values from number `first` to before `end`, as far as they are kept."""
        numbers = np.arange(max(first, self.lost), min(end, self.seen))
        return self._values[numbers % len(self._values)]

    def kept(self) -> np.ndarray:
        """A copy of all values that are kept."""
        return self.between(0, self.seen)


@dataclass(slots=True)
class Tally:
    """Counts of the requests under one name: those that ended, by ENDINGS; tokens of the answered,
    and the sums of their KEPT measures, in `seconds`; TIMES of the latest of them.
    """

    latest: Ring
    counts: Counter[str] = field(default_factory=Counter)
    seconds: Any = field(default_factory=Counter)

    def ended(self, inference: Inference, values: Sequence[float]) -> None:
        """Count an inference that ended; values: its KEPT measures, if it was answered."""
        self.counts[inference.state.value] += 1
        if not values:
            return
        if inference.leader is None:  # a prompt counts once
            self.counts["prompt_tokens"] += len(inference.prompt_ids)
        self.counts["completion_tokens"] += len(inference.tokens)
        for name, value in zip(KEPT, values):
            self.seconds[name] += value
        self.latest.append(values)


class Names(dict[str, Tally]):
    """A tally for each name, with the TIMES of its last `latest` answers. The first `most` names
    have one of their own.
    """

    def __init__(self, latest: int = 0, most: float = MOST_NAMES):
        self.latest, self._most = latest, most

    def __missing__(self, name: str) -> Tally:
        if name not in ("", OTHERS) and len(self.keys() - {"", OTHERS}) >= self._most:
            return self[OTHERS]
        self[name] = tally = Tally(Ring(self.latest, TIMES))
        return tally

    def add(self, other: Names) -> None:
        for name, tally in other.items():
            mine = self[name]
            mine.counts.update(tally.counts)
            mine.seconds.update(tally.seconds)
            if self.latest:
                mine.latest.extend(tally.latest.kept())


class Tallies(dict[str, Names]):
    """Names of each kind: users (none: ""), priorities (0 where it has no meaning) and adapters."""

    def __init__(self, latest: int = 0, most: float = MOST_NAMES):
        super().__init__(
            {kind: Names(latest, most) for kind in ("users", "priorities", "adapters")}
        )

    def ended(self, inference: Inference, values: Sequence[float]) -> None:
        """Count an inference that ended; values: its KEPT measures, if it was answered."""
        for tally in self._of(inference):
            tally.ended(inference, values)

    def refused(self, inference: Inference) -> None:
        """Count a refused request, of which this is the first inference."""
        for tally in self._of(inference):
            tally.counts["refused"] += 1

    def add(self, other: Tallies) -> None:
        for kind, names in other.items():
            self[kind].add(names)

    def _of(self, inference: Inference) -> Iterator[Tally]:
        yield self["users"][inference.user or ""]
        yield self["priorities"][str(inference.priority)]
        if inference.adapter:
            yield self["adapters"][inference.adapter]
