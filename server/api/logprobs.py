"""Log-probabilities of completions, in the form of each route."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from scheduling.inference import Inference
from scheduling.sampling import Score

if TYPE_CHECKING:
    from tiktoken import Encoding


class Logprobs:
    """Log-probabilities of one inference, given for its next n completion tokens at a time; with
    echo the prompt's come before the first. hidden: ids that the text does not show.
    """

    def __init__(
        self, tokenizer: Encoding, inference: Inference, echo: bool, hidden: Collection[int]
    ):
        self._tokenizer, self._inference, self._hidden = tokenizer, inference, hidden
        self._next = 0 if echo else len(inference.prompt_ids)
        self._offset = 0  # characters of the text before the next token
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def completion(self, n: int) -> dict[str, list[Any]]:
        """The form of /v1/completions: lists with an entry for each token."""
        lists: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for id_, score, shown in self._take(n):
            name, top = self._name(id_), None
            if score is not None:
                top = {self._name(each): logprob for each, logprob in score.top}
                top.setdefault(name, score.logprob)
            entry = name, score and score.logprob, top, self._offset
            for values, value in zip(lists.values(), entry):
                values.append(value)
            self._offset += len(self._utf8.decode(self._bytes(id_))) if shown else 0
        return lists

    def chat(self, n: int) -> dict[str, list[Any]]:
        """The form of /v1/chat/completions: an entry for each token."""
        return {
            "content": [
                self._entry(id_, score.logprob)
                | {"top_logprobs": [self._entry(*each) for each in score.top]}
                for id_, score, _ in self._take(n)
                if score is not None
            ]
        }

    def _take(self, n: int) -> Iterator[tuple[int, Score | None, bool]]:
        """Yield each token's id, its score, if any, and whether the text shows it."""
        inference, scores = self._inference, self._inference.scores
        assert scores is not None
        n_prompt = len(inference.prompt_ids)
        first, self._next = self._next, max(self._next, n_prompt) + n
        for position in range(first, self._next):
            id_ = inference.token(position)
            score = scores.of[position - scores.first] if position >= scores.first else None
            yield id_, score, position < n_prompt or id_ not in self._hidden

    def _entry(self, id_: int, logprob: float) -> dict[str, Any]:
        return {"token": self._name(id_), "logprob": logprob, "bytes": [*self._bytes(id_)]}

    def _bytes(self, id_: int) -> bytes:
        return self._tokenizer.decode_single_token_bytes(id_)

    def _name(self, id_: int) -> str:
        """Return a token's text, or if it is no whole characters its bytes in OpenAI's form."""
        try:
            return self._bytes(id_).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._bytes(id_))
