"""Past iterations, for policies that depend on them: how many had no prompt, and how long they
took.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Sequence

from scheduling.extensions import Extension
from scheduling.inference import Inference, Row

KEPT = 0.98  # weight of a sample when the next one comes: about fifty count
# of a curve: weight of a new sample, samples after which a mean is forgotten, and share
NEW, FORGOTTEN, UNSEEN = 0.1, 1000, 0.25


class Line:
    """Least squares y = intercept + slope · x, in which later samples count more. The slope is not
    negative, and 0 while all x are alike.
    """

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


class Curve:
    """Time by number of tokens, which need not lie on a line: a CPU's kernels work in tiles. Means
    of late samples for each number up to 15 and each step from there on, eight an octave, with
    straight lines between them.
    """

    def __init__(self) -> None:
        self._samples = 0
        self._known: list[int] = []  # steps that have a mean, ascending
        self._means: dict[int, tuple[float, int]] = {}  # seconds, and the number of its last sample

    def add(self, n: int, seconds: float) -> None:
        step = last_of_step(n)
        mean, _ = self._means.get(step, (seconds, 0))
        if step not in self._means:
            insort(self._known, step)
        self._samples += 1
        self._means[step] = mean + (seconds - mean) * NEW, self._samples
        if self._samples % FORGOTTEN == 0:
            old = self._samples - FORGOTTEN
            self._known = [step for step in self._known if self._means[step][1] > old]
            self._means = {step: self._means[step] for step in self._known}

    def at(self, n: int) -> float:
        """Return the time of n tokens. There must be a sample.

        More tokens than were seen are taken to cost a quarter of what those seen did, each, so that
        they are tried.
        """
        known, means = self._known, self._means
        i = bisect_left(known, n)
        if i == len(known):
            most = known[-1]
            return means[most][0] * (1 + UNSEEN * (n / most - 1))
        after, seconds = known[i], means[known[i]][0]
        if i == 0 or after == n:
            return seconds
        before = known[i - 1]
        share = (n - before) / (after - before)
        return means[before][0] * (1 - share) + seconds * share


def last_of_step(n: int) -> int:
    """Return the last of the numbers that a `Curve` takes together."""
    width = 1 << max(0, n.bit_length() - 4)
    return -(-n // width) * width


class Past(Extension):
    """Record of iterations. An iteration with decode rows takes the time from the one before it, so
    that the gap between them is counted: it is a part of the time between two tokens.

    seconds = a + c · tokens of decode rows, a token each and their drafts, fitted to iterations of
    those alone, + b · prompt tokens, fitted to what others took longer.
    """

    def __init__(self) -> None:
        self.without_prompts = 0  # iterations since the last one that computed a prompt
        self._of_decodes, self._of_prompts = Line(), Line()
        self.of_tokens = Curve()  # time of iterations of decode rows and their drafts alone
        self._decoded = self._prompt_tokens = 0  # of the iteration that is computed now
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
            self.of_tokens.add(self._decoded, took_s)
        elif self._of_decodes.n:
            longer_s = took_s - self._of_decodes.at(self._decoded)
            self._of_prompts.add(self._prompt_tokens, longer_s)

    @property
    def is_known(self) -> bool:
        """True if an iteration of decode rows alone has been seen."""
        return self._of_decodes.n > 0

    def seconds(self, iterations: float, decode_rows: int, prompt_tokens: int) -> float:
        """Return how long so many iterations take that compute these prompt tokens, too."""
        prompts_s = self._of_prompts.ratio * prompt_tokens
        return iterations * self._of_decodes.at(decode_rows) + prompts_s

    def prompt_tokens_within(self, seconds: float, decode_rows: int) -> int:
        """Return how many prompt tokens an iteration with so many decode rows can compute in a
        time; any number, before both have been seen.
        """
        if not (token_s := self._of_prompts.ratio):
            return sys.maxsize
        return int((seconds - self._of_decodes.at(decode_rows)) / token_s)
