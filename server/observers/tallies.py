"""Counts of each user's requests, of those at each priority, and of each adapter's.

Bounded, however many users there are: the first MOST_NAMES have a tally of their own, and all later
ones share one. Callers hold a lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from scheduling.inference import Inference
from stats import MEASURES, Times

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

    counts: Counter[str] = field(default_factory=Counter)
    seconds: Any = field(default_factory=Counter)
    latest: np.ndarray = field(default_factory=lambda: np.empty(0, TIMES))

    def ended(self, inference: Inference, values: Sequence[float] | None) -> None:
        """Count an inference that ended; values: of KEPT, of one that was answered."""
        self.counts[inference.state.value] += 1
        if values is None:
            return
        if inference.leader is None:  # a prompt counts once
            self.counts["prompt_tokens"] += len(inference.prompt_ids)
        self.counts["completion_tokens"] += len(inference.tokens)
        for name, value in zip(KEPT, values):
            self.seconds[name] += value

    @classmethod
    def of_all(cls, tallies: Sequence[Tally]) -> Tally:
        """Return the sum of tallies."""
        counts, seconds, latest = zip(
            *((each.counts, each.seconds, each.latest) for each in tallies)
        )
        return cls(sum(counts, Counter()), sum(seconds, Counter()), np.concatenate(latest))


class Names:
    """A tally for each name, with the TIMES of its last `latest` answers."""

    def __init__(self, latest: int):
        self._latest = latest
        self._tallies: dict[str, tuple[Tally, Ring]] = {}

    def __getitem__(self, name: str) -> tuple[Tally, Ring]:
        if name not in self._tallies:
            if name not in ("", OTHERS) and len(self._tallies.keys() - {"", OTHERS}) == MOST_NAMES:
                return self[OTHERS]
            self._tallies[name] = Tally(), Ring(self._latest, TIMES)
        return self._tallies[name]

    def tallies(self) -> dict[str, Tally]:
        """A copy of each."""
        return {
            name: Tally(tally.counts.copy(), tally.seconds.copy(), ring.kept())
            for name, (tally, ring) in self._tallies.items()
        }


class Tallies(NamedTuple):
    """Tallies by user (none: ""), priority (0 where it has no meaning) and adapter, if any."""

    users: Names
    priorities: Names
    adapters: Names

    @classmethod
    def keeping(cls, latest: int = 0) -> Tallies:
        """latest: answers of which TIMES are kept."""
        return cls(Names(latest), Names(latest), Names(latest))

    def ended(self, inference: Inference, times: Times | None) -> None:
        """Count an inference that ended; times: of one that was answered."""
        values = None if times is None else tuple([measure.of(times) for measure in KEPT.values()])
        for tally, ring in self._of(inference):
            tally.ended(inference, values)
            if values is not None:
                ring.append(values)

    def refused(self, inference: Inference) -> None:
        """Count a refused request, of which this is the first inference."""
        for tally, _ in self._of(inference):
            tally.counts["refused"] += 1

    def _of(self, inference: Inference) -> Iterator[tuple[Tally, Ring]]:
        yield self.users[inference.user or ""]
        yield self.priorities[str(inference.priority)]
        if inference.adapter:
            yield self.adapters[inference.adapter]
