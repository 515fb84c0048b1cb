"""Server-sent events of a group, as its tokens are computed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from generate.tokenizer import Detokenizer
from scheduling.inference import TokenEvent
from server.api.messages import to_json
from server.api.replies import Reply

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """Return data as one server-sent event."""
    return f"data: {to_json(data)}\n\n".encode()


class Part:
    """Progress of one inference in a stream: tokens that were read, and tokens that were shown.

    prompt_ids: tokens of the prompt to echo. most: completion tokens to show at most.
    """

    def __init__(self, index: int, detokenizer: Detokenizer, prompt_ids: Sequence[int], most: int):
        self.index, self._most = index, most
        self._detokenizer = detokenizer
        self._text = detokenizer.prompt(prompt_ids)
        self._read = self._shown = 0

    def read(self, update: TokenEvent) -> tuple[str, int]:
        """Return new text and its number of tokens; nothing of both while text is withheld, as an
        echoed prompt is until the first token.
        """
        n = min(update.n_tokens, self._most)
        tokens = update.inference.tokens[self._read : n]
        self._text += self._detokenizer.completion(tokens, update.is_over)
        self._read = n
        ends_well = update.is_over and update.inference.error is None
        if not ends_well and not (self._text and self._read):
            return "", 0
        text, n = self._text, self._read - self._shown
        self._text, self._shown = "", self._read
        return text, n


class Events:
    """Events of a group. parts: by the id() of each inference that is not over."""

    def __init__(self, parts: dict[int, Part], reply: Reply):
        self._parts, self._reply = parts, reply
        self.begun = False

    @property
    def over(self) -> bool:
        """True once all is rendered."""
        return not self._parts

    def ends(self, over: Collection[int]) -> bool:
        """Return whether the stream ends with these inferences."""
        return not self._parts.keys() - over

    def render(self, updates: Mapping[int, TokenEvent]) -> bytes:
        """Return events for the updates, given by the id() of each inference; [DONE] ends the last.
        Tokens that piled up are one event.

        Raises a ServingError that comes before any text; a later one becomes the last event.
        """
        out: list[Any] = []
        failure = None
        for key, update in updates.items():
            if (part := self._parts.get(key)) is None:  # already over
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
