"""Settings of sampling, and log-probabilities of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of a request. temperature 0 is greedy; `seed` and a token's index decide draws."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    presence_penalty: float = 0.0  # lowers the logit of each id in the completion so far
    frequency_penalty: float = 0.0  # the same, times the id's count there
    min_tokens: int = 0  # completion tokens before any of `stop_ids` may come
    stop_ids: tuple[int, ...] = ()  # without repetition
    # True if any of these four may change a logit; read for each row of each iteration
    penalizes: bool = field(init=False)

    def __post_init__(self) -> None:
        ends = bool(self.min_tokens and self.stop_ids)
        penalizes = bool(self.presence_penalty or self.frequency_penalty) or ends
        object.__setattr__(self, "penalizes", penalizes)


class Score(NamedTuple):
    """A token's log-probability after those before it, and those of the likeliest ids there."""

    logprob: float
    top: list[tuple[int, float]]  # the likeliest first


@dataclass(slots=True)
class Scores:
    """Log-probabilities that a request wants. The engine appends them, each token's once."""

    top: int  # how many of the likeliest ids
    first: int  # position in prompt + completion of the first token with a score; not 0
    of: list[Score] = field(default_factory=list)

    @property
    def next(self) -> int:
        """Position of the token whose score comes next."""
        return self.first + len(self.of)

    def cut(self, end: int) -> None:
        """Forget the scores of tokens from position `end` on."""
        del self.of[max(0, end - self.first) :]
