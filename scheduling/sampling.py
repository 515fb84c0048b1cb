"""What a request wants of the engine: how to choose its tokens, and their log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose a token. temperature 0 is greedy; `seed` and the token's index
    decide the draw.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    # what each completion token that is there lowers its logit by: once, and each time
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0  # so many come before any of `stop_ids` may
    stop_ids: tuple[int, ...] = ()  # each once
    # whether any of these four may change a logit: looked up for each row of each iteration
    penalizes: bool = field(init=False)

    def __post_init__(self) -> None:
        ends = bool(self.min_tokens and self.stop_ids)
        penalizes = bool(self.presence_penalty or self.frequency_penalty) or ends
        object.__setattr__(self, "penalizes", penalizes)


class Score(NamedTuple):
    """A token's log-probability after those before it, and the likeliest ids there with theirs."""

    logprob: float
    top: list[tuple[int, float]]  # the likeliest first


@dataclass(slots=True)
class Scores:
    """Log-probabilities that a request wants. The engine appends them, each token's once."""

    top: int  # how many of the likeliest ids
    first: int  # which token of prompt + completion is the first; the one at 0 follows none
    of: list[Score] = field(default_factory=list)

    @property
    def next(self) -> int:
        """The place of the token whose score comes next."""
        return self.first + len(self.of)
