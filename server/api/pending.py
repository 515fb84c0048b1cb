"""Pending answers: given whole once all of it is computed, or as events while it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from generate.tokenizer import Detokenizer
from scheduling.inference import TokenEvent
from server.api.messages import DONE, event
from server.api.refusals import body_of
from server.api.replies import REPLIES, Logprobs, Reply
from server.request import Request
from server.serving import Server


class PendingAnswer:
    """A request and its answer. group: the inferences to queue. Raises what Server.group does."""

    def __init__(self, server: Server, request: Request):
        self.request, self._tokenizer = request, server.tokenizer
        self._rule = request.rule(server.tokenizer)
        self.group = server.group(request, self._rule)
        hidden = self._rule.hidden if self._rule else ()
        logprobs = [
            Logprobs(server.tokenizer, member, request.echo, hidden)
            for member in self.group
            if member.scores is not None
        ]
        model = request.adapter or server.config.model_name
        reply = REPLIES[request.form]
        self._reply = reply(request, self.group, model, server.manager.epoch_offset, logprobs)

    def whole(self) -> dict[str, Any]:
        """Return the plain answer, once the whole group is answered."""
        texts = []
        for member in self.group:
            detokenizer = Detokenizer(self._tokenizer, self._rule)
            prompt = detokenizer.prompt(member.prompt_ids) if self.request.echo else ""
            tokens = member.tokens[: self.request.num_tokens]
            texts.append(prompt + detokenizer.completion(tokens, last=True))
        return self._reply.whole(texts)

    def events(self) -> Events:
        """Return the streamed answer, from its beginning."""
        most, parts = self.request.num_tokens, {}
        for i, member in enumerate(self.group):
            echoed = member.prompt_ids if self.request.echo else []
            detokenizer = Detokenizer(self._tokenizer, self._rule)
            parts[id(member)] = Part(i, detokenizer, echoed, most)
        return Events(parts, self._reply)


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
            out.append(body_of(failure))
            self._parts.clear()
        elif not self._parts and (closing := self._reply.end()) is not None:
            out.append(closing)
        self.begun = self.begun or bool(out)
        return b"".join(map(event, out)) + (b"" if self._parts else DONE)
