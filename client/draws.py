"""Random parts of a workload, by name: lengths, arrivals, token ids, shared prefixes and pauses.

`LENGTHS` and `ARRIVALS` list the names. Each part is drawn from the seed apart from the others, so
that one may change and the others stay.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

LENGTHS = (
    "normal, choice[:1,25,100], uniform:LOW:HIGH, fixed:N, exponential:MEAN:CAP, "
    "lognormal:MEDIAN:SIGMA:CAP"
)
ARRIVALS = "wait:SECONDS, poisson:RATE, gamma:RATE:CV, constant:RATE, burst, closed:USERS"
# ids of tokens that are drawn, from 0: every tokenizer here has so many, so that all servers
# compute the same prompts (GPT-2's first ids are the bytes too, in another order)
IDS = 256
DRAWN = 2**20  # ids at once; whatever the number, ids are the same
COUNTING = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
TENS = "twenty thirty forty fifty sixty"
# how often an adapter is named, against the next one (Punica: Chen et al., MLSys 2024, section 7)
POPULARITIES = {"distinct": 1.0, "uniform": 1.0, "skewed": 1.5, "identical": math.inf}
MOST = 10**9  # tokens, users and other counts, and seconds
Lengths = Callable[[np.random.Generator, int], np.ndarray]


class WorkloadError(ValueError):
    """A workload or trace that cannot be used; the message names what can."""


def lengths(spec: str) -> Lengths:
    """Return a function that draws n completion lengths. Raises WorkloadError."""
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
            case "exponential", [first, _]:
                mean, [cap] = number(first), whole_numbers(arguments[1:])
                return lambda rng, n: _rounded_up(rng.exponential(mean, n), cap)
            case "lognormal", [first, second, _]:
                median, sigma, [cap] = number(first), number(second), whole_numbers(arguments[2:])
                return lambda rng, n: _rounded_up(rng.lognormal(np.log(median), sigma, n), cap)
    except ValueError:
        pass
    raise WorkloadError(f"unknown lengths {spec!r}; valid ones are {LENGTHS}")


def folded_normal(
    rng: np.random.Generator, n: int, mean: float, std: float, most: int
) -> np.ndarray:
    """Return n draws of clip(|⌈N(mean, std)⌉|, 1, most)."""
    return np.clip(np.abs(np.ceil(rng.normal(mean, std, n))), 1, most).astype(int)


def _rounded_up(drawn: np.ndarray, cap: int) -> np.ndarray:
    return np.clip(np.ceil(drawn), 1, cap).astype(int)


def whole_numbers(texts: Sequence[str]) -> list[int]:
    """Return the numbers of texts, from 1 to MOST. Raises ValueError for others."""
    values = [int(text) for text in texts]
    if not 1 <= min(values) <= max(values) <= MOST:
        raise ValueError
    return values


def number(text: str, or_zero: bool = False) -> float:
    """Return a text's number. Raises ValueError unless it is above 0 (or 0) and finite."""
    value = float(text)
    if not (0 < value < math.inf or (or_zero and value == 0)):
        raise ValueError
    return value


def adapters(spec: str) -> Callable[[int, int], list[str]]:
    """Return a function (n, seed) → adapters of n requests, such as lora-0 … lora-15 for
    "16:skewed". `distinct` takes one after the other. Raises WorkloadError.
    """
    number, _, popularity = spec.partition(":")
    if not (number.isdecimal() and int(number) and popularity in POPULARITIES):
        names = ", ".join(POPULARITIES)
        raise WorkloadError(f"unknown adapters {spec!r}; give N:DISTRIBUTION of {names}")
    weights = POPULARITIES[popularity] ** -np.arange(int(number), dtype=float)

    def draw(n: int, seed: int) -> list[str]:
        drawn = np.arange(n) % len(weights)
        if popularity != "distinct":
            rng = np.random.default_rng([seed, 12])
            drawn = rng.choice(len(weights), n, p=weights / weights.sum())
        return [f"lora-{i}" for i in drawn]

    return draw


class Arrivals(NamedTuple):
    """Instants of sending in seconds, the first at 0; in a closed loop, the number of users."""

    at: np.ndarray
    users: int | None = None


def arrivals(spec: str, n: int, seed: int, scaled: bool = False) -> Arrivals:
    """Return the arrivals of n requests. Raises WorkloadError for an unknown process.

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
            case "wait", [most]:
                longest = number(most, or_zero=True)
                gaps, mean = rng.uniform(0, longest, n), longest / 2
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
    except (ValueError, ArithmeticError):
        raise WorkloadError(f"unknown arrival {spec!r}; valid ones are {ARRIVALS}") from None
    gaps[:1] = 0
    if scaled and gaps.any():
        gaps *= mean * (n - 1) / gaps.sum()
    return Arrivals(in_microseconds(np.cumsum(gaps)), users)


def in_microseconds(seconds: np.ndarray) -> np.ndarray:
    """Return seconds rounded to microseconds, as Python rounds. Raises as `up_to_most` does."""
    return np.array([round(each, 6) for each in up_to_most(seconds).tolist()], float)


def up_to_most(seconds: np.ndarray) -> np.ndarray:
    """Return these seconds. Raises WorkloadError if one is beyond MOST."""
    if not seconds.max(initial=0) <= MOST:
        raise WorkloadError(
            f"a request would be sent after {MOST:g} s; give a higher rate, a shorter time of "
            f"thinking or fewer requests"
        )
    return seconds


def at_rate(arrival: str, rate: float) -> str:
    """Return an arrival process at another rate: `gamma:5:2` for `gamma:3:2` and 5; or Poisson."""
    name, *arguments = arrival.split(":")
    if name in ("gamma", "constant"):
        return ":".join([name, f"{rate:g}", *arguments[1:]])
    return f"poisson:{rate:g}"


@functools.cache
def count(words: int) -> str:
    """Return the first counting words: "one two three"."""
    return " ".join(_in_words(i) for i in range(1, words + 1))


def _in_words(i: int) -> str:
    below_20 = COUNTING.split()
    if i < 20:
        return below_20[i - 1]
    return TENS.split()[i // 10 - 2] + (f"-{below_20[i % 10 - 1]}" if i % 10 else "")


def words(ids: Sequence[int]) -> str:
    """Return a word for each token id, the same for the same id: prompts that begin alike still do.
    Most tokenizers have one token for each.
    """
    return " ".join(_in_words(1 + i % 19) for i in ids)


class TokenIds(Sequence[list[int]]):
    """A list of random ids for each length, made at each access; an id takes one byte."""

    def __init__(self, rng: np.random.Generator, lengths: Sequence[int] | np.ndarray):
        self._ends = np.cumsum(lengths)
        self._ids = np.empty(self._ends[-1], np.uint8)
        for begin in range(0, len(self._ids), DRAWN):  # each draw takes eight bytes per id
            part = self._ids[begin : begin + DRAWN]
            part[:] = rng.integers(0, IDS, len(part))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, i: Any) -> Any:
        n = range(len(self))[i]
        return self._ids[self._ends[n - 1] if n else 0 : self._ends[n]].tolist()


class BlockIds(Sequence[int]):
    """Ids of a prompt and its answer, made at each access: equal where recorded hashes are, and
    else of this request alone.

    Tokens of a block have one id, and its first token has that of the block before: so the tokens
    that are computed while a block is filled, which are those after them, are equal.
    """

    def __init__(self, blocks: Sequence[int], block_size: int, n: int, own: int):
        self._blocks, self._size, self._n, self._own = blocks, block_size, n, own

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self.at(position) for position in range(self._n)[i]]
        return self.at(range(self._n)[i])

    def at(self, position: int) -> int:
        """Return the id at a position, also one of the answer."""
        block = max(0, position - 1) // self._size
        return self._blocks[block] if block < len(self._blocks) else self._own


class Prefixes(NamedTuple):
    """Prefixes that prompts share: `kinds` of them, `tokens` ids each. A prompt begins with the
    r-th of them with a probability in proportion to r^-zipf (Zipf's law; 0: all alike).
    """

    kinds: int
    tokens: int
    zipf: float

    @classmethod
    def parse(cls, spec: str) -> Prefixes:
        """Return Prefixes(4, 64, 1.0) for "4:64:1". Raises WorkloadError."""
        try:
            *whole, zipf = spec.split(":")
            kinds, tokens = whole_numbers(whole)
            return cls(kinds, tokens, number(zipf, or_zero=True))
        except ValueError:
            raise WorkloadError(
                f"unknown prefixes {spec!r}; give K:TOKENS:ZIPF, such as 4:64:1: four prefixes of "
                f"64 tokens, the r-th in proportion to 1/r (ZIPF 0: all alike)"
            ) from None

    def draw(self, n: int, seed: int) -> list[list[int]]:
        """Return the prefix of each of n prompts."""
        prefixes = [*TokenIds(np.random.default_rng([seed, 4]), [self.tokens] * self.kinds)]
        weights = np.arange(1, self.kinds + 1) ** -self.zipf
        ranks = np.random.default_rng([seed, 5]).choice(self.kinds, n, p=weights / weights.sum())
        return [prefixes[rank] for rank in ranks.tolist()]


class Sessions(NamedTuple):
    """Conversations of `turns` requests; users think `think_s` s on average, exponentially."""

    turns: int
    think_s: float

    @classmethod
    def parse(cls, spec: str) -> Sessions:
        """Return Sessions(3, 0.5) for "3:0.5". Raises WorkloadError."""
        try:
            text, think_s = spec.split(":")
            [turns] = whole_numbers([text])
            return cls(turns, number(think_s, or_zero=True))
        except ValueError:
            raise WorkloadError(
                f"unknown sessions {spec!r}; give TURNS:THINK_S, such as 3:0.5: three requests "
                f"each, half a second of thinking on average between an answer and the next"
            ) from None

    def think(self, n: int, seed: int) -> np.ndarray:
        """Return n times of thinking, in seconds."""
        drawn = np.random.default_rng([seed, 6]).exponential(self.think_s, n).round(6)
        return up_to_most(drawn)
