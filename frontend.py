"""What the completion routes share: a body becomes a group of inferences, which is waited for or streamed.

Knows bodies and tokens; what a route's bodies and answers look like is the route's own.
"""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, TypeVar

from flask import Response, request
from pydantic import BaseModel, Field, StringConstraints, ValidationError
from tiktoken import Encoding
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from batching import LONGEST_WAIT_S, BatchingManager, Inference, Sampling
from config import MAX_BODY_BYTES, Config
from routes.streams import Part, Stream, Streamer
from routes.watcher import Watcher
from scheduling.errors import ContextTooLong, InvalidRequest
from tokenizer import LONGEST_TOKEN, Detokenizer, StopRule

# fail_fast: a list with 100,000 mistakes ends at the first, instead of holding the GIL while each is described
Strings = Annotated[list[str], Field(fail_fast=True)]
Integers = Annotated[list[int], Field(fail_fast=True)]
Lists = Annotated[list[Integers], Field(fail_fast=True)]
Text = Annotated[str, StringConstraints(min_length=1)]
Prompt = Text | Strings | Integers | Lists  # one prompt or several, as text or as ids
Body = TypeVar("Body", bound=BaseModel)


def read(kind: type[Body]) -> Body:
    """The current HTTP request's body, validated. Raises InvalidRequest, naming the first field that is wrong."""
    try:
        raw = request.get_data()
    except HTTPException:  # Flask's own refusals
        raise
    except Exception as error:  # the HTTP server's: cut short, too slow, or wrongly chunked
        raise InvalidRequest(f"The body could not be read to its end ({type(error).__name__}).") from None
    if len(raw) > MAX_BODY_BYTES:
        raise RequestEntityTooLarge
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = str(first["loc"][0])[:100] if first["loc"] else None
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{field}: {message}" if field else message, param=field) from None


def is_alone(prompt: Prompt) -> bool:
    """One prompt, and not a group of them (which a list of one is too)."""
    return isinstance(prompt, str) or bool(prompt and isinstance(prompt[0], int))


def usage_of(group: Sequence[Inference]) -> dict[str, int]:
    """The tokens of an answered group."""
    prompt, completion = sum(len(member.prompt_ids) for member in group), sum(len(member.tokens) for member in group)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def member_seed(seed: int, i: int) -> int:
    """The seed of a group's i-th member: the group's own for the first, and a mix of both for the others.

    A mix, since with seed + i the second of one group would draw like the first of the next.
    """
    digest = hashlib.sha256(f"{seed} {i}".encode()).digest()
    return seed if i == 0 else int.from_bytes(digest[:8], "big") >> 1


class Frontend:
    """The way from a route to the manager and back."""

    def __init__(self, config: Config, manager: BatchingManager, tokenizer: Encoding):
        self.config = config
        self.manager = manager
        self.tokenizer = tokenizer
        self._watcher = Watcher(manager)
        self._streamer = Streamer()
        self._next_seed = config.seed
        self._lock = threading.Lock()

    def _seeds(self, given: int | None, n: int) -> list[int]:
        """The seeds of a group of n: they follow from its own; of one that brings none config.seed, config.seed + 1, …"""
        if given is not None:
            return [member_seed(given, i) for i in range(n)]
        with self._lock:
            first, self._next_seed = self._next_seed, (self._next_seed + n) % 2**63
        return [(first + i) % 2**63 for i in range(n)]

    def encode(self, prompt: Prompt, num_tokens: int, *, field: str, length_field: str) -> list[list[int]]:
        """The ids of every prompt, each checked to leave room for `num_tokens`. Raises InvalidRequest.

        Refuses a text too long to tokenize before tokenizing it. `field`, `length_field`: what the route calls the two.
        """
        config, alone = self.config, is_alone(prompt)
        if not alone and len(prompt) > config.max_in_flight:
            raise InvalidRequest(f"This server holds {config.max_in_flight} prompts at most; send fewer at once.", param=field)
        several: Sequence[Any] = [prompt] if alone else prompt
        for text in several:
            if isinstance(text, str) and len(text.encode()) > config.max_model_len * LONGEST_TOKEN[config.tokenizer]:
                raise ContextTooLong(
                    f"The prompt is longer than the context of {config.max_model_len} tokens; shorten it.", param=field
                )
        prompts = [self.tokenizer.encode_ordinary(text) if isinstance(text, str) else text for text in several]
        if not prompts or not all(prompts):
            raise InvalidRequest("A prompt must not be empty.", param=field)
        for ids in prompts:
            if len(ids) + num_tokens > config.max_model_len:
                raise ContextTooLong(
                    f"{len(ids)} prompt tokens + {num_tokens} completion tokens is beyond the context of "
                    f"{config.max_model_len}; shorten the prompt or lower {length_field}.",
                    param=length_field if len(ids) < config.max_model_len else field,
                )
            if not 0 <= min(ids) <= max(ids) < self.tokenizer.n_vocab:
                raise InvalidRequest(f"Every prompt id must be in 0 … {self.tokenizer.n_vocab - 1}.", param=field)
        return prompts

    def group(
        self,
        prompts: Sequence[list[int]],
        num_tokens: int,
        sampling: Sampling,
        seed: int | None,
        timeout_s: float | None,
        rule: StopRule | None = None,
    ) -> list[Inference]:
        """One inference a prompt, each with a seed of its own, to be waited for or streamed."""
        seeds = self._seeds(seed, len(prompts))
        timeout_s = timeout_s or self.config.request_timeout_s
        deadline = None if timeout_s is None else self.manager.clock() + timeout_s
        return [
            Inference(ids, num_tokens, replace(sampling, seed=seed), deadline, rule.new() if rule else None)
            for ids, seed in zip(prompts, seeds)
        ]

    def wait(self, group: Sequence[Inference]) -> None:
        """Queue the group, and wait until all of it is answered. Raises what enqueue does, and the first error of a member."""
        self.manager.enqueue(group)
        try:
            with self._watcher.watching(request.environ.get("gunicorn.socket"), group):
                for member in group:
                    self._wait(member.done, member.deadline)
                    if member.error is not None:
                        raise member.error
        except BaseException:
            self.manager.cancel(group)  # nobody will see the others' texts
            raise

    def _wait(self, event: threading.Event, deadline: float | None) -> None:
        """Wait; when the deadline passes see to it that the manager knows, whose thread may be in a long iteration."""
        while not event.wait(None if deadline is None else min(max(0.01, deadline - self.manager.clock()), LONGEST_WAIT_S)):
            self.manager.expire()

    def text(self, member: Inference, echo: bool, rule: StopRule | None = None) -> str:
        """The whole text of an answered inference."""
        detokenizer = Detokenizer(self.tokenizer, rule)
        prompt = detokenizer.prompt(member.prompt_ids) if echo else ""
        return prompt + detokenizer.completion(member.tokens, last=True)

    def stream(
        self,
        group: Sequence[Inference],
        piece: Callable[[int, str, int, bool], Any],
        end: Callable[[], Any | None],
        *,
        echo: bool = False,
        rule: StopRule | None = None,
    ) -> Response:
        """Queue the group, and answer with server-sent events as its tokens are computed.

        `piece(i, text, n, last)`: the event for the next n tokens of the group's i-th inference; those that pile up while
        the reader is slow come as one. `end()`: an event after all of them, or None. Waits for the first text, so that
        what goes wrong before it is raised and has a status of its own; what goes wrong later is an event.
        """
        prompts = [member.prompt_ids if echo else [] for member in group]
        parts = {id(m): Part(i, Detokenizer(self.tokenizer, rule), ids) for i, (m, ids) in enumerate(zip(group, prompts))}
        connection = request.environ.get("gunicorn.socket")
        chunked = type(connection) is socket.socket and request.environ.get("SERVER_PROTOCOL") == "HTTP/1.1"
        stream = Stream(parts, piece, end, connection if chunked else None)
        self._streamer.follow(stream, group)
        self.manager.enqueue(group)
        with ExitStack() as stack:
            stack.callback(self.manager.cancel, group)  # does nothing unless the reader has gone before the end
            stack.enter_context(self._watcher.watching(connection, group))
            body = stream.body(lambda turn: self._wait(turn, group[0].deadline))
            response = Response(
                chain([next(body)], body), mimetype="text/event-stream",
                headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},  # proxies: pass it on at once
            )  # fmt: skip
            response.call_on_close(stack.pop_all().close)
        return response
