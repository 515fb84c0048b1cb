"""Answers of servers, in the forms that occur, as the client reads them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from client.traces import Request
from client.wire import Asked, Chat, OpenAI, Plain, Reply, Streaming, Unreadable, refusal, wire

ASK = Request(id=7, at=1.0, prompt="hi", num_tokens=3, seed=5)


def reply(*pieces: tuple[float, bytes]) -> Reply:
    return Reply(ASK, scheduled_at=1.0, sent_at=1.5, pieces=pieces)


def chunk(text: str, finish: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}], **more})


def event(body: Any) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


USED = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
USAGE = event({"choices": [], "usage": USED})
DONE = b"data: [DONE]\n\n"


def test_a_plain_answers_tokens_are_placed_by_the_servers_timings() -> None:
    timings = {
        "queue_s": 0.2, "ttft_s": 0.5, "decode_s": 1.0, "held_s": 0.1, "e2e_s": 1.6,
        "itl_s": [0.4, 0.6],
    }  # fmt: skip
    body = {"completion": "abc", "usage": USED, "timings": timings}
    answer = Plain().read(reply((3.2, json.dumps(body).encode())))
    assert (answer.request.id, answer.text) == (7, "abc")
    assert (answer.prompt_tokens, answer.completion_tokens) == (2, 3)
    assert answer.e2e_s == pytest.approx(1.7) and answer.sent_at - answer.scheduled_at == 0.5
    # the server answered 1.1 s after the first token, and so did this client hear of it
    assert (answer.ttft_s, answer.tpot_s) == pytest.approx((0.6, 0.5))
    assert answer.itl_s == [0.4, 0.6]


def test_a_streams_tokens_are_where_this_client_read_them() -> None:
    pieces = [
        (2.0, b'data: {"index": 0, "text": "a", "tokens": 1}\n\ndata: {"ind'),
        (2.5, b'ex": 0, "text": "bc", "tokens": 2}\n\n'),
        (2.6, event({"usage": USED, "timings": {"queue_s": 0.1}}) + DONE),
    ]
    answer = Streaming().read(reply(*pieces))
    assert answer.text == "abc" and answer.timings == {"queue_s": 0.1}
    assert (answer.first_token_at, answer.last_token_at, answer.ended_at) == (2.0, 2.5, 2.6)
    assert answer.tpot_s == 0.25 and answer.itl_s == [0.5]


@pytest.mark.parametrize("pieces", [
    pytest.param([(2.0, chunk("a")), (2.5, chunk("bc", "length")), (2.6, USAGE + DONE)], id="ours"),
    pytest.param([(2.0, chunk("a")), (2.5, chunk("bc")), (2.6, chunk("", "length")),
                  (2.7, USAGE), (2.7, DONE)], id="an empty last chunk"),
    pytest.param([(2.0, chunk("a", usage=None)), (2.5, chunk("bc", usage=USED)), (2.6, DONE)],
                 id="usage in every chunk"),
    pytest.param([(2.0, b": ping\r\n\r\n" + chunk("a").replace(b"\n", b"\r\n")),
                  (2.5, chunk("bc")[:9]), (2.5, chunk("bc")[9:]), (2.6, USAGE + DONE)],
                 id="comments, CRLF, pieces"),
    pytest.param([(2.0, chunk("a").replace(b"data: ", b"data:")), (2.5, chunk("bc")),
                  (2.6, USAGE + DONE + b"data: never read")], id="no space"),
    pytest.param([(2.0, chunk("a")), (2.5, chunk("bc")), (2.6, USAGE + DONE.strip())],
                 id="no line end after the last event"),
    pytest.param([(2.0, b"\xef\xbb\xbf" + chunk("a").replace(b"\n", b"\r")), (2.5, chunk("bc")),
                  (2.6, USAGE + DONE)], id="a byte order mark, CR alone"),
    pytest.param([(2.0, chunk("a", "")), (2.2, chunk("", "")),
                  (2.5, chunk("bc", "length", usage=USED)), (2.6, DONE)],
                 id="TGI, an empty reason, a token that decodes to nothing"),
    # tokens that decode to nothing
    pytest.param([(2.0, chunk("", "length")), (2.6, USAGE + DONE)], id="one empty chunk"),
    pytest.param([(2.0, USAGE), (2.6, DONE)], id="usage alone"),
    pytest.param([(2.0, chunk("", usage=None)), (2.0, chunk("", "length")), (2.6, USAGE + DONE)],
                 id="empty chunks"),
])  # fmt: skip
def test_openais_chunks_in_the_forms_that_occur(pieces: list[tuple[float, bytes]]) -> None:
    answer = OpenAI("m").read(reply(*pieces))
    assert (answer.prompt_tokens, answer.completion_tokens) == (2, 3) and answer.text in ("abc", "")
    assert (answer.first_token_at, answer.last_token_at) == (2.0, 2.5 if answer.text else 2.0)
    assert sum(answer.itl_s) == answer.last_token_at - 2.0 and answer.timings is None
    assert answer.ended_at == pieces[-1][0]
    assert answer.tpot_s == sum(answer.itl_s) / 2, "tokens from usage: three, not two chunks"


def said(finish: str | None = None, used: Any = None, **delta: Any) -> bytes:
    """A chunk of a chat. used: usage in it, as well."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return event(
        {"object": "chat.completion.chunk", "choices": [choice]} | ({"usage": used} if used else {})
    )


@pytest.mark.parametrize("pieces", [
    pytest.param([(1.9, said(role="assistant", content="")), (2.0, said(content="a")),
                  (2.5, said("length", content="bc")), (2.6, USAGE + DONE)], id="vLLM"),
    pytest.param([(1.9, said(role="assistant", content="")), (2.0, said(reasoning="a")),
                  (2.4, said(content="", reasoning=None)), (2.5, said("length", content="bc")),
                  (2.6, USAGE + DONE)], id="vLLM, reasoning"),
    pytest.param([(2.0, said(reasoning="a", reasoning_content="a")), (2.5, said(content="bc")),
                  (2.6, said("length")), (2.6, USAGE + DONE)], id="vLLM 0.11, of both names"),
    pytest.param([(2.0, said(role="assistant", content="a")),
                  (2.5, said("length", role="assistant", content="bc")),
                  (2.6, USAGE + DONE)], id="TGI"),
    pytest.param([(1.9, said(role="assistant", content=None)), (2.0, said(reasoning_content="a")),
                  (2.5, said(content="bc")), (2.6, said("length", USED)), (2.6, DONE)],
                 id="llama.cpp, usage in the last chunk"),
    pytest.param([(1.9, said(role="assistant", content=None)), (2.0, said(content="a")),
                  (2.5, said(content="bc")), (2.6, said("length")), (2.6, USAGE + DONE)],
                 id="llama.cpp"),
])  # fmt: skip
def test_a_chats_token_comes_with_the_first_delta_that_says_something(
    pieces: list[tuple[float, bytes]],
) -> None:
    answer = Chat("m").read(reply(*pieces))
    assert (answer.first_token_at, answer.last_token_at, answer.itl_s) == (2.0, 2.5, [0.5])
    assert (answer.prompt_tokens, answer.completion_tokens, answer.text) == (2, 3, "abc")
    with pytest.raises(Unreadable, match="is another --api meant"):
        OpenAI("m").read(reply(*pieces))
    with pytest.raises(Unreadable, match="is another --api meant"):
        Chat("m").read(reply((2.0, chunk("a")), (2.6, USAGE + DONE)))


CALL = [{"index": 0, "function": {"arguments": "{"}}]
EMPTY = [{"index": 1, "id": None, "function": {"arguments": ""}}]


@pytest.mark.parametrize("delta", [
    {"tool_calls": CALL}, {"refusal": "no"}, {"thinking": "so"}, {"function_call": {"name": "f"}},
    {"content": [{"type": "text", "text": "a"}]},
])  # fmt: skip
def test_what_a_chat_says_under_any_name_are_tokens(delta: dict[str, Any]) -> None:
    """All tokens of a call were taken to come with the role: TTFT 2 ms for 500, and no TPOT."""
    begun = said(role="assistant", content="", refusal=None, tool_calls=EMPTY)
    pieces = [(1.6, begun), (2.0, said(**delta)), (2.5, said(**delta)), (3.0, said("stop"))]
    answer = Chat("m").read(reply(*pieces, (3.0, USAGE + DONE)))
    assert (answer.first_token_at, answer.last_token_at, answer.itl_s) == (2.0, 2.5, [0.5])
    assert (answer.ttft_s, answer.tpot_s, answer.e2e_s) == (0.5, 0.25, 1.5)


def test_where_a_chat_shows_no_token_no_first_one_is_known() -> None:
    pieces = [(1.6, said(role="assistant", content="")), (3.0, said("stop")), (3.0, USAGE + DONE)]
    answer = Chat("m").read(reply(*pieces))
    assert math.isnan(answer.ttft_s) and math.isnan(answer.tpot_s) and answer.itl_s == []
    assert (answer.completion_tokens, answer.e2e_s, answer.text) == (3, 1.5, "")


NO_TOKEN = event({"choices": [], "usage": USED | {"completion_tokens": 0}})


@pytest.mark.parametrize(("data", "sentence"), [
    (chunk("a") + DONE, "without usage"),
    (chunk("a") + USAGE, r"ended before \[DONE\]"),
    (chunk("a") + event({"error": {"message": "no memory"}}) + DONE, "an error: no memory"),
    (b"data: nonsense\n\n" + DONE, "not JSON"),
    (DONE, "without events"),
    (NO_TOKEN + DONE, "without a token"),
    (event({"index": 0, "text": "a"}) + DONE, "is another --api meant?"),
    (event([1]) + DONE, "is another --api meant?"),
    (b"", r"ended before \[DONE\]"),
])  # fmt: skip
def test_an_incomplete_answer_is_an_error_in_a_sentence(data: bytes, sentence: str) -> None:
    with pytest.raises(Unreadable, match=sentence):
        OpenAI("m").read(reply((2.0, data)))


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"usage": {}}', b'{"usage": 1, "timings": 2}', b"<html>"]
)
def test_a_plain_answer_in_another_form_names_the_other_api(data: bytes) -> None:
    with pytest.raises(Unreadable, match="is --api openai meant"):
        Plain().read(reply((2.0, data)))
    with pytest.raises(Unreadable):
        Streaming().read(reply((2.0, data)))


def test_each_api_asks_for_the_same_tokens_in_its_own_words() -> None:
    plain = {"prompt": "hi", "num_tokens": 3, "temperature": 0.0, "seed": 5}
    assert wire("inference").body(ASK) == plain
    assert wire("inference", stream=True).body(ASK) == plain | {"stream": True}
    assert wire("openai", "gpt2").body(ASK) == {
        "model": "gpt2", "prompt": "hi", "max_tokens": 3, "temperature": 0.0, "seed": 5,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    ids = Request(id=0, at=0, prompt_ids=[1, 2], num_tokens=3, model="a", user="b", priority=1)
    openai, ours = wire("openai", "gpt2").body(ids), wire("inference").body(ids)
    assert openai["prompt"] == ours["prompt_ids"] == [1, 2]
    more = {"model": "a", "user": "b", "priority": 1}.items()  # which some servers refuse as null
    assert more <= ours.items() and more <= openai.items()
    asked = Asked("chat", extra={"min_p": 0.1, "max_tokens": 4, "ignore_eos": None})
    assert wire("chat", "gpt2", asked=asked).body(ids) == {
        "model": "a", "messages": [{"role": "user", "content": "two three"}], "max_tokens": 4,
        "temperature": 0.0, "user": "b", "priority": 1, "min_p": 0.1,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


@pytest.mark.parametrize(("body", "sentence"), [
    (b'{"error": {"message": "too long"}}', "400 too long"),
    (b'{"error": "too long"}', "400 too long"),
    (b'{"message": "too long", "object": "error"}', "400 too long"),
    (b"Bad Request", "400 Bad Request"),
    (b"", "400"),
])  # fmt: skip
def test_a_refusal_is_in_the_server_s_words(body: bytes, sentence: str) -> None:
    assert refusal(400, body) == sentence
