"""Several runs compared: intervals over seeds, paired differences, and equal texts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix

import numpy as np

from client.results import Json, Result

CONFIDENCE = 0.95
# the part of a rate's requests that must meet the limits, as in DistServe (OSDI 2024)
ATTAINMENT = 0.9


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, and half the width of its 95% t interval, widened by a lattice's step.

    half: None for a single value, which has no interval.
    """

    mean: float
    half: float | None

    @property
    def shown(self) -> bool:
        """True if the interval leaves out zero, so that a difference is more than chance."""
        return self.half is not None and abs(self.mean) > self.half

    def times(self, factor: float) -> Estimate:
        return Estimate(factor * self.mean, self.half and factor * self.half)


def estimate(values: Sequence[float], step: float = 0.0) -> Estimate:
    """Student's interval of the mean of independent values, one a seed.

    step: the lattice's on which values lie: the part by which each may be too low. The interval
    of equal values is no narrower.
    """
    return _interval(values, step * float(np.mean(values)))


def difference(
    first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray, step: float = 0.0
) -> Estimate:
    """second - first, paired: both ran each seed's trace, so what a trace does to both cancels.

    step: as in `estimate`.
    """
    pairs = np.array(list(zip(first, second, strict=True)))
    return _interval(np.diff(pairs)[:, 0], step * float(pairs.mean(axis=0).max()))


def half_width(deviation: float, n: int, confidence: float = CONFIDENCE) -> float:
    """Half of Student's interval of the mean of n values with this standard deviation; n >= 2."""
    from scipy.special import stdtrit  # takes 0.2 s to load

    return float(stdtrit(n - 1, (1 + confidence) / 2)) * deviation / n**0.5


def _interval(values: Sequence[float] | np.ndarray, width: float) -> Estimate:
    n, mean = len(values), float(np.mean(values))
    if n < 2:
        return Estimate(mean, None)
    return Estimate(mean, half_width(float(np.std(values, ddof=1)), n) + width)


def identical_outputs(results: Mapping[str, Result]) -> Json:
    """Return how many requests all answered with a text, but for empty ones; how many alike; and of
    each other one `parted_after`: the share of its longest text on which all agree.
    """
    texts = [
        {r["id"]: r["text"] for r in result.requests if "text" in r} for result in results.values()
    ]
    common = set.intersection(*map(set, texts)) if texts else set()
    answers = [each for i in sorted(common) if any(each := [text[i] for text in texts])]
    different = [answer for answer in answers if len(set(answer)) > 1]
    return {
        "requests": len(answers),
        "identical": len(answers) - len(different),
        "parted_after": [
            round(len(commonprefix(answer)) / max(map(len, answer)), 4)  # noqa: RUF071 - no paths
            for answer in different
        ],
    }
