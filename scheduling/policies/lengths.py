"""Predicted lengths of answers, for orders and bins by length, which never see the true one.

exact         its stated limit, `num_tokens`
noisy:SIGMA   the same times a log-normal error, drawn from its seed
constant      the same for all
prompt        a line fitted on the prompts and completions answered so far
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from statistics import NormalDist

from scheduling.extensions import Extension, Group
from scheduling.inference import Inference

LONGEST = 1024  # GPT-2's context, which no answer exceeds: the length that `constant` predicts
MOST_SIGMA = 10.0  # largest sigma of a log-normal error: beyond any use, and without overflow
REMEMBERED = 1024  # latest predictions, from which the edges of bins follow


class Predictor:
    """Completion tokens expected of a request when it arrives: here its stated limit."""

    def predict(self, inference: Inference) -> int:
        return inference.expected_tokens or inference.num_tokens

    def learn(self, inference: Inference) -> None:
        """Learn from an answered inference."""


class Noisy(Predictor):
    def __init__(self, sigma: float):
        self._sigma = sigma

    def predict(self, inference: Inference) -> int:
        digest = hashlib.sha256(b"length %d" % inference.sampling.seed).digest()
        uniform = (int.from_bytes(digest[:8], "big") + 0.5) / 2**64
        error = math.exp(self._sigma * NormalDist().inv_cdf(uniform))
        return max(1, round(inference.num_tokens * error))


class Constant(Predictor):
    def predict(self, inference: Inference) -> int:
        return LONGEST


class FromPrompt(Predictor):
    """Least squares from running sums; at first the mean, and before any answer the longest."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0

    def learn(self, inference: Inference) -> None:
        x, y = len(inference.prompt_ids), len(inference.tokens)
        self._n += 1
        self._x, self._y = self._x + x, self._y + y
        self._xx, self._xy = self._xx + x * x, self._xy + x * y

    def predict(self, inference: Inference) -> int:
        if not self._n:
            return LONGEST
        spread = self._n * self._xx - self._x**2
        slope = (self._n * self._xy - self._x * self._y) / spread if spread else 0.0
        mean_x, mean_y = self._x / self._n, self._y / self._n
        return max(1, round(mean_y + slope * (len(inference.prompt_ids) - mean_x)))


def predictor(name: str) -> Predictor:
    """Return a predictor by its name, as above. Raises ValueError with a sentence."""
    kinds = {"exact": Predictor, "constant": Constant, "prompt": FromPrompt}
    if name in kinds:
        return kinds[name]()
    kind, _, sigma = name.partition(":")
    try:
        if kind == "noisy" and 0 <= float(sigma) <= MOST_SIGMA:
            return Noisy(float(sigma))
    except ValueError:
        pass
    raise ValueError(
        f"must be exact, noisy:SIGMA (0 … {MOST_SIGMA:g}, such as noisy:0.7), constant or prompt"
    )


class Bins:
    """Bins of equally frequent predictions, by the last REMEMBERED ones (Guldogan et al., arXiv
    2412.04504, section 3).
    """

    def __init__(self, n: int):
        self._n = n
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    @property
    def edges(self) -> Sequence[int]:
        """Bin i ends with edge i; the last one has no end."""
        n = len(self._sorted)
        # the least length that at least i of n parts do not exceed
        places = (-(-n * i // self._n) - 1 for i in range(1, self._n))
        return [self._sorted[place] for place in places] if n else ()

    def place(self, predicted: int) -> int:
        """Return the bin of a prediction, and count it."""
        if self._n == 1:
            return 0
        bin_ = sum(predicted > edge for edge in self.edges)
        self._latest.append(predicted)
        insort(self._sorted, predicted)
        if len(self._latest) > REMEMBERED:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]
        return bin_


class LengthPrediction(Extension):
    """Predicted lengths of arriving requests, and the bins that they fall into."""

    def __init__(self, predictor: Predictor, n_bins: int):
        self.predictor = predictor
        self._bins = Bins(n_bins)

    def arrive(self, group: Group, now: float) -> None:
        # one length for all members, so that they stay side by side
        predicted = max(self.predictor.predict(member) for member in group)
        bin_ = self._bins.place(predicted)
        for member in group:
            member.standing.predicted_tokens, member.standing.bin = predicted, bin_

    def end(self, inference: Inference, now: float) -> None:
        if inference.error is None:
            self.predictor.learn(inference)
