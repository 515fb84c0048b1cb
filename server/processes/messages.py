"""Messages between HTTP processes and the engine's, over a pair of sockets each: msgpack after its
length. None is a pickle. A closed socket means that the other process has ended.

Pairs of sockets need no name in a folder, and carried seven times as many messages of 4 kB as ZMQ's
ipc (62,000 and 8,700 per second on 2 cores of a Xeon, 2026-11-29).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from scheduling import errors
from scheduling.errors import ServingError
from scheduling.inference import CachedPrefix, Inference, State, TokenEvent
from scheduling.interruptions import Interruptions
from scheduling.sampling import Score
from server.api.messages import Answer
from server.api.routes import Call, named
from server.request import Request
from server.serving import Refused

LENGTH_BYTES = 4  # a message's length, before it


class Message(msgspec.Struct, tag=True, array_like=True):
    """A message to the engine. Inferences have numbers, which their HTTP process gives them."""


class Queue(Message):
    """A request; its inferences have consecutive numbers."""

    first: int
    request: Request


class Cancel(Message):
    numbers: list[int]


class Expire(Message):
    """Deadlines have passed."""


class Refusal(Message):
    """A request was refused before it was queued."""

    what: Refused


class Ask(Message):
    """A call of a route about the engine."""

    number: int
    route: str
    rest: tuple[str, str | None, str, dict[str, str], bytes]  # of a Call

    @property
    def call(self) -> Call:
        return Call(named(self.route), *self.rest)


class End(msgspec.Struct, array_like=True):
    """What is known once an inference is over."""

    state: State
    error: ServingError | None
    seed: int
    stopped: bool
    arrived_at: float
    admitted_at: float | None
    answered_at: float | None
    token_times: list[float]
    blocked_s: float
    interruptions: Interruptions
    verified: int
    accepted: int


class Piece(msgspec.Struct, array_like=True):
    """What is new of an inference. scores: of prompt tokens, too."""

    number: int
    cached_tokens: int
    ids: list[int]
    scores: list[Score]
    end: End | None


class Told(msgspec.Struct, array_like=True):
    """The answer of an Ask."""

    number: int
    answer: Answer


class News(msgspec.Struct, array_like=True):
    """What an HTTP process is told at once: mostly of an iteration. epoch_offset: the engine's."""

    epoch_offset: float
    pieces: list[Piece]
    answers: list[Told]


def piece_of(number: int, event: TokenEvent, before: int) -> Piece:
    """Return what is new of an inference, of which so many tokens were told before."""
    of, scores, end = event.inference, list[Score](), None
    if of.scores is not None:
        # those of the prompt come with the first token
        of_prompt = len(of.prompt_ids) - of.scores.first
        told, known = (of_prompt + n if n else 0 for n in (before, event.n_tokens))
        scores = of.scores.of[told:known]
    if event.is_over:
        end = End(
            of.state, of.error, of.sampling.seed, of.stopped, of.arrived_at, of.admitted_at,
            of.answered_at, of.token_times, of.standing.blocked_s, of.interruptions,
            of.drafts.verified, of.drafts.accepted,
        )  # fmt: skip
    return Piece(number, of.cached_tokens, of.tokens[before : event.n_tokens], scores, end)


def apply(piece: Piece, to: Inference) -> None:
    """Note a piece in this process's own copy of its inference."""
    to.tokens += piece.ids
    if to.scores is not None:
        to.scores.of += piece.scores
    if piece.cached_tokens and to.prefix is None:
        to.prefix = CachedPrefix([], found_tokens=piece.cached_tokens)
    if (end := piece.end) is None:
        return
    to.sampling = replace(to.sampling, seed=end.seed)
    to.error, to.stopped, to.token_times = end.error, end.stopped, end.token_times
    to.arrived_at, to.admitted_at, to.answered_at = (
        end.arrived_at, end.admitted_at, end.answered_at,
    )  # fmt: skip
    to.standing.blocked_s, to.interruptions = end.blocked_s, end.interruptions
    to.drafts.verified, to.drafts.accepted = end.verified, end.accepted
    to.is_over, to.state = True, end.state


def _plain(error: ServingError) -> Any:
    """Return an error as plain data."""
    return type(error).__name__, str(error), vars(error)


def _error(kind: type, data: tuple[str, str, dict[str, Any]]) -> ServingError:
    """Return the error of plain data."""
    name, message, fields = data
    error: ServingError = getattr(errors, name)(message)
    vars(error).update(fields)
    return error


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


def framed(message: Message | News) -> bytes:
    data = encode(message)
    return len(data).to_bytes(LENGTH_BYTES) + data


def received(at: socket.socket, kind: Any) -> Iterator[Any]:
    """Yield messages, until the other process ends."""
    decode = msgspec.msgpack.Decoder(kind, dec_hook=_error).decode
    with at.makefile("rb") as file, suppress(OSError):
        while length := file.read(LENGTH_BYTES):
            data = file.read(n := int.from_bytes(length))
            if len(data) < n:
                return
            yield decode(data)
