"""Draft tokens without a model: what followed the same words before (Saxena's prompt lookup
decoding, 2023; vLLM's ngram).
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduling.drafts import Drafter
from scheduling.inference import Inference

LENGTHS = (4, 3, 2)  # of the endings that are looked for


class Ngram(Drafter):
    """Proposes the tokens after the last place in prompt + completion that ends as they do now, in
    4, 3 or 2 tokens; the longest wins. Beyond the end the proposal repeats itself.
    """

    def __init__(self) -> None:
        self._places: dict[int, _Places] = {}  # by the id of an inference

    def propose(self, wanted: Sequence[tuple[Inference, int]]) -> list[list[int]]:
        before, self._places = self._places, {}
        for inference, _ in wanted:
            places = before.get(inference.id)
            if places is None or places.inference is not inference:
                places = _Places(inference)
            self._places[inference.id] = places
        return [self._places[inference.id].after_the_last(k) for inference, k in wanted]


class _Places:
    """Where each run of tokens of an inference ended last."""

    def __init__(self, inference: Inference):
        self.inference = inference
        self._ids = list(inference.prompt_ids)
        self._ends: dict[tuple[int, ...], int] = {}  # of the runs before the last token
        self._noted = 0

    def after_the_last(self, k: int) -> list[int]:
        """Return the k ids after the last place that ends like the whole; none where none does."""
        ids, ends = self._ids, self._ends
        ids += self.inference.tokens[len(ids) - len(self.inference.prompt_ids) :]
        for end in range(self._noted + 1, len(ids)):
            for n in LENGTHS:
                if n <= end:
                    ends[tuple(ids[end - n : end])] = end
        self._noted = len(ids) - 1
        for n in LENGTHS:
            after = ends.get(tuple(ids[-n:]))
            if after is not None:
                return [ids[after + i % (len(ids) - after)] for i in range(k)]
        return []
