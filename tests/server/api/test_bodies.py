"""Bodies of the completion routes: wrong fields are refused by name, neutral ones are ignored."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest
from flask.testing import FlaskClient

from server.api.bodies import ChatRequest, CompletionRequest
from tests.servers import ClientOf

JSON = "application/json"
INFERENCE, COMPLETIONS, CHATS = "/inference", "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
RIGHT: dict[str, dict[str, Any]] = {
    INFERENCE: {"prompt": "hi", "num_tokens": 4, "seed": 1},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 4, "seed": 1},
    CHATS: {"messages": [USER], "max_tokens": 4, "seed": 1},
}


@pytest.fixture
def client(client_of: ClientOf) -> FlaskClient:
    return client_of()


CONTEXT = "the context of 1024"
STOPS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"stop": ["a"] * 17}, "stop", "stop: 17 strings, and at most 16 are looked for; send fewer"),
    ({"stop": [""]}, "stop", "stop: every text holds an empty string; leave it out"),
    ({"stop": ""}, "stop", "stop: every text holds an empty string; leave it out"),
    ({"stop": "x" * 257}, "stop", "stop: a string may have 256 characters at most; send its begin"),
]
# fields that pydantic refuses; and those that we do, with a part of our sentence
VALUES: dict[str, dict[str, list[Any]]] = {
    INFERENCE: {
        "num_tokens": ["10", True, 0], "prompt": ["", 5], "temperature": [-1], "top_p": [0, 1.1],
        "top_k": [0, 2**63], "seed": [-1], "timeout_s": [0], "queue_timeout_s": [0],
        "priority": [1.0, 2**63, -(2**63) - 1, None],
    },
    COMPLETIONS: {
        "n": [17], "logprobs": [21], "presence_penalty": [2.1], "frequency_penalty": [-3],
        "min_tokens": [-1], "stop_token_ids": [[1] * 65], "top_p": [-0.1, 1.1], "seed": [-2],
        "top_k": [-2, 2**63], "prompt": ["", None, ["a", 1]], "stream": ["yes"], "model": [5],
    },
    CHATS: {"max_tokens": [0], "messages": [[], [{"content": "x"}]]},
}  # fmt: skip
WRONG: dict[str, list[tuple[dict[str, Any], str | None, str]]] = {
    INFERENCE: [
        ({"prompt": "x" * 1023, "num_tokens": 2}, "num_tokens", CONTEXT),
        ({"num_tokens": 10**30}, "num_tokens", CONTEXT),
        ({"prompt": "x" * 1024}, "prompt", CONTEXT),
        ({"prompt": "x" * 900_000}, "prompt", CONTEXT),
        ({"prompt": []}, "prompt", "A prompt must not be empty."),
        ({"prompt": ["a", ""]}, "prompt", "A prompt must not be empty."),
        ({"prompt": ["a"] * 100_000}, "prompt", "prompts at most; send fewer at once."),
        ({"prompt": None}, None, "give a prompt or prompt_ids"),
        ({"prompt_ids": [1]}, None, "give prompt or prompt_ids, not both"),
        ({"prompt": None, "prompt_ids": []}, "prompt_ids", ""),
        ({"prompt": None, "prompt_ids": [1, 257]}, "prompt_ids", "must be in 0 … 256"),
        ({"prompt": None, "prompt_ids": [-1]}, "prompt_ids", "must be in 0 … 256"),
        ({"prompt": None, "prompt_ids": ["a"] * 100_000}, "prompt_ids", ""),
        ({"prompts": ["hi"]}, "prompts", "prompts: this route calls it prompt"),
        ({f"field{i}": 1 for i in range(50_000)}, "field0", "unknown field; valid ones are cache_"),
    ],
    COMPLETIONS: [
        *STOPS,
        ({"logprobs": 5}, "logprobs", "logprobs: the model fake has none"),
        ({"logprobs": 0}, "logprobs", "logprobs: the model fake has none"),
        ({"min_tokens": 7}, "min_tokens", "7 are more than the 4 tokens at most; lower it."),
        ({"stop_token_ids": [257]}, "stop_token_ids", "Every stop token id must be in 0 … 256"),
        ({"max_tokens": 0}, "max_tokens", '0 without "echo": true asks for nothing'),
        ({"prompt": "x" * 1023, "max_tokens": 2}, "max_tokens", CONTEXT),
        ({"prompt": "x" * 1025, "max_tokens": 0, "echo": True}, "prompt", CONTEXT),
        ({"prompt": []}, "prompt", "A prompt must not be empty."),
        ({"prompt": [1, 257]}, "prompt", "must be in 0 … 256"),
        ({"prompt": "x" * 900_000}, "prompt", CONTEXT),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options", ""),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only a stream has"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options",
         "only false is offered here"),
    ],
    CHATS: [
        *STOPS,
        ({"max_tokens": 5000}, "max_tokens", CONTEXT),
        ({"top_logprobs": 3}, "top_logprobs", 'send "logprobs": true'),
        ({"echo": True}, "echo", "only false is offered here"),
        ({"messages": [USER | {"content": "x" * 1020}]}, "messages", CONTEXT),
        *[
            ({"messages": [USER | {"content": [part]}]}, "messages", f"a part has type {said};")
            for part, said in (({"type": "image_url"}, '"image_url"'), ({"text": "x"}, "null"),
                               ({"type": "x" * 100_000}, f'"{"x" * 99}'))
        ],
    ],
}  # fmt: skip
REFUSED = [
    *[(path, RIGHT[path] | wrong, *error) for path in WRONG for wrong, *error in WRONG[path]],
    *[(path, RIGHT[path] | {name: value}, name, "")
      for path in VALUES for name, values in VALUES[path].items() for value in values],
    (INFERENCE, RIGHT[COMPLETIONS], "max_tokens", "max_tokens: this route calls it num_tokens"),
    *[(path, body, None, "") for path in RIGHT for body in ("a string", None)],
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "param", "said"), REFUSED, ids=lambda value: json.dumps(value)[:40]
)
def test_a_wrong_body_is_a_400_that_names_the_field(
    client: FlaskClient, path: str, body: Any, param: str | None, said: str
) -> None:
    response = client.post(path, data=json.dumps(body), content_type=JSON)
    error = response.get_json()["error"]
    assert response.status_code == 400 and set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param and error["type"] == "invalid_request_error"
    too_long = said == CONTEXT  # OpenAI's code
    assert error["code"] == ("context_length_exceeded" if too_long else "invalid_request")
    assert said in error["message"] and 0 < len(error["message"]) < 400
    assert client.get("/stats").get_json()["invalid"] == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"\x00", b'{"prompt": "a\x00b", "num_tokens": 1}',
        b'{"prompt": "\xff", "num_tokens": 1}', b'{"prompt": "hi", "num_tokens": NaN}',
        b'{"prompt": "hi", "num_tokens": 1, "temperature": Infinity}',
        b'{"prompt": "\\ud800", "num_tokens": 1}', b"[" * 100_000,
    ],
    ids=lambda raw: repr(raw[:30]),
)  # fmt: skip
def test_malformed_json_is_a_400(client: FlaskClient, raw: bytes) -> None:
    assert client.post("/inference", data=raw, content_type=JSON).status_code == 400
    assert client.post("/inference", json=RIGHT[INFERENCE]).status_code == 200


OFFERED = {
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_k",
    "top_p", "seed", "stop", "ignore_eos", "timeout_s", "stream", "stream_options", "user",
    "priority", "queue_timeout_s", "slo_class", "slo_ttft_ms", "slo_tpot_ms", "n", "cache_salt",
    "echo", "logprobs", "top_logprobs",
    "presence_penalty", "frequency_penalty", "stop_token_ids", "min_tokens", "best_of",
}  # fmt: skip
MODELS = {COMPLETIONS: CompletionRequest, CHATS: ChatRequest}
NEUTRAL = {
    "length_penalty": 1.0, "min_p": 0.0, "response_format": {"type": "text"}, "tool_choice": "auto",
    "function_call": "none", "modalities": ["text"], "skip_special_tokens": True,
    "add_generation_prompt": True, "logit_bias": {}, "bad_words": [], "suffix": "", "best_of": 1,
    "stop": None, "stream_options": None, "user": "me", "min_tokens": 4, "n": 1, "top_k": -1,
    "top_p": 1, "stream": False, "some_new_field": {"x": [1]},
}  # fmt: skip


@pytest.mark.parametrize(("path", "model"), MODELS.items())
def test_a_field_is_refused_unless_neutral(client: FlaskClient, path: str, model: Any) -> None:
    body, fields = RIGHT[path], {*model.model_fields} - OFFERED - {*RIGHT[path]}
    choices = client.post(path, json=body).get_json()["choices"]
    defaults = {name: model.model_fields[name].default for name in fields}
    for neutral in (defaults, dict.fromkeys(fields), NEUTRAL):
        response = client.post(path, json=body | neutral)
        assert response.status_code == 200 and response.get_json()["choices"] == choices
    for name, value in [("min_p", False), *((name, {"another": 1}) for name in fields)]:
        response = client.post(path, json=body | {name: value})
        error = response.get_json()["error"]
        assert response.status_code == 400 and error["param"] == name
        assert error["message"].startswith(f"{name}: only ")
        assert error["message"].endswith(" is offered here; leave it out")
    assert len(fields) >= 29


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_openais_sampling_in_our_terms(client: FlaskClient, path: str) -> None:
    """top_p 0 is greedy and 1 is none; seed −1 is none; sixteen stop strings are taken."""
    manager = client.application.extensions["engine"].manager
    given: list[dict[str, Any]] = [
        {"top_p": 0}, {"top_p": 0.0}, {"top_p": 1, "top_k": 7}, {"top_p": 0.5, "top_k": 0},
        {"seed": -1}, {"seed": -1}, {"stop": ["a"] * 16}, {"stop": []},
        {"stop": "x" * 256},
    ]  # fmt: skip
    with mock.patch.object(manager, "enqueue", wraps=manager.enqueue) as enqueue:
        for each in given:
            body = RIGHT[path] | {"temperature": 0.9} | each
            assert client.post(path, json=body).status_code == 200
    samplings = [call.args[0][0].sampling for call in enqueue.call_args_list]
    greedy, also, whole, half, one, other, *_ = samplings
    assert (greedy.temperature, greedy.top_p) == (0, None) and also.temperature == 0
    assert (whole.temperature, whole.top_p, half.top_p) == (0.9, None, 0.5)
    assert (whole.top_k, half.top_k, one.top_k) == (7, None, None)
    assert one.seed != other.seed and min(one.seed, other.seed) >= 0
    assert whole.seed == half.seed, "a seed that is given stays"
