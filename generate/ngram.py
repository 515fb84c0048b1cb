"""Draft tokens without a model: what followed the same words before (Saxena's prompt lookup
decoding, 2023; vLLM's ngram).
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduling.inference import Drafter, Inference

LENGTHS = (4, 3, 2)  # ids in the endings that are looked for


class Ngram(Drafter):
    """Proposes the tokens after the last place in prompt + completion that ends as they do now, in
    4, 3 or 2 tokens; the longest wins. Beyond the end the proposal repeats itself.
    """

    def __init__(self) -> None:
        # by inference: its tokens as characters, since nothing searches faster than a string
        self._texts: dict[Inference, str] = {}

    def propose(self, wanted: Sequence[tuple[Inference, int]]) -> list[list[int]]:
        before, self._texts = self._texts, {}
        for inference, _ in wanted:
            text = before.get(inference) or "".join(map(chr, inference.prompt_ids))
            new = inference.tokens[len(text) - len(inference.prompt_ids) :]
            self._texts[inference] = text + "".join(map(chr, new))
        return [_after_the_last(self._texts[inference], k) for inference, k in wanted]


def _after_the_last(text: str, k: int) -> list[int]:
    """Return the k ids after the last place that ends like the whole; none where none does."""
    for n in LENGTHS:
        if (found := text.rfind(text[-n:], 0, -1)) >= 0:
            after = text[found + n :]
            return [ord(after[i % len(after)]) for i in range(k)]
    return []
