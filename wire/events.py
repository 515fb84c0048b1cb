"""Server-sent events of a group, as its tokens are computed."""

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
    """One inference of a stream: how much of it was read, and how much of that was shown.

    prompt_ids: those that are echoed. most: completion tokens that are shown.
    """

    def __init__(self, index: int, detokenizer: Detokenizer, prompt_ids: Sequence[int], most: int):
        self.index, self._most = index, most
        self._detokenizer = detokenizer
        self._text = detokenizer.prompt(prompt_ids)
        self._read = self._shown = 0

    def read(self, update: TokenEvent) -> tuple[str, int]:
        """The new text and the number of its tokens; none of either while the text is kept back."""
        n = min(update.n_tokens, self._most)
        tokens = update.inference.tokens[self._read : n]
        self._text += self._detokenizer.completion(tokens, update.is_over)
        self._read = n
        if not self._text and not update.is_over:
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
        """True once all was rendered."""
        return not self._parts

    def ends(self, over: Collection[int]) -> bool:
        """True if all are over once those inferences are."""
        return not self._parts.keys() - over

    def render(self, updates: Mapping[int, TokenEvent]) -> bytes:
        """The events for updates, by the id() of each inference; after the last of all [DONE].
        Tokens that piled up come as one.

        Raises a ServingError that comes before any text; later it is an event, and the last.
        """
        out: list[Any] = []
        failure = None
        for key, update in updates.items():
            if (part := self._parts.get(key)) is None:  # it was over before
                continue
            text, n = part.read(update)
            if update.is_over:
                del self._parts[key]
                failure = failure or update.inference.error
            last = update.is_over and update.inference.error is None
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
