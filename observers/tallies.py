"""What became of each user's requests, and of those at each priority.

Bounded, however many users there are: the first MOST_NAMES have a tally of their own, and all who
come later share one. Knows no lock: who keeps tallies has one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from observers.ring import Ring
from scheduling.inference import Inference
from stats import Times, times_of

MOST_NAMES = 32
# who calls himself so is one of them
OTHERS = "(others)"
# as the states of an inference, and of one that never became any
ENDINGS = ("finished", "failed", "cancelled", "expired", "refused")
TIMES = np.dtype([("e2el", float), ("queue_time", float)])


@dataclass(slots=True)
class Tally:
    """What became of the requests under one name. All but `endings` is of those answered."""

    endings: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    e2e_s: float = 0.0
    queue_s: float = 0.0
    latest: Ring | None = None  # the last TIMES

    def ended(self, inference: Inference, times: Times | None) -> None:
        """times: of one that was answered."""
        self.endings[inference.state.value] += 1
        if times is None:
            return
        if inference.leader is None:  # a prompt counts once
            self.prompt_tokens += len(inference.prompt_ids)
        self.completion_tokens += len(inference.tokens)
        self.e2e_s += times.e2e_s
        self.queue_s += times.queue_s
        if self.latest is not None:
            self.latest.append((times.e2e_s, times.queue_s))

    def plus(self, other: Tally) -> Tally:
        """Both together, but for their times."""
        a, b = self, other
        return Tally(
            Counter(a.endings) + Counter(b.endings),
            a.prompt_tokens + b.prompt_tokens,
            a.completion_tokens + b.completion_tokens,
            a.e2e_s + b.e2e_s,
            a.queue_s + b.queue_s,
        )


class Names:
    """A tally for each name, with the TIMES of its last `latest` answers."""

    def __init__(self, latest: int):
        self._latest = latest
        self._left = MOST_NAMES
        self._tallies: dict[str, Tally] = {}

    def __getitem__(self, name: str) -> Tally:
        """Where this name is counted."""
        if (tally := self._tallies.get(name)) is None:
            if name not in ("", OTHERS):
                if not self._left:
                    return self[OTHERS]
                self._left -= 1
            ring = Ring(self._latest, TIMES) if self._latest else None
            tally = self._tallies[name] = Tally(latest=ring)
        return tally

    def tallies(self) -> dict[str, Tally]:
        """A copy of each, but for its times."""
        return {
            name: replace(tally, endings=Counter(tally.endings), latest=None)
            for name, tally in self._tallies.items()
        }

    def kept(self) -> dict[str, tuple[Tally, np.ndarray]]:
        """A copy of each, and of the TIMES that are kept of it."""
        rings = {name: tally.latest for name, tally in self._tallies.items()}
        times = {name: ring.between(0, ring.seen) for name, ring in rings.items() if ring}
        return {name: (tally, times[name]) for name, tally in self.tallies().items()}


class Tallies:
    """By user (without one: "") and by priority (as the scheduler knows it; 0 where none was said
    and levels have no meaning).
    """

    def __init__(self, latest: int = 0):
        self.users, self.priorities = Names(latest), Names(latest)

    def ended(self, inference: Inference) -> None:
        times = times_of(inference) if inference.error is None else None
        for tally in self._of(inference):
            tally.ended(inference, times)

    def refused(self, inference: Inference) -> None:
        """Count a request that was turned away, of which this is the first inference."""
        for tally in self._of(inference):
            tally.endings["refused"] += 1

    def _of(self, inference: Inference) -> tuple[Tally, Tally]:
        return self.users[inference.user or ""], self.priorities[str(inference.priority)]
