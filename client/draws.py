"""What is drawn of a workload: lengths and arrivals, by name. `LENGTHS` and `ARRIVALS` name what
can be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

LENGTHS = (
    "normal, choice[:1,25,100], uniform:LOW:HIGH, fixed:N, exponential:MEAN:CAP, "
    "lognormal:MEDIAN:SIGMA:CAP"
)
ARRIVALS = "wait:SECONDS, poisson:RATE, gamma:RATE:CV, constant:RATE, burst, closed:USERS"


class WorkloadError(ValueError):
    """A workload or trace that cannot be used; the message says what can."""


def lengths(spec: str) -> Callable[[np.random.Generator, int], np.ndarray]:
    """What draws n completion lengths. Raises WorkloadError for a distribution that it does not
    know.
    """
    name, *arguments = spec.split(":")
    try:
        match name, arguments:
            case "normal", []:
                return lambda rng, n: folded_normal(rng, n, mean=100, std=100, most=200)
            case "choice", [] | [_]:
                values = whole_numbers(arguments[0].split(",")) if arguments else [1, 25, 100]
                return lambda rng, n: rng.choice(values, n)
            case "uniform", [_, _]:
                low, high = whole_numbers(arguments)
                if low <= high:
                    return lambda rng, n: rng.integers(low, high + 1, n)
            case "fixed", [_]:
                [length] = whole_numbers(arguments)
                return lambda rng, n: np.full(n, length)
            case "exponential", [_, _]:
                mean, [cap] = number(arguments[0]), whole_numbers(arguments[1:])
                return lambda rng, n: _whole(rng.exponential(mean, n), cap)
            case "lognormal", [_, _, _]:
                median, sigma, [cap] = (
                    number(arguments[0]),
                    number(arguments[1]),
                    whole_numbers(arguments[2:]),
                )
                return lambda rng, n: _whole(rng.lognormal(np.log(median), sigma, n), cap)
    except ValueError:
        pass
    raise WorkloadError(f"unknown lengths {spec!r}; valid ones are {LENGTHS}")


def folded_normal(
    rng: np.random.Generator, n: int, mean: float, std: float, most: int
) -> np.ndarray:
    """n draws of clip(|⌈N(mean, std)⌉|, 1, most)."""
    return np.clip(np.abs(np.ceil(rng.normal(mean, std, n))), 1, most).astype(int)


def whole_numbers(texts: Sequence[str]) -> list[int]:
    """Each text's number. Raises ValueError for one that is not whole, or below 1."""
    values = [int(text) for text in texts]
    if min(values) < 1:
        raise ValueError
    return values


def number(text: str) -> float:
    """The text's number. Raises ValueError for one that is not above 0 and finite."""
    if not 0 < (value := float(text)) < float("inf"):
        raise ValueError
    return value


def _whole(drawn: np.ndarray, cap: int) -> np.ndarray:
    return np.clip(np.ceil(drawn), 1, cap).astype(int)


class Arrivals(NamedTuple):
    """When requests are sent, in seconds, the first at 0; in a closed loop, how many users send
    them instead.
    """

    at: np.ndarray
    users: int | None = None


def arrivals(spec: str, n: int, seed: int, scaled: bool = False) -> Arrivals:
    """Return the arrivals of n requests. Raises WorkloadError for a process that it does not know.

    `wait:S`: gaps uniform in 0 … S seconds, as the original's client; `poisson:R`: R a second on
    average; `gamma:R:CV`: the same with gaps of this coefficient of variation, bursty above 1;
    `constant:R`: equal gaps; `burst`: all at 0; `closed:N`: N users, each of whom sends the next
    request when its last is answered. Drawn apart from the lengths, so that the same requests can
    arrive in another way, and at another rate in the same pattern. scaled: the gaps of this draw
    are stretched to their mean, so that the rate is R exactly.
    """
    rng = np.random.default_rng([seed, 1])
    name, *arguments = spec.split(":")
    users, mean = None, 0.0
    try:
        match name, arguments:
            case "wait", [most] if 0 <= float(most) < float("inf"):
                gaps, mean = rng.uniform(0, float(most), n), float(most) / 2
            case "poisson", [rate]:
                gaps, mean = rng.exponential(1, n) / number(rate), 1 / number(rate)
            case "gamma", [rate, cv]:
                shape = number(cv) ** -2
                gaps, mean = rng.gamma(shape, 1 / shape, n) / number(rate), 1 / number(rate)
            case "constant", [rate]:
                gaps, mean = np.full(n, 1 / number(rate)), 1 / number(rate)
            case "burst", []:
                gaps = np.zeros(n)
            case "closed", [_]:
                gaps, [users] = np.zeros(n), whole_numbers(arguments)
            case _:
                raise ValueError
    except ValueError:
        raise WorkloadError(f"unknown arrival {spec!r}; valid ones are {ARRIVALS}") from None
    gaps[:1] = 0
    if scaled and gaps.any():
        gaps *= mean * (n - 1) / gaps.sum()
    return Arrivals(in_microseconds(np.cumsum(gaps)), users)


def in_microseconds(seconds: np.ndarray) -> np.ndarray:
    """Rounded to whole ones, as numbers that are written so."""
    return np.array([round(each, 6) for each in seconds.tolist()], float)


def at_rate(arrival: str, rate: float) -> str:
    """The arrival process at another rate: `gamma:3:2` and 5 give `gamma:5:2`; what has no rate
    becomes Poisson.
    """
    name, *arguments = arrival.split(":")
    if name in ("gamma", "constant"):
        return ":".join([name, f"{rate:g}", *arguments[1:]])
    return f"poisson:{rate:g}"


class Sessions(NamedTuple):
    """Conversations of `turns` requests: after each answer its user thinks, for an exponentially
    distributed time of mean `think_s` seconds, before sending the next.
    """

    turns: int
    think_s: float

    @classmethod
    def parse(cls, spec: str) -> Sessions:
        """Sessions(3, 0.5) from "3:0.5". Raises WorkloadError."""
        try:
            text, think_s = spec.split(":")
            [turns] = whole_numbers([text])
            if not 0 <= float(think_s) < float("inf"):
                raise ValueError
            return cls(turns, float(think_s))
        except ValueError:
            raise WorkloadError(
                f"unknown sessions {spec!r}; give TURNS:THINK_S, such as 3:0.5: three requests "
                f"each, half a second of thinking on average between an answer and the next"
            ) from None

    def think(self, n: int, seed: int) -> np.ndarray:
        """n times of thinking, in seconds; the same for the same seed."""
        return np.random.default_rng([seed, 6]).exponential(self.think_s, n).round(6)
