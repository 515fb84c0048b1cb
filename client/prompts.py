"""What prompts hold: counting words, or random token ids, with prefixes that prompts share.

Ids are below 256, which every tokenizer here has, so that servers with other tokenizers compute the
same prompts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from client.draws import WorkloadError, whole_numbers

PROMPTS = ("text", "ids")
IDS = 256  # that every tokenizer has: GPT-2's first ones are the bytes too, in another order
COUNTING = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty"]


@functools.cache
def count(words: int) -> str:
    """The first `words` counting words: "one two three"."""
    return " ".join(
        COUNTING[i - 1]
        if i < 20
        else TENS[i // 10 - 2] + ("-" + COUNTING[i % 10 - 1] if i % 10 else "")
        for i in range(1, words + 1)
    )


class TokenIds(Sequence[list[int]]):
    """A list of random ids for each length, made when it is asked for; they take a byte each."""

    def __init__(self, rng: np.random.Generator, lengths: Sequence[int] | np.ndarray):
        self._ends = np.cumsum(lengths)
        self._ids = rng.integers(0, IDS, int(self._ends[-1])).astype(np.uint8)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, i: int) -> list[int]: ...
    @overload
    def __getitem__(self, i: slice) -> list[list[int]]: ...
    def __getitem__(self, i: int | slice) -> list[int] | list[list[int]]:
        numbers = range(len(self))[i]
        if not isinstance(numbers, int):
            return [self[n] for n in numbers]
        begin = self._ends[numbers - 1] if numbers else 0
        ids: list[int] = self._ids[begin : self._ends[numbers]].tolist()
        return ids


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Prefixes that prompts share: `kinds` of them, `tokens` ids each. A prompt begins with the
    r-th of them with a probability in proportion to r^-zipf (Zipf's law; 0: all alike).
    """

    kinds: int
    tokens: int
    zipf: float

    @classmethod
    def parse(cls, spec: str) -> Prefixes:
        """Prefixes(4, 64, 1.0) from "4:64:1". Raises WorkloadError."""
        try:
            *whole, zipf = spec.split(":")
            kinds, tokens = whole_numbers(whole)
            if not 0 <= float(zipf) < float("inf"):
                raise ValueError
            return cls(kinds, tokens, float(zipf))
        except ValueError:
            raise WorkloadError(
                f"unknown prefixes {spec!r}; give K:TOKENS:ZIPF, such as 4:64:1: four prefixes of "
                f"64 tokens, the r-th in proportion to 1/r (ZIPF 0: all alike)"
            ) from None

    def draw(self, n: int, seed: int) -> list[list[int]]:
        """The prefix of each of n prompts; the same for the same seed."""
        prefixes = [*TokenIds(np.random.default_rng([seed, 4]), [self.tokens] * self.kinds)]
        weights = np.arange(1, self.kinds + 1) ** -self.zipf
        ranks = np.random.default_rng([seed, 5]).choice(self.kinds, n, p=weights / weights.sum())
        return [prefixes[rank] for rank in ranks.tolist()]
