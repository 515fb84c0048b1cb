"""What rules remember of the iterations so far; for one, how long which kinds took."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from scheduling.extensions import Extension
from scheduling.inference import Inference, Row

KEPT = 0.98  # weight of a sample when the next one comes: about fifty count


class LeastSquares:
    """Least squares y = intercept + slope · x, slope ≥ 0, in which later samples count more."""

    def __init__(self) -> None:
        self.n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        sums = self.n, self._x, self._y, self._xx, self._xy
        new = 1.0, x, y, x * x, x * y
        kept = [KEPT * total + value for total, value in zip(sums, new)]
        self.n, self._x, self._y, self._xx, self._xy = kept

    def at(self, x: float) -> float:
        """Return y at x. There must be a sample."""
        spread = self.n * self._xx - self._x**2
        together = self.n * self._xy - self._x * self._y
        slope = max(0.0, together / spread) if spread > 1e-6 * self.n * self._xx else 0.0
        return max(0.0, (self._y + slope * (self.n * x - self._x)) / self.n)

    @property
    def ratio(self) -> float:
        """Slope of the line through the origin; 0 before the first sample."""
        return max(0.0, self._xy / self._xx) if self._xx else 0.0


class Done(NamedTuple):
    """An iteration that is over. Times are the scheduler's, in seconds."""

    prompts: Sequence[tuple[Inference, int]]  # those it computed prompts of, with the tokens
    decodes: Sequence[tuple[Inference, int]]  # rows that decoded: a token each, and their drafts
    planned_at: float
    ended_at: float
    finished: Sequence[Inference]  # those that got their last token


class Memory(Extension):
    """What a rule remembers of the iterations so far: made without arguments at the start, and
    changed by `add` alone, so that a replay remembers the same. Rules read it in `View.memories`.
    """

    _planned: tuple[Sequence[Row], Sequence[Row], float] = (), (), 0.0

    def add(self, done: Done) -> None:
        """Take an iteration."""
        raise NotImplementedError

    def planned(self, rows: Sequence[Row], now: float) -> None:
        if rows:
            decodes = [row for row in rows if row.decodes]
            self._planned = [row for row in rows if not row.decodes], decodes, now

    def sampled(self, inferences: Sequence[Inference], now: float) -> None:
        *rows, planned_at = self._planned
        prompts, decodes = ([(row.inference, row.n_tokens) for row in kind] for kind in rows)
        finished = [inference for inference in dict.fromkeys(inferences) if inference.is_over]
        self.add(Done(prompts, decodes, planned_at, now, finished))


class History(Memory):
    """Record of iterations. An iteration with decode rows takes the time from the one before it, so
    that the gap between them is counted: it is a part of the time between two tokens.

    seconds = a + c · tokens of decode rows, a token each and their drafts, fitted to iterations of
    those alone, + b · prompt tokens, fitted to what others took longer.
    """

    def __init__(self) -> None:
        self.without_prompts = 0  # iterations since the last one that computed a prompt
        self._of_decodes, self._of_prompts = LeastSquares(), LeastSquares()
        self._ended_at = 0.0

    def add(self, done: Done) -> None:
        decoded, prompt_tokens = (sum(n for _, n in of) for of in (done.decodes, done.prompts))
        took_s = done.ended_at - (self._ended_at if decoded else done.planned_at)
        self._ended_at = done.ended_at
        self.without_prompts = 0 if prompt_tokens else self.without_prompts + 1
        if not prompt_tokens:
            self._of_decodes.add(decoded, took_s)
        elif self._of_decodes.n:
            longer_s = took_s - self._of_decodes.at(decoded)
            self._of_prompts.add(prompt_tokens, longer_s)

    @property
    def is_known(self) -> bool:
        """True if an iteration of decode rows alone has been seen."""
        return self._of_decodes.n > 0

    def seconds(self, iterations: float, decode_rows: int, prompt_tokens: int) -> float:
        """Return the seconds of so many iterations, with these prompt tokens among them."""
        prompts_s = self._of_prompts.ratio * prompt_tokens
        return iterations * self._of_decodes.at(decode_rows) + prompts_s

    def prompt_tokens_within(self, seconds: float, decode_rows: int) -> int:
        """Return how many prompt tokens fit into a time beside decode rows; any, if unknown yet."""
        if not (token_s := self._of_prompts.ratio):
            return sys.maxsize
        return int((seconds - self._of_decodes.at(decode_rows)) / token_s)
