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
from server.observers.ring import Ring
from stats import MEASURES, Times

MOST_NAMES = 32
# a user of this name is one of them
OTHERS = "(others)"
# as the states of an inference, and of one that never became any
ENDINGS = ("finished", "failed", "cancelled", "expired", "refused")
# measures that are summed up, and kept of the latest answers
KEPT = {name: MEASURES[name] for name in ("e2el", "queue_time")}
TIMES = np.dtype([(name, float) for name in KEPT])


@dataclass(slots=True)
class Tally:
    """Counts of the requests under one name: those that ended, by ENDINGS; tokens of the answered,
    and the sums of their KEPT measures, in `seconds`.
    """

    counts: Counter[str] = field(default_factory=Counter)
    seconds: Any = field(default_factory=Counter)
    latest: Ring | None = None  # TIMES of the last answers

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
        if self.latest is not None:
            self.latest.append(values)

    def __add__(self, other: Tally) -> Tally:
        """Return the sum of both, without their latest answers."""
        return Tally(self.counts + other.counts, self.seconds + other.seconds)


class Names:
    """A tally for each name, with the TIMES of its last `latest` answers."""

    def __init__(self, latest: int):
        self._latest = latest
        self._free = MOST_NAMES
        self._tallies: dict[str, Tally] = {}

    def __getitem__(self, name: str) -> Tally:
        if (tally := self._tallies.get(name)) is None:
            if name not in ("", OTHERS):
                if not self._free:
                    return self[OTHERS]
                self._free -= 1
            ring = Ring(self._latest, TIMES) if self._latest else None
            tally = self._tallies[name] = Tally(latest=ring)
        return tally

    def tallies(self) -> dict[str, Tally]:
        """A copy of each, but for its times."""
        return {
            name: Tally(Counter(tally.counts), Counter(tally.seconds))
            for name, tally in self._tallies.items()
        }

    def kept(self) -> dict[str, tuple[Tally, np.ndarray]]:
        """A copy of each, and of the TIMES that are kept of it."""
        rings = {name: tally.latest for name, tally in self._tallies.items()}
        times = {name: ring.between(0, ring.seen) for name, ring in rings.items() if ring}
        return {name: (tally, times[name]) for name, tally in self.tallies().items()}


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
        for tally in self._of(inference):
            tally.ended(inference, values)

    def refused(self, inference: Inference) -> None:
        """Count a refused request, of which this is the first inference."""
        for tally in self._of(inference):
            tally.counts["refused"] += 1

    def _of(self, inference: Inference) -> Iterator[Tally]:
        yield self.users[inference.user or ""]
        yield self.priorities[str(inference.priority)]
        if inference.adapter:
            yield self.adapters[inference.adapter]
