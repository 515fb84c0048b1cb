"""Odd answers: each is one failed request; the load goes on, and all results are kept."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from app import create_app
from client import calls, client, runs
from client import measure as measuring
from client.load import Watch, replay
from client.measure import Target, judged, measure, with_requests
from client.outcomes import Outcome
from client.results import OF_FILE, SHOWN_OF_STATS
from client.traces import Request, Trace, save_trace
from client.wire import Chat, OpenAI, Plain, Reply, Streaming, Unreadable, Wire, message
from generate.auto import build
from generate.loading import load_generator
from server.engine import LocalEngine
from tests.counts import examples
from tests.stub import Handler, Stub, stub

ASK = Request(id=0, at=0.0, prompt="hi", num_tokens=3)
DEEP = "[" * 100_000
TIMES = {"queue_s": 0.1, "ttft_s": 0.2, "decode_s": 0.3, "held_s": 0.0, "e2e_s": 0.5}
TIMINGS = {**TIMES, "itl_s": [0.1, 0.2], "arrived_at": 1.7e9, "draft_tokens": 0}
USAGE = {"prompt_tokens": 2, "completion_tokens": 3}
PLAIN = {"completion": "abc", "usage": USAGE, "timings": TIMINGS}
STREAM = [{"text": "abc"}, {"usage": USAGE, "timings": TIMINGS}]
CHUNKS = [
    {"choices": [{"index": 0, "text": "abc", "finish_reason": "length"}]},
    {"choices": [], "usage": USAGE},
]
CHATS = [
    {"choices": [{"index": 0, "delta": {"reasoning": "a", "content": "bc"}}]},
    {"choices": [], "usage": USAGE},
]
ODD_TEXTS = [
    "NaN", "Infinity", "-Infinity", "1e400", "1e308", "-1", "0", "1.5", "2147483648", "9" * 30,
    "9" * 5000, '"abc"', '"3"', "true", "null", "[]", "{}", "[[]]", DEEP, "[1,", '"\\ud800"',
    '"\\u2028"', '{"error": "x"}', '{"message": "\\udc00"}',
]  # fmt: skip
ODD = st.sampled_from(ODD_TEXTS) | st.integers().map(str)
MARK = 987_654_321  # stands for an odd value, whose text no encoder writes


def changed(value: Any, data: st.DataObject) -> Any:
    """Return JSON with MARK in one place, of its own values or beside them."""
    if not value or not isinstance(value, (dict, list)) or not data.draw(st.integers(0, 5)):
        return MARK
    keys = [*value] if isinstance(value, dict) else [*range(len(value))]
    key = data.draw(st.sampled_from(keys + ["error"] * isinstance(value, dict)))
    if isinstance(value, list):
        return [changed(each, data) if i == key else each for i, each in enumerate(value)]
    return value | {key: changed(value.get(key), data)}


def as_stream(events: list[str], end: str) -> bytes:
    return "".join(f"data: {event}{end}{end}" for event in (*events, "[DONE]")).encode()


def saved(answer: Outcome) -> None:
    """Measure and save an answer as that of a load."""
    result = judged(Trace.of([ASK]), [answer], {"e2el": 100.0})
    json.dumps(with_requests(result, [answer]).json(OF_FILE), allow_nan=False)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("wire", [Plain(), Streaming(), OpenAI("m"), Chat("m")])
@examples(1000)
@given(data=st.data(), odd=ODD, cut=st.integers(-9, 400), end=st.sampled_from(["\n", "\r\n", "\r"]))
def test_any_answer_is_read(wire: Wire, data: st.DataObject, odd: str, cut: int, end: str) -> None:
    """An event of 100,000 `[`, half a surrogate pair, and a number of tokens that was NaN or had 30
    digits ended the load; a negative one was counted. An answer is saved, or refused in a sentence.
    """
    whole: dict[Any, list[Any]] = {Plain: [PLAIN], Streaming: STREAM, OpenAI: CHUNKS, Chat: CHATS}
    values = [*whole[type(wire)]]
    i = data.draw(st.integers(0, len(values) - 1))
    values[i] = changed(values[i], data)
    texts = [json.dumps(each).replace(str(MARK), odd) for each in values]
    body = texts[0].encode() if type(wire) is Plain else as_stream(texts, end)
    if cut > 0 and data.draw(st.booleans()):
        body = data.draw(st.sampled_from([body[:cut], body[:cut] + b"\xff" + body[cut:]]))
    body = data.draw(st.sampled_from([b"", b"\xef\xbb\xbf", b"\n"])) + body
    half = len(body) // 2
    reply = Reply(ASK, 0.0, 0.5, [(1.0, body[:half]), (1.5, body[half:])])
    try:
        answer = wire.read(reply)
    except Unreadable as refused:
        assert len(str(refused)) > 10
        str(refused).encode()
    else:
        saved(answer)
        tokens = answer.completion_tokens, answer.prompt_tokens
        assert 0 <= min(tokens) <= max(tokens) < 2**31


def test_a_wire_that_fails_fails_one_request() -> None:
    class Misreading(OpenAI):
        def read(self, reply: Reply) -> Any:
            return [][0] if reply.request.id else super().read(reply)

    requests = [ASK.model_copy(update={"id": i}) for i in range(3)]
    with stub() as server:
        outcomes = replay(server.url, requests, Misreading("stub"))
    assert [each.error for each in outcomes] == ["", *2 * ["IndexError: list index out of range"]]


@pytest.mark.parametrize(("body", "sentence"), [
    (b'{"error": {"message": "no memory"}}', "200.* no memory"),
    (b'{"object": "error", "message": "no memory"}', "200.* no memory"),
    (b'{"error": "\\ud800 is odd"}', r"200.* \? is odd"),
])  # fmt: skip
def test_an_error_with_status_200_fails_in_the_server_s_words(body: bytes, sentence: str) -> None:
    for wire in (Plain(), Streaming(), OpenAI("m")):
        with pytest.raises(Unreadable, match=sentence):
            wire.read(Reply(ASK, 0.0, 0.0, [(1.0, body)]))
    event = [(1.0, b"data: " + body + b"\n\n")]
    with pytest.raises(Unreadable, match=r"error: .*(no memory|is odd)"):
        OpenAI("m").read(Reply(ASK, 0.0, 0.0, event))
    assert message(json.loads(body)).encode()


HEAD = "HTTP/1.1 200 OK\r\nConnection: close\r\n"
RAW = [  # whole answers, as they are sent
    HEAD + "Content-Type: application/json\r\n\r\n" + DEEP,
    HEAD + "Content-Type: text/html\r\n\r\n<html>hello</html>",
    HEAD + "Content-Type: x; charset=nonsense\r\n\r\n\r\n",
    HEAD + "Content-Encoding: gzip\r\n\r\nno gzip",
    HEAD + "Content-Encoding: nonsense\r\n\r\nx",
    HEAD + "Content-Length: 999\r\n\r\nshort",
    HEAD + "Content-Length: -5\r\n\r\nx",
    HEAD + "Transfer-Encoding: chunked\r\n\r\nzz\r\nx",
    HEAD + "\xff\xfe: \xff\r\n\r\nx",
    HEAD + "X: " + "x" * 100_000 + "\r\n\r\nx",
    "HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n",
    'HTTP/1.1 500 \xff\r\nConnection: close\r\n\r\n{"error": {"message": "\\udcff"}}',
    "HTTP/1.1 418 x\r\nConnection: close\r\n\r\n" + DEEP,
    "HTTP/9.9 200 OK\r\n\r\n",
    "nonsense\r\n\r\n",
    "\x00",
    "",
    *(
        f"HTTP/1.1 {status} Moved\r\nConnection: close\r\nLocation: {location}\r\n\r\n"
        for status in (301, 302, 303, 307, 308)
        for location in ("", "/v1/completions", "ftp://x/", "http://[", "http://\xff/", "//:0/")
    ),
]


class Raw(Handler):
    """Answers a prompt `raw N` with the N-th of the server's raw answers in place of a stream."""

    server: RawStub

    def _stream(self, stub: Stub, tokens: int) -> None:
        _, _, n = str(stub.bodies[-1]["prompt"]).partition("raw ")
        if not n:
            super()._stream(stub, tokens)
            return
        self.wfile.write(self.server.raw[int(n)].encode("latin-1"))
        self.close_connection = True


class RawStub(Stub):
    def __init__(self, raw: list[str]):
        super().__init__()
        self.RequestHandlerClass = Raw
        self.raw = raw


@pytest.mark.usefixtures("undrawn")
def test_a_load_of_odd_answers_goes_on_and_all_of_it_is_saved(tmp_path: Path) -> None:
    prompts = [prompt for i in range(len(RAW)) for prompt in (f"raw {i}", "good")]
    requests = [  # one after another: the stub knows a request by its last body
        Request(id=i, at=0.0, users=1, prompt=prompt, num_tokens=2)
        for i, prompt in enumerate(prompts)
    ]
    save_trace(trace := tmp_path / "trace.jsonl", requests)
    with stub(RawStub, raw=RAW) as server:
        words = f"--url {server.url} --api openai --quiet --timeout 20 --trace {trace}"
        out = ["--out", str(tmp_path / "run"), "--figure", str(tmp_path / "figure.png")]
        result = client.load(server.url, client.parse([*words.split(), *out]), Console())
    assert (result.completed, result.failed) == (len(RAW), len(RAW))
    kept = runs.load(tmp_path / "run").results[0]["stub"].requests
    assert ["text" in request for request in kept] == [False, True] * len(RAW)
    assert all(request["error"] for request in kept[::2])


@dataclasses.dataclass(frozen=True, slots=True)
class Reporting(Target):
    """A server of ours that has answered, and reports as it likes."""

    def replay(self, requests: Sequence[Request], timeout_s: float, watch: Watch) -> list[Outcome]:
        return [Outcome(r, 0.0, 0.0, 1.0, error="no") for r in requests]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@examples(1000)
@given(data=st.data(), odd=ODD, which=st.sampled_from(["/stats", "/"]))
def test_a_load_is_kept(data: st.DataObject, odd: str, which: str, reports: dict[str, Any]) -> None:
    """Statistics of another form ended in a traceback, after the load and before it was saved."""
    text = json.dumps(changed(reports[which], data)).replace(str(MARK), odd)

    def get(url: str, *_: object, **__: object) -> dict[str, Any]:
        path = url.removeprefix("http://x").partition("?")[0] or "/"
        try:
            return calls._object((text if path == which else json.dumps(reports[path])).encode())
        except ValueError:
            raise calls.ServerError("no JSON") from None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "get", get)
        patch.setattr(measuring, "post", lambda *_, **__: None)
        result, outcomes = measure(Reporting("a", "http://x", Plain()), [ASK], {}, 1, Watch())
    assert result.failed == 1
    saved = with_requests(result, outcomes).json(OF_FILE)
    json.dumps(saved, ensure_ascii=False, allow_nan=False).encode()
    if server := result.server:
        assert all(isinstance(server[key], (int, float)) for key in SHOWN_OF_STATS)


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    config = build("static", {"model": "fake"}, {})
    http = create_app(config, server := LocalEngine(config, load_generator)).test_client()
    http.post("/inference", json={"prompt": "hi", "num_tokens": 3})
    got = {path: http.get(f"{path}?iterations=1").get_json() for path in ("/stats", "/")}
    server.close()
    return got


@pytest.mark.parametrize(("body", "why"), [
    (b"", "before .DONE."), (b'{"error": {"message": "no memory"}}', "no memory"),
    (b'data: {"text": "a"}\n\n', "before .DONE."),
    (b"data: " + DEEP.encode() + b"\n\n", "not JSON"),
    (b"data: [1]\n\n", "form expected"), (b'data: {"text": 5}\n\n', "form expected"),
    (b'\xef\xbb\xbfdata: {"text": "a\\ud800"}\r\n\r\ndata:[DONE]\r\n', ""),
])  # fmt: skip
def test_one_prompt_gets_a_text_or_a_sentence(body: bytes, why: str) -> None:
    """An error with status 200, and a stream that broke off, ended as if all were well."""
    shown: list[str] = []
    ask = {"model": "stub", "max_tokens": 1, "prompt": "raw 0"}
    with stub(RawStub, raw=[f"{HEAD}\r\n" + body.decode("latin-1")]) as server:
        if why:
            with pytest.raises(calls.ServerError, match=why):
                calls.stream(server.url, ask, 9.0, shown.append)
        else:
            calls.stream(server.url, ask, 9.0, shown.append)
            assert shown == ["a?"]
