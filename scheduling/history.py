"""Iterations so far, for policies that depend on them: kinds, and how long they took."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from scheduling.extensions import Extension
from scheduling.inference import Inference, Row

KEPT = 0.98  # weight of a sample when the next one comes: about fifty count


class Line:
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


class History(Extension):
    """Record of iterations. An iteration with decode rows takes the time from the one before it, so
    that the gap between them is counted: it is a part of the time between two tokens.

    seconds = a + c · tokens of decode rows, a token each and their drafts, fitted to iterations of
    those alone, + b · prompt tokens, fitted to what others took longer.
    """

    def __init__(self) -> None:
        self.without_prompts = 0  # iterations since the last one that computed a prompt
        self._of_decodes, self._of_prompts = Line(), Line()
        self._decoded = self._prompt_tokens = 0  # tokens in the iteration that is computed now
        self._begun_at = self._ended_at = 0.0

    def planned(self, rows: Sequence[Row], now: float) -> None:
        if not rows:
            return
        self._decoded = sum(row.n_tokens for row in rows if row.decodes)
        self._prompt_tokens = sum(row.n_tokens for row in rows if not row.decodes)
        self._begun_at = self._ended_at if self._decoded else now
        self.without_prompts = 0 if self._prompt_tokens else self.without_prompts + 1

    def sampled(self, inferences: Sequence[Inference], now: float) -> None:
        self._ended_at, took_s = now, now - self._begun_at
        if not self._prompt_tokens:
            self._of_decodes.add(self._decoded, took_s)
        elif self._of_decodes.n:
            longer_s = took_s - self._of_decodes.at(self._decoded)
            self._of_prompts.add(self._prompt_tokens, longer_s)

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
