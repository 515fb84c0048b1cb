"""One request and its answer, between a front end and a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizer import Detokenizer
from wire.events import Events, Part
from wire.logprobs import Logprobs
from wire.replies import REPLIES
from wire.request import Request

if TYPE_CHECKING:
    from serving import Server


class Exchange:
    """`group`: what is to be queued. Raises what Server.group does."""

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
        self._reply = REPLIES[request.form](
            request, self.group, server.config.model_name, server.manager.epoch_offset, logprobs
        )

    def whole(self) -> dict[str, Any]:
        """The plain answer, once all of the group have theirs."""
        texts = []
        for member in self.group:
            detokenizer = Detokenizer(self._tokenizer, self._rule)
            prompt = detokenizer.prompt(member.prompt_ids) if self.request.echo else ""
            tokens = member.tokens[: self.request.num_tokens]
            texts.append(prompt + detokenizer.completion(tokens, last=True))
        return self._reply.whole(texts)

    def events(self) -> Events:
        """The streamed answer, from its beginning."""
        parts = {
            id(member): Part(
                i,
                Detokenizer(self._tokenizer, self._rule),
                member.prompt_ids if self.request.echo else [],
                self.request.num_tokens,
            )
            for i, member in enumerate(self.group)
        }
        return Events(parts, self._reply)
