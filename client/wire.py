"""Requests for a completion and their answers: /inference, or OpenAI's /v1/completions or
/v1/chat/completions.

A wire turns a request into a body, and the pieces of an answer, each with the instant at which it
came, into an `Outcome`. An answer is read when it is whole, so that reading does not delay the
sending of others. Token counts come from the server's `usage`, never from counting chunks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from client.draws import words
from client.outcomes import Outcome
from client.results import Json
from client.traces import Request
from config.reading import parse
from stats import times_from

APIS = ("inference", "openai", "chat")
IN_WORDS = "token ids are sent as text, a word for each"
DONE = b"[DONE]"  # the last event of a stream
DONE_LINE = re.compile(rb"[\r\n]data:[ \t]*\[DONE\]")
BYTE_ORDER_MARK = "\ufeff".encode()
EARLIEST_S = -1.0  # a first token before its request: clocks that count seconds differ by less
Number = Annotated[int | float, Field(ge=0, le=1e10)]  # seconds since the epoch, too


class Usage(BaseModel):
    """Tokens of an answer, as many as a column of results holds."""

    prompt_tokens: int = Field(ge=0, lt=2**31)
    completion_tokens: int = Field(ge=1, lt=2**31)


class Timings(BaseModel):
    """A server's own `timings`: numbers, the gaps between tokens, and the parts of its latency."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Number]

    itl_s: list[Number] = []
    parts: dict[str, Number] = {}


class Unreadable(ValueError):
    """An answer that is an error, or of another form than expected; its message is a sentence."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Bytes of an answer: (instant, bytes read); instants are seconds since the run's start."""

    request: Request
    scheduled_at: float
    sent_at: float
    pieces: Sequence[tuple[float, bytes]]

    @property
    def answered_at(self) -> float:
        return self.pieces[-1][0]

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)


@dataclass(frozen=True, slots=True)
class Asked:
    """How servers that are none of ours are asked. headers: secrets, for all that is known here.
    extra: fields of each body, which replace ours; None leaves ours out.
    """

    api: str = "openai"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    extra: Json = field(default_factory=dict)


class Wire:
    """One API. path: its route's. form: what is wrong with an answer of another form. headers: of
    each request. ids: prompts may be token ids; else a word is sent for each. in_words: it was.
    """

    headers: Mapping[str, str] = {}
    ids, in_words = True, False
    path = "/inference"
    form = "an answer in another form than /inference gives; is --api openai meant?"

    def body(self, request: Request) -> Json:
        return request.body()

    def read(self, reply: Reply) -> Outcome:
        """Return the answer. Raises Unreadable."""
        try:
            return self._read(reply)
        except Unreadable:
            raise
        except (ValueError, LookupError, TypeError, AttributeError):
            raise Unreadable(self.form) from None

    def _read(self, reply: Reply) -> Outcome:
        raise NotImplementedError


class Plain(Wire):
    """POST /inference, answered as a whole: tokens came as the server's `timings` say."""

    def _read(self, reply: Reply) -> Outcome:
        body = parse(reply.body)
        if is_error(body):
            raise Unreadable(f"200, and an error: {message(body)}")
        timings = _checked(body["timings"])
        times = times_from(timings).ending_at(reply.answered_at)
        first, last = times.first_token_at, times.last_token_at
        if first - reply.sent_at < EARLIEST_S:
            raise ValueError
        text, gaps = str(body["completion"]), timings["itl_s"]
        return _answer(reply, body["usage"], first, last, gaps, timings, text)


class Streaming(Wire):
    """POST /inference as a stream: tokens come when this client reads them."""

    form = "events in another form than /inference gives; is --api openai meant?"

    def body(self, request: Request) -> Json:
        return {**request.body(), "stream": True}

    def _read(self, reply: Reply) -> Outcome:
        *pieces, (_, end) = events(reply)
        times, timings = [at for at, _ in pieces], _checked(end["timings"])
        text, gaps = "".join(event["text"] for _, event in pieces), _gaps(times)
        return _answer(reply, end["usage"], times[0], times[-1], gaps, timings, text)


class OpenAI(Wire):
    """POST /v1/completions as a stream, on servers that know `ignore_eos` beyond an end-of-text."""

    path, greets = "/v1/completions", False  # greets: its first chunk is no token
    form = "chunks in another form than OpenAI's completions; is another --api meant?"

    def __init__(self, model: str, asked: Asked | None = None):
        self._model, asked = model, asked or Asked()
        self.headers, self.extra = asked.headers, asked.extra

    def body(self, request: Request) -> Json:
        body = request.body()
        prompt = body.pop("prompt", None) or body.pop("prompt_ids")
        if not self.ids and not isinstance(prompt, str):
            prompt, self.in_words = words(prompt), True
        body = {
            "model": self._model,
            **self._prompt(prompt),
            "max_tokens": body.pop("num_tokens"),
            **body,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        return {name: value for name, value in body.items() if value is not None}

    @property
    def about(self) -> Json:
        """How a server was asked, for results."""
        return {"path": self.path, "in_words": self.in_words, "extra_body": self.extra}

    def _prompt(self, prompt: Any) -> Json:
        return {"prompt": prompt}

    def _text(self, choice: Any) -> str | None:
        """Return the text of a choice's tokens; None if it brings no token, as an empty last one
        does.
        """
        return choice["text"] or (None if choice.get("finish_reason") else "")

    def _read(self, reply: Reply) -> Outcome:
        times, texts, usage = [], [], None
        for at, event in (arrived := events(reply)):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if (text := self._text(choice)) is not None:
                    times.append(at)
                    texts.append(text)
        if usage is None:
            raise Unreadable(
                "a stream without usage; stream_options.include_usage must be honoured"
            )
        if usage["completion_tokens"] == 0:
            raise Unreadable("an answer without a token")
        # tokens that decode to nothing are tokens all the same; a chat may have said its role alone
        times = times or [math.nan if self.greets else arrived[0][0]]
        text = "".join(texts)
        return _answer(reply, usage, times[0], times[-1], _gaps(times), None, text)


class Chat(OpenAI):
    """POST /v1/chat/completions as a stream, the prompt a message of the user. The template of the
    chat is the server's, so that prompts are text alone.
    """

    ids, greets = False, True
    path = "/v1/chat/completions"
    form = "chunks in another form than OpenAI's chat completions; is another --api meant?"

    def _prompt(self, prompt: Any) -> Json:
        return {"messages": [{"role": "user", "content": prompt}]}

    def _text(self, choice: Any) -> str | None:
        """A first delta may have a role alone. Reasoning is `reasoning` to vLLM today, and
        `reasoning_content` to llama.cpp; some versions of vLLM sent it as both. What comes under
        other names (calls of tools, a refusal) are tokens, too, without a text here.
        """
        delta = choice["delta"] or {}
        if not _says({**delta, "role": None}):
            return None
        texts = delta.get("reasoning") or delta.get("reasoning_content"), delta.get("content")
        return "".join(text for text in texts if isinstance(text, str))


def wire(api: str, model: str = "", stream: bool = False, asked: Asked | None = None) -> Wire:
    """Return the wire of an API. OpenAI's always stream: their answers have no timings."""
    if api in OTHERS:
        return OTHERS[api](model, asked)
    return Streaming() if stream else Plain()


OTHERS = {"openai": OpenAI, "chat": Chat}


def events(reply: Reply) -> list[tuple[float, Any]]:
    """Return (instant, JSON) of each event. Raises Unreadable, also without [DONE]."""
    arrived: list[tuple[float, Any]] = []
    rest = b""
    for at, data in reply.pieces:
        *lines, rest = (rest + data.replace(b"\r", b"\n")).split(b"\n")
        for line in lines:
            content = data_of(line)
            if content == DONE:
                if not arrived:
                    raise Unreadable("a stream without events")
                return arrived
            if content is not None:
                arrived.append((at, event_of(content)))
    if arrived and data_of(rest) == DONE:  # its line may end with the answer
        return arrived
    raise cut_off(b"" if arrived else reply.body)


def data_of(line: bytes) -> bytes | None:
    """Return what a stream's line has of an event; None if nothing."""
    line = line.removeprefix(BYTE_ORDER_MARK)
    return line[5:].strip() if line.startswith(b"data:") else None


def event_of(content: bytes) -> Any:
    """Return the JSON of an event. Raises Unreadable, for an error too."""
    try:
        event = parse(content)
    except ValueError:
        raise Unreadable(f"an event that is not JSON: {content[:80]!r}") from None
    if is_error(event):
        raise Unreadable(f"the stream ended with an error: {message(event)}")
    return event


def cut_off(other: bytes) -> Unreadable:
    """Return the error of a stream that ended early. other: an answer that is no stream."""
    if other.strip() and b"data:" not in other:
        return Unreadable(f"no stream, but {refusal(200, other)}")
    return Unreadable("the stream ended before [DONE]")


def is_error(body: Any) -> bool:
    return isinstance(body, dict) and bool(body.get("error") or body.get("object") == "error")


def message(body: Any) -> str:
    """Return the message of an error, in any form that servers use."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return utf8(str(error.get("message", error) if isinstance(error, dict) else error)[:500])


def utf8(text: str) -> str:
    """Return a text that can be written: JSON may hold halves of surrogate pairs, which cannot."""
    return text.encode(errors="replace").decode()


def refusal(status: int, body: bytes, location: str = "") -> str:
    """Describe an answer with a status other than 200, in a sentence. location: its header."""
    if 300 <= status < 400 and location:
        return f"{status} The server is at {location[:200]}; give that address"
    try:
        return f"{status} {message(parse(body))}".strip()
    except ValueError:
        return f"{status} {body[:200].decode(errors='replace')}".strip()


def _checked(timings: Any) -> Json:
    """Return `timings` whose values are numbers. Raises ValueError."""
    return Timings.model_validate(timings, strict=True).model_dump(exclude_unset=True)


def _answer(
    reply: Reply,
    usage: Any,
    first: float,
    last: float,
    gaps: Sequence[float],
    timings: Json | None,
    text: str,
) -> Outcome:
    stamps = reply.scheduled_at, reply.sent_at, reply.answered_at, first, last
    tokens = Usage.model_validate(usage)
    n_tokens = tokens.prompt_tokens, tokens.completion_tokens
    return Outcome(reply.request, *stamps, *n_tokens, gaps, timings, text)


def _says(value: Any) -> bool:
    """Return whether JSON has a text that is not empty."""
    if isinstance(value, dict | list):
        return any(map(_says, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and value != ""


def _gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]
