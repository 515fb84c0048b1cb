"""OpenAI's routes: METRICS section 3's bodies against strict parsers, and the official client
against a real server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from flask.testing import FlaskClient
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict

from config import MODES
from scheduling.inference import Generator, Inference, Iteration
from tests.counts import SOME_MODES
from tests.servers import Serve
from tests.sse import events, text_of

ASK: dict[str, Any] = {"model": "fake", "prompt": "hi", "max_tokens": 6, "seed": 3}
FORMS = {
    "text": "hi",
    "texts": ["hi", "there"],
    "ids": [104, 105],
    "lists of ids": [[104, 105], [116, 104, 101, 114, 101]],
}


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class PromptTokensDetails(Strict):
    cached_tokens: int


class Usage(Strict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Choice(Strict):
    index: int
    text: str
    logprobs: None
    finish_reason: str | None


class Completion(Strict):
    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class Chunk(Strict):
    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class Letters(Generator):
    """An engine that spells a text, token by token, whoever asks."""

    def __init__(self, text: bytes | list[int]) -> None:
        self.text = list(text)

    def generate(self, iteration: Iteration) -> list[int]:
        return [
            self.text[len(row.inference.tokens) % len(self.text)]
            for row in iteration.rows
            if row.samples
        ]


@pytest.fixture
def spelling(client_of: Callable[..., FlaskClient]) -> Callable[[bytes | list[int]], FlaskClient]:
    return lambda text: client_of(engine=lambda: Letters(text))


def plain(client: FlaskClient, body: dict[str, Any]) -> Completion:
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.data
    return Completion.model_validate_json(response.data)


def streamed(client: FlaskClient, body: dict[str, Any]) -> list[Chunk]:
    response = client.post("/v1/completions", json=body | {"stream": True})
    assert response.status_code == 200, response.data
    return [Chunk.model_validate(chunk) for chunk in events(response.data)]


def test_no_two_answers_have_one_id_whichever_server_gives_them(
    client_of: Callable[..., FlaskClient],
) -> None:
    servers = client_of(), client_of()
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    ids = [plain(client, ASK).id for client in servers for _ in range(3)]
    ids += [client.post("/v1/chat/completions", json=chat).get_json()["id"] for client in servers]
    ids += [streamed(client, ASK)[0].id for client in servers]
    assert len(set(ids)) == 10 and ids[6].startswith("chatcmpl-")


def test_tokens_of_a_text_are_those_that_its_completion_goes_by(
    client_of: Callable[..., FlaskClient],
) -> None:
    client = client_of()

    def told(**body: Any) -> Any:
        return client.post("/tokenize", json=body).get_json()

    text = "user: hi\nassistant:"
    ids = [*text.encode()]
    expected = {"count": 19, "max_model_len": 1024, "tokens": ids, "token_strs": None}
    assert (
        told(prompt=text) == told(prompt=text, model="fake", add_special_tokens=False) == expected
    )
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert told(messages=chat["messages"], prompt=None) == expected
    usage = client.post("/v1/chat/completions", json=chat).get_json()["usage"]
    assert usage["prompt_tokens"] == expected["count"]
    assert told(prompt="")["tokens"] == []
    assert told(prompt="x" * 2000)["count"] == 2000, "by how much it is too long can be asked"
    wrong: dict[str | None, dict[str, Any]] = {
        "model": {"prompt": "hi", "model": "another"},
        "prompt": {"prompt": "x" * 131_073},
        "messages": {"messages": []},
        "return_token_strs": {"prompt": "hi", "return_token_strs": True},
        None: {"prompt": "hi", "messages": chat["messages"]},
    }
    for field, body in wrong.items():
        assert told(**body)["error"]["param"] == field


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("mode", SOME_MODES)
def test_every_form_of_a_prompt_is_completed_in_every_mode_plain_and_streaming(
    mode: str, form: str, client_of: Callable[..., FlaskClient]
) -> None:
    client = client_of(mode)
    body = ASK | {"prompt": FORMS[form]}
    answer = plain(client, body)
    n = 1 if form in ("text", "ids") else 2
    assert [choice.index for choice in answer.choices] == list(range(n))
    assert (
        answer.object == "text_completion"
        and answer.model == "fake"
        and answer.id.startswith("cmpl-")
    )
    assert answer.usage.completion_tokens == 6 * n and answer.usage.prompt_tokens == (
        2 if n == 1 else 7
    )
    *chunks, last = streamed(client, body | {"stream_options": {"include_usage": True}})
    assert last.choices == [] and last.usage == answer.usage
    assert len({chunk.id for chunk in chunks}) == 1 and all(chunk.usage is None for chunk in chunks)
    for choice in answer.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
        assert all(part.text for part in parts), "no empty chunk, at the end either"
    inference = client.post(
        "/inference", json={"prompt": "hi", "num_tokens": 6, "seed": 3, "temperature": 1.0}
    ).get_json()
    assert answer.choices[0].text == inference["completion"], "the routes differ in form alone"


@pytest.mark.parametrize(
    "body",
    [
        # as vLLM's benchmark, guidellm, the OpenAI library, LangChain and llm-perf send them
        {
            "model": "fake",
            "prompt": "hi",
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": 6,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "best_of": 1,
        },
        {
            "model": "fake",
            "prompt": "hi",
            "max_tokens": 6,
            "stream": True,
            "ignore_eos": True,
            "stop": None,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
        {
            "model": "fake",
            "prompt": ["hi"],
            "max_tokens": 6,
            "n": 1,
            "top_p": 1,
            "presence_penalty": 0,
            "stream": False,
            "frequency_penalty": 0,
            "logit_bias": {},
            "user": "me",
            "suffix": None,
            "echo": False,
            "top_k": -1,
        },
        {
            "prompt": "hi",
            "max_tokens": 6,
            "min_tokens": 6,
            "temperature": 1,
            "some_new_field": {"x": [1]},
            "seed": None,
            "stream_options": None,
        },
        {
            "prompt": "hi",
            "stop": ["\n\n"],
            "top_k": 5,
            "top_p": 0.9,
            "seed": 1,
            "timeout_s": 30,
            "max_tokens": 6,
        },
    ],
    ids=range(5),
)
def test_the_bodies_that_real_clients_send_are_answered(
    body: dict[str, Any], client_of: Callable[..., FlaskClient]
) -> None:
    response = client_of().post("/v1/completions", json=body)
    assert response.status_code == 200, response.data
    if body.get("stream"):
        *chunks, last = (Chunk.model_validate(chunk) for chunk in events(response.data))
        assert (
            last.usage
            and last.usage.completion_tokens == 6
            and chunks[-1].choices[0].finish_reason == "length"
        )
    else:
        assert Completion.model_validate_json(response.data).usage.completion_tokens == 6


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": 0}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"min_tokens": 7}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop_token_ids": [257]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"50256": -100}}, "logit_bias"),
        ({"suffix": "x"}, "suffix"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "6"}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": -2}, "seed"),
        ({"top_k": 2**63}, "top_k"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, 257]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": "x" * 900_000}, "prompt"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"model": 5}, "model"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_what_is_not_offered_is_a_400_that_names_the_field(
    client_of: Callable[..., FlaskClient], body: dict[str, Any], param: str
) -> None:
    client = client_of()
    response = client.post("/v1/completions", json=ASK | body)
    error = response.get_json()["error"]
    assert response.status_code == 400 and set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param and error["type"] == "invalid_request_error" and error["message"]
    assert client.get("/stats").get_json()["invalid"] == 1


@pytest.mark.parametrize("mode", ["static", "windowed"])
def test_several_prompts_are_a_group_that_is_never_split(
    mode: str, client_of: Callable[..., FlaskClient]
) -> None:
    client = client_of(mode, max_batch_size=4)
    assert len(plain(client, ASK | {"prompt": ["a"] * 4}).choices) == 4
    assert client.get("/stats").get_json()["largest_batch"] == 4
    response = client.post("/v1/completions", json=ASK | {"prompt": ["a"] * 5})
    assert (
        response.status_code == 400
        and "Maximum batch size exceeded: 5 completions" in response.get_json()["error"]["message"]
    )


def test_a_stop_string_ends_the_text_before_it_and_the_row_with_it(
    spelling: Callable[..., FlaskClient],
) -> None:
    client = spelling(b"one two three ")
    body = {"prompt": "x", "max_tokens": 200, "stop": ["thr", "two t"]}
    answer = plain(client, body)
    assert answer.choices[0].text == "one " and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 9, (
        "the row left with the token that completed the stop string"
    )
    chunks = streamed(client, body)
    assert (
        "".join(chunk.choices[0].text for chunk in chunks) == "one "
        and chunks[-1].choices[0].finish_reason == "stop"
    )
    assert plain(client, body | {"stop": "two"}).choices[0].text == "one "
    assert plain(client, body | {"stop": "four"}).choices[0].finish_reason == "length"
    echoed = plain(client, body | {"prompt": "two thr", "echo": True})
    assert echoed.choices[0].text == "two throne ", "an echoed prompt is not searched"
    assert (
        client.post("/inference", json={"prompt": "x", "num_tokens": 20}).get_json()["completion"]
        == "one two three one tw"
    )


def test_end_of_text_ends_a_completion_here_and_not_on_inference(
    spelling: Callable[..., FlaskClient],
) -> None:
    client = spelling([104, 105, 256, 33])
    answer = plain(client, ASK)
    assert answer.choices[0].text == "hi" and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 3
    chunks = streamed(client, ASK)
    assert (
        "".join(chunk.choices[0].text for chunk in chunks) == "hi"
        and chunks[-1].choices[0].finish_reason == "stop"
    )
    ignored = plain(client, ASK | {"ignore_eos": True})
    assert ignored.choices[0].finish_reason == "length" and ignored.usage.completion_tokens == 6
    assert (
        client.post("/inference", json={"prompt": "x", "num_tokens": 4}).get_json()["completion"]
        == "hi<|endoftext|>!"
    )
    log = client.get("/metrics").get_data(as_text=True)
    assert (
        'vllm:request_success_total{finished_reason="stop",mode="dynamic",model_name="fake"} 2.0'
        in log
    )


@pytest.mark.parametrize("mode", ["static", "windowed"])
def test_in_a_request_level_batch_a_stopped_row_is_idle_until_the_batch_ends(
    mode: str, client_of: Callable[..., FlaskClient]
) -> None:
    client = client_of(mode)
    letters = plain(client, ASK | {"prompt": ["a", "b"], "max_tokens": 20}).choices
    first, second = letters[0].text, letters[1].text
    only_first = next(first[i : i + 3] for i in range(3, 17) if first[i : i + 3] not in second)
    client.post("/stats/reset", json={})
    answer = plain(client, ASK | {"prompt": ["a", "b"], "max_tokens": 20, "stop": only_first})
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
    assert client.get("/stats").get_json()["idle_rows"] == 40 - answer.usage.completion_tokens > 0


def test_an_echoed_prompt_comes_first(client_of: Callable[..., FlaskClient]) -> None:
    client = client_of()
    answer = plain(client, ASK | {"echo": True, "prompt": ["hé", "there"]})
    assert [choice.text[:5] for choice in answer.choices][1] == "there" and answer.choices[
        0
    ].text.startswith("hé")
    chunks = [
        chunk.model_dump()
        for chunk in streamed(client, ASK | {"echo": True, "prompt": ["hé", "there"]})
    ]
    assert [text_of(chunks, i) for i in (0, 1)] == [choice.text for choice in answer.choices]


def test_a_stream_that_fails_ends_with_openais_error_and_done(
    client_of: Callable[..., FlaskClient],
) -> None:
    response = client_of().post(
        "/v1/completions", json=ASK | {"max_tokens": 1000, "timeout_s": 0.05, "stream": True}
    )
    *_, last = events(response.data)
    assert set(last) == {"error"} and last["error"]["type"] == "timeout_error"


def test_chat_is_the_messages_in_a_plain_template(client_of: Callable[..., FlaskClient]) -> None:
    client = client_of()
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": parts}]
    body = {"model": "fake", "messages": messages, "max_completion_tokens": 9, "seed": 1}
    answer = client.post("/v1/chat/completions", json=body).get_json()
    same = plain(
        client, {"prompt": "system: Be kind.\nuser: hello\nassistant:", "max_tokens": 9, "seed": 1}
    )
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": same.choices[0].text}
    assert answer["object"] == "chat.completion" and answer["usage"]["completion_tokens"] == 9
    chunks = events(client.post("/v1/chat/completions", json=body | {"stream": True}).data)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant" and all("role" not in delta for delta in deltas[1:])
    assert "".join(delta["content"] for delta in deltas) == same.choices[0].text
    rest = client.post("/v1/chat/completions", json={"messages": messages[:1]}).get_json()
    assert rest["usage"]["total_tokens"] == 1024, (
        "without a limit it runs to the end of the context, or of the text"
    )
    refused: list[Any] = [
        [],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"content": "x"}],
        [{"role": "user", "content": "x" * 1024}],
    ]
    for wrong in refused:
        error = client.post("/v1/chat/completions", json=body | {"messages": wrong})
        assert error.status_code == 400 and error.get_json()["error"]["param"] == "messages"


def test_models_and_a_model_that_is_not_here(client_of: Callable[..., FlaskClient]) -> None:
    client = client_of()
    listed = client.get("/v1/models").get_json()
    assert listed["object"] == "list" and len(listed["data"]) == 1
    assert set(listed["data"][0]) == {
        "id",
        "object",
        "created",
        "owned_by",
        "root",
        "max_model_len",
    }
    assert client.get("/v1/models/fake").get_json() == listed["data"][0]
    for response in (
        client.get("/v1/models/gpt-4"),
        client.post("/v1/completions", json=ASK | {"model": "gpt-4"}),
    ):
        error = response.get_json()["error"]
        assert (
            response.status_code == 404
            and error["code"] == "model_not_found"
            and "'fake'" in error["message"]
        )
    assert client.get("/stats").get_json()["invalid"] == 2


def test_a_full_queue_and_a_draining_server_have_openais_errors_too(
    client_of: Callable[..., FlaskClient],
) -> None:
    client = client_of(max_batch_size=1, max_waiting=0)
    manager = client.application.extensions["server"].manager
    manager.enqueue([Inference([0], 1000)])
    full = client.post("/v1/completions", json=ASK)
    assert (
        full.status_code == 429
        and full.headers["Retry-After"]
        and full.get_json()["error"]["type"] == "rate_limit_error"
    )
    manager.drain()
    assert client.post("/v1/completions", json=ASK).status_code == 503


# ---- the official client


@pytest.fixture(scope="module", params=MODES)
def url(request: pytest.FixtureRequest, shared_server: Serve) -> Iterator[str]:
    with shared_server(request.param, {"model": "demo"}) as found:
        yield f"{found}/v1"


PROMPT = "If the file"


def test_the_official_client_completes_and_streams(url: str) -> None:
    with OpenAI(base_url=url, api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["demo"] and client.models.retrieve(
            "demo"
        ).id == "demo"
        answer = client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=20, temperature=0
        )
        assert (
            answer.usage
            and answer.usage.completion_tokens == 20
            and answer.choices[0].finish_reason == "length"
        )
        stream = client.completions.create(
            model="demo",
            prompt=PROMPT,
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        *chunks, last = list(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
        assert last.usage == answer.usage and last.choices == []
        word = answer.choices[0].text.split()[1]
        stopped = client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=20, temperature=0, stop=word
        )
        assert stopped.choices[0].text == answer.choices[0].text.split(word)[0]
        assert stopped.choices[0].finish_reason == "stop"


def test_the_official_client_chats_and_sees_errors(url: str) -> None:
    with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": PROMPT}]
        answer = client.chat.completions.create(
            model="demo", messages=messages, max_tokens=12, temperature=0
        )
        assert answer.choices[0].message.role == "assistant"
        stream = client.chat.completions.create(
            model="demo", messages=messages, max_tokens=12, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == answer.choices[0].message.content and text
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model="demo", prompt=PROMPT, best_of=2)
        assert bad.value.param == "best_of" and bad.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt-4", prompt=PROMPT)
        with pytest.raises(openai.APIError, match="deadline"):
            ask = client.completions.create(
                model="demo",
                prompt=PROMPT,
                max_tokens=1000,
                stream=True,
                extra_body={"timeout_s": 0.2, "ignore_eos": True},
            )
            list(ask)


def test_the_official_async_client_streams_many_at_once(url: str) -> None:
    async def ask(client: AsyncOpenAI, seed: int) -> str:
        stream = await client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=10, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def both() -> tuple[list[str], list[str]]:
        async with AsyncOpenAI(base_url=url, api_key="none") as client:
            together = await asyncio.gather(*(ask(client, seed) for seed in range(8)))
            return together, [await ask(client, seed) for seed in range(8)]

    together, alone = asyncio.run(both())
    assert together == alone and len(set(together)) > 4
