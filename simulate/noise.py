"""Noise of a server's times: how far they lie from what its costs say, and from run to run.

The logarithm of an iteration's time over its cost is a sum: the run's level; a drift, which is an
Ornstein-Uhlenbeck process in virtual time (an AR(1) from iteration to iteration); and the
iteration's own noise, an AR(1) as well. Stalls, at random instants of computing, come on top.
`benchmarks.fitting` finds the parameters.
"""

from __future__ import annotations

import math
import random
from dataclasses import astuple, dataclass

from simulate.time import PS


@dataclass(frozen=True, slots=True)
class Noise:
    """Standard deviations of logarithms, if nothing else is said. Raises ValueError."""

    bias: float = 0.0  # mean of the levels of runs, which may be below 0
    level: float = 0.0  # of these levels
    drift: float = 0.0  # within a run
    drift_s: float = 1.0  # seconds in which the drift's autocorrelation falls to 1/e
    iteration: float = 0.0  # of single iterations
    correlation: float = 0.0  # of the noise of an iteration and the next
    stalls: float = 0.0  # in a second of computing
    stall_s: float = 0.0  # mean seconds of a stall
    http: float = 0.0  # of the times between client and server, from run to run

    def __post_init__(self) -> None:
        _, *deviations = values = astuple(self)
        finite = all(isinstance(value, int | float) and math.isfinite(value) for value in values)
        if not finite or min(deviations) < 0 or not self.drift_s or self.correlation >= 1:
            raise ValueError(f"{self} is no noise")


class NoisyRun:
    """The noise of one replica in one run, drawn from a seed. Times are picoseconds.

    The mean factor of an iteration's own noise is 1, as in the fit of costs.
    """

    def __init__(self, noise: Noise, *seed: int):
        self._noise, self._random = noise, random.Random(repr(seed))
        draw = self._random.gauss
        self._level = draw(noise.bias, noise.level) - noise.iteration**2 / 2
        self._drift = draw(0.0, noise.drift)
        self._own = draw(0.0, noise.iteration)
        self._drawn_at = 0
        self._factor = 1.0

    def iteration(self, now: int, time: int) -> int:
        """Return what an iteration takes that begins now, and costs so long."""
        noise, draw = self._noise, self._random.gauss
        kept = math.exp((self._drawn_at - now) / PS / noise.drift_s)
        self._drift = kept * self._drift + math.sqrt(1 - kept**2) * draw(0.0, noise.drift)
        kept = noise.correlation
        self._own = kept * self._own + math.sqrt(1 - kept**2) * draw(0.0, noise.iteration)
        self._drawn_at = now
        self._factor = math.exp(self._level + self._drift + self._own)
        stall_s = 0.0
        if self._random.random() < noise.stalls * time / PS:
            stall_s = self._random.expovariate(1 / noise.stall_s)
        return round(time * self._factor + stall_s * PS)

    def gap(self, time: int) -> int:
        """Return what a gap takes that follows the last iteration, and costs so long."""
        return round(time * self._factor)


def http_factor(noise: Noise, *seed: int) -> float:
    """Return the factor of a run's times between client and server, drawn from a seed."""
    return math.exp(random.Random(f"http {seed}").gauss(0.0, noise.http))
