"""Server-sent events of a group, made as its tokens are told."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from scheduling.inference import TokenEvent
from tokenizer import Detokenizer
from wire.messages import to_json
from wire.replies import Reply

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """One server-sent event."""
    return f"data: {to_json(data)}\n\n".encode()


class Part:
    """One inference of a stream: what of it was read, and what of that was shown.

    prompt_ids: those that are echoed. most: completion tokens that are shown.
    """

    def __init__(self, index: int, detokenizer: Detokenizer, prompt_ids: Sequence[int], most: int):
        self.index, self._most = index, most
        self._detokenizer = detokenizer
        self._text = detokenizer.prompt(prompt_ids)
        self._read = self._shown = 0

    def read(self, told: TokenEvent) -> tuple[str, int]:
        """The new text and the number of its tokens; none of either while the text is held back."""
        n = min(told.n_tokens, self._most)
        tokens = told.inference.tokens[self._read : n]
        self._text += self._detokenizer.completion(tokens, told.is_over)
        self._read = n
        if not self._text and not told.is_over:
            return "", 0
        text, n = self._text, self._read - self._shown
        self._text, self._shown = "", self._read
        return text, n


class Events:
    """parts: by the id() of each inference that is not over."""

    def __init__(self, parts: dict[int, Part], reply: Reply):
        self._parts, self._reply = parts, reply
        self.begun = False

    @property
    def over(self) -> bool:
        """All was rendered."""
        return not self._parts

    def ends(self, over: Collection[int]) -> bool:
        """Nobody else is left once those inferences are over."""
        return not self._parts.keys() - over

    def render(self, told: Mapping[int, TokenEvent]) -> bytes:
        """The events for what was told since, by the id() of each inference; with the last of them
        [DONE]. Those that piled up come as one.

        Raises a ServingError that comes before any text; later it is an event, and the last.
        """
        out: list[Any] = []
        failure = None
        for key, news in told.items():
            if (part := self._parts.get(key)) is None:  # told twice that it is over
                continue
            text, n = part.read(news)
            if news.is_over:
                del self._parts[key]
                failure = failure or news.inference.error
            last = news.is_over and news.inference.error is None
            if text or last:
                out.append(self._reply.piece(part.index, text, n, last))
        if failure is not None:
            if not self.begun and not out:
                raise failure
            out.append(failure.body())
            self._parts.clear()
        elif not self._parts and (closing := self._reply.end()) is not None:
            out.append(closing)
        self.begun = self.begun or bool(out)
        return b"".join(map(event, out)) + (b"" if self._parts else DONE)
