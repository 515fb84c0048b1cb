"""OpenAI's routes, against the models of their answers and with the official client."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

from server.api.answers import Completion, CompletionChunk
from tests.servers import ClientOf, Serve, Spelling, events

ASK: dict[str, Any] = {"model": "fake", "prompt": "hi", "max_tokens": 6, "seed": 3}
FORMS = {
    "text": "hi", "texts": ["hi", "there"], "ids": [104, 105],
    "lists of ids": [[104, 105], [116, 104, 101, 114, 101]],
}  # fmt: skip


def plain(client: FlaskClient, body: dict[str, Any]) -> Completion:
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.data
    return Completion.model_validate_json(response.data, strict=True)


def streamed(client: FlaskClient, body: dict[str, Any]) -> list[CompletionChunk]:
    response = client.post("/v1/completions", json=body | {"stream": True})
    assert response.status_code == 200, response.data
    return [CompletionChunk.model_validate(chunk, strict=True) for chunk in events(response.data)]


def text(chunks: list[CompletionChunk]) -> str:
    return "".join(chunk.choices[0].text for chunk in chunks)


def test_no_two_answers_have_one_id_whichever_server_gives_them(client_of: ClientOf) -> None:
    servers = client_of(), client_of()
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    ids = [client.post("/v1/chat/completions", json=chat).get_json()["id"] for client in servers]
    assert ids[0].startswith("chatcmpl-")
    for client in servers:
        ids += [plain(client, ASK).id, plain(client, ASK).id, streamed(client, ASK)[0].id]
    assert len(set(ids)) == 8


def test_tokens_of_a_text_are_those_that_its_completion_goes_by(client_of: ClientOf) -> None:
    client = client_of()

    def tokenized(**body: Any) -> Any:
        return client.post("/tokenize", json=body).get_json()

    text = "user: hi\nassistant:"
    ids = [*text.encode()]
    expected = {"count": 19, "max_model_len": 1024, "tokens": ids, "token_strs": None}
    assert tokenized(prompt=text) == expected
    assert tokenized(prompt=text, model="fake", add_special_tokens=False) == expected
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert tokenized(messages=chat["messages"], prompt=None) == expected
    usage = client.post("/v1/chat/completions", json=chat).get_json()["usage"]
    assert usage["prompt_tokens"] == expected["count"]
    assert tokenized(prompt="")["tokens"] == []
    assert tokenized(prompt="x" * 2000)["count"] == 2000, "by how much it is too long can be asked"
    wrong: list[tuple[str | None, dict[str, Any]]] = [
        ("model", {"prompt": "hi", "model": "another"}), ("prompt", {"prompt": "x" * 131_073}),
        ("messages", {"messages": []}),
        ("return_token_strs", {"prompt": "hi", "return_token_strs": True}),
        (None, {"prompt": "hi", "messages": chat["messages"]}),
    ]  # fmt: skip
    for field, body in wrong:
        assert tokenized(**body)["error"]["param"] == field


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_prompt_is_served_and_streamed(form: str, client_of: ClientOf) -> None:
    client = client_of()
    body = ASK | {"prompt": FORMS[form]}
    answer = plain(client, body)
    n = 1 if form in ("text", "ids") else 2
    assert [choice.index for choice in answer.choices] == list(range(n))
    assert answer.model == "fake" and answer.id.startswith("cmpl-")
    assert answer.usage.completion_tokens == 6 * n
    assert answer.usage.prompt_tokens == (2 if n == 1 else 7)
    options = {"include_usage": True, "continuous_usage_stats": True}  # as guidellm sends them
    *chunks, last = streamed(client, body | {"stream_options": options})
    assert last.choices == [] and last.usage == answer.usage
    assert len({chunk.id for chunk in chunks}) == 1
    sizes = [2, 5] if n > 1 else [2]
    for choice in answer.choices:
        so_far = [c.usage for c in chunks if c.choices[0].index == choice.index and c.usage]
        counts = [usage.completion_tokens for usage in so_far]
        assert counts == sorted({*counts}) and counts[-1] == 6, "each has those of its choice"
        assert {usage.prompt_tokens for usage in so_far} == {sizes[choice.index]}
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
        assert all(part.text for part in parts), "no empty chunk, at the end either"
    options["continuous_usage_stats"] = False
    *chunks, last = streamed(client, body | {"stream_options": options})
    assert last.usage == answer.usage and all(chunk.usage is None for chunk in chunks)
    own = {"prompt": "hi", "num_tokens": 6, "seed": 3, "temperature": 1.0}
    inference = client.post("/inference", json=own).get_json()
    assert answer.choices[0].text == inference["completion"], "the routes differ in form alone"


def test_a_stop_string_ends_the_text_before_it_and_the_row_with_it(client_of: ClientOf) -> None:
    client = client_of(engine=lambda: Spelling(b"one two three "))
    body = {"prompt": "x", "max_tokens": 200, "stop": ["thr", "two t"]}
    answer = plain(client, body)
    assert answer.choices[0].text == "one " and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 9, "the row left with the stop string's last token"
    chunks = streamed(client, body)
    assert text(chunks) == "one " and chunks[-1].choices[0].finish_reason == "stop"
    assert plain(client, body | {"stop": "two"}).choices[0].text == "one "
    assert plain(client, body | {"stop": "four"}).choices[0].finish_reason == "length"
    echoed = plain(client, body | {"prompt": "two thr", "echo": True})
    assert echoed.choices[0].text == "two throne ", "an echoed prompt is not searched"
    own = client.post("/inference", json={"prompt": "x", "num_tokens": 20}).get_json()
    assert own["completion"] == "one two three one tw"


def test_end_of_text_ends_a_completion_here_and_not_on_inference(client_of: ClientOf) -> None:
    client = client_of(engine=lambda: Spelling([104, 105, 256, 33]))
    answer = plain(client, ASK)
    assert answer.choices[0].text == "hi" and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 3
    chunks = streamed(client, ASK)
    assert text(chunks) == "hi" and chunks[-1].choices[0].finish_reason == "stop"
    ignored = plain(client, ASK | {"ignore_eos": True})
    assert ignored.choices[0].text == "hi!hi" and ignored.choices[0].finish_reason == "length"
    assert ignored.usage.completion_tokens == 6
    own = client.post("/inference", json={"prompt": "x", "num_tokens": 4}).get_json()
    assert own["completion"] == "hi<|endoftext|>!"
    stopped = '{finished_reason="stop",mode="dynamic",model_name="fake"} 2.0'
    assert f"vllm:request_success_total{stopped}" in client.get("/metrics").get_data(as_text=True)


def test_chat_is_the_messages_in_a_plain_template(client_of: ClientOf) -> None:
    client = client_of(max_model_len=128)
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": parts}]
    body = {"model": "fake", "messages": messages, "max_completion_tokens": 9, "seed": 1}
    answer = client.post("/v1/chat/completions", json=body).get_json()
    prompt = "system: Be kind.\nuser: hello\nassistant:"
    same = plain(client, {"prompt": prompt, "max_tokens": 9, "seed": 1})
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": same.choices[0].text}
    assert answer["object"] == "chat.completion" and answer["usage"]["completion_tokens"] == 9
    chunks = events(client.post("/v1/chat/completions", json=body | {"stream": True}).data)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant" and all("role" not in delta for delta in deltas[1:])
    assert "".join(delta["content"] for delta in deltas) == same.choices[0].text
    rest = client.post("/v1/chat/completions", json={"messages": messages[:1]}).get_json()
    assert rest["usage"]["total_tokens"] == 128, "without a limit: to the end of the context"


PROMPT = "If the file"


def test_the_official_client_completes_streams_chats_and_sees_errors(shared_server: Serve) -> None:
    import openai  # takes each worker a second, and one needs it

    ask: dict[str, Any] = {"model": "fake", "prompt": PROMPT, "max_tokens": 20, "seed": 1}
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    with (
        shared_server("dynamic", {"model": "fake"}) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        assert [model.id for model in client.models.list()] == ["fake"]
        assert client.models.retrieve("fake").id == "fake"
        answer = client.completions.create(**ask)
        usage: Any = {"include_usage": True}
        *chunks, last = client.completions.create(**ask, stream=True, stream_options=usage)
        assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
        assert last.usage == answer.usage and last.choices == []
        talk: dict[str, Any] = {"model": "fake", "messages": messages, "max_tokens": 20, "seed": 1}
        chat = client.chat.completions.create(**talk)
        stream = client.chat.completions.create(**talk, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == chat.choices[0].message.content and text
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(**ask, best_of=2)
        assert bad.value.param == "best_of" and bad.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt-4", prompt=PROMPT)
        late = ask | {"max_tokens": 1000, "extra_body": {"timeout_s": 0.1, "ignore_eos": True}}
        with pytest.raises(openai.APIError, match="deadline"):
            list(client.completions.create(**late, stream=True))
