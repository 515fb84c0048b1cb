"""What OpenAI's clients may send: what would change the answer is refused by name, and what would
not is taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

from scheduling.inference import Inference
from wire.bodies import ChatRequest, CompletionRequest

COMPLETION = {"prompt": "hi", "max_tokens": 4, "seed": 1}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 1}
# field: values that change nothing, and those that would
BOTH: dict[str, tuple[list[Any], list[Any]]] = {
    "best_of": ([1], [2]),
    "use_beam_search": ([False], [True]),
    "length_penalty": ([1, 1.0], [0.8]),
    "min_p": ([0, 0.0], [0.05, False]),
    "typical_p": ([1], [0.9]),
    "repetition_penalty": ([1], [1.1]),
    "no_repeat_ngram_size": ([0], [3]),
    "logit_bias": ([{}], [{"65": -100}]),
    "logits_processors": ([[]], [["x"]]),
    "bad_words": ([[]], [["x"]]),
    "allowed_token_ids": ([[]], [[65]]),
    "include_stop_str_in_output": ([False], [True]),
    "skip_special_tokens": ([True], [False]),
    "prompt_logprobs": ([], [0, 1]),
    "return_token_ids": ([False], [True]),
    "return_tokens_as_token_ids": ([False], [True]),
    "response_format": ([{"type": "text"}], [{"type": "json_object"}]),
    "structured_outputs": ([{}], [{"regex": "a"}]),
    "guided_json": ([], [{}]),
    "guided_regex": ([], ["a"]),
    "guided_choice": ([], [["a"]]),
    "guided_grammar": ([], ["x"]),
    "structural_tag": ([], ["x"]),
    "json_schema": ([], [{}]),
    "regex": ([], ["a"]),
    "grammar": ([], ["x"]),
    "ebnf": ([], ["x"]),
    "truncate_prompt_tokens": ([], [5, -1]),
    "prompt_embeds": ([], ["x"]),
}
OF_COMPLETIONS: dict[str, tuple[list[Any], list[Any]]] = {"suffix": ([""], ["x"])}
OF_CHAT: dict[str, tuple[list[Any], list[Any]]] = {
    "tools": ([[]], [[{"type": "function"}]]),
    "tool_choice": (["none", "auto"], ["required", {"type": "function"}]),
    "functions": ([[]], [[{"name": "f"}]]),
    "function_call": (["none", "auto"], [{"name": "f"}]),
    "modalities": ([["text"]], [["text", "audio"]]),
    "audio": ([], [{"voice": "a"}]),
    "web_search_options": ([], [{}]),
    "echo": ([False], [True]),
    "add_generation_prompt": ([True], [False]),
    "continue_final_message": ([False], [True]),
    "chat_template": ([], ["x"]),
    "documents": ([[]], [[{"text": "x"}]]),
}
ROUTES: list[tuple[str, dict[str, Any], Any, dict[str, tuple[list[Any], list[Any]]]]] = [
    ("/v1/completions", COMPLETION, CompletionRequest, BOTH | OF_COMPLETIONS),
    ("/v1/chat/completions", CHAT, ChatRequest, BOTH | OF_CHAT),
]


@pytest.mark.parametrize(
    ("path", "ask", "model", "fields"), ROUTES, ids=[path for path, *_ in ROUTES]
)
def test_a_field_that_would_change_the_answer_is_refused_by_name_and_its_neutral_value_is_not(
    client_of: Callable[..., FlaskClient], path: str, ask: dict[str, Any], model: Any, fields: Any
) -> None:
    client = client_of()
    said = client.post(path, json=ask).get_json()["choices"]
    neutral = {name: value for name, (values, _) in fields.items() for value in values[:1]}
    for body in (
        neutral,
        dict.fromkeys(fields),
        *({name: value} for name, (values, _) in fields.items() for value in values),
    ):
        response = client.post(path, json=ask | body)
        assert response.status_code == 200 and response.get_json()["choices"] == said, body
    for name, (_, values) in fields.items():
        for value in values:
            response = client.post(path, json=ask | {name: value})
            error = response.get_json()["error"]
            assert response.status_code == 400 and error["param"] == name, (name, value)
            assert error["message"].startswith(f"{name}: only ") and error["message"].endswith(
                "leave it out"
            )
    offered = (
        "model prompt messages max_tokens max_completion_tokens temperature top_k top_p seed "
        "stop ignore_eos timeout_s stream user priority queue_timeout_s n cache_salt "
        "logprobs top_logprobs presence_penalty frequency_penalty stop_token_ids min_tokens"
    )
    assert set(model.model_fields) - set(fields) <= {*offered.split(), "stream_options", "echo"}, (
        "a field without a test"
    )


@pytest.mark.parametrize(
    ("path", "ask"),
    [
        ("/inference", {"prompt": "hi", "num_tokens": 5000}),
        ("/inference", {"prompt": "x" * 900_000, "num_tokens": 1}),
        ("/v1/completions", COMPLETION | {"max_tokens": 5000}),
        ("/v1/completions", COMPLETION | {"prompt": "x" * 900_000}),
        ("/v1/chat/completions", CHAT | {"max_tokens": 5000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 1020}]}),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_longer_than_the_context_has_openais_code(
    client_of: Callable[..., FlaskClient], path: str, ask: dict[str, Any]
) -> None:
    response = client_of().post(path, json=ask)
    error = response.get_json()["error"]
    assert (
        response.status_code == 400
        and error["code"] == "context_length_exceeded"
        and "the context of 1024" in error["message"]
    )


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"stop": ["a"] * 17}, "stop: 17 strings, and at most 16 are looked for; send fewer"),
        ({"stop": [""]}, "stop: every text holds an empty string; leave it out"),
        ({"stop": ""}, "stop: every text holds an empty string; leave it out"),
        ({"stop": "x" * 257}, "stop: a string may have 256 characters at most; send its beginning"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_stops_that_cannot_be_have_sentences_of_their_own(
    client_of: Callable[..., FlaskClient], body: dict[str, Any], said: str
) -> None:
    client = client_of()
    for path, ask in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        assert client.post(path, json=ask | body).get_json()["error"]["message"] == said
        for fine in (["a"] * 16, [], "x" * 256):
            assert client.post(path, json=ask | {"stop": fine}).status_code == 200


def test_an_image_in_a_chat_is_refused_in_a_sentence(client_of: Callable[..., FlaskClient]) -> None:
    client = client_of()
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    for part in (
        image,
        {"type": "input_audio"},
        {"type": None},
        {"text": "x"},
        {"type": "x" * 100_000},
    ):
        content = [{"type": "text", "text": "look: "}, part]
        response = client.post(
            "/v1/chat/completions", json=CHAT | {"messages": [{"role": "user", "content": content}]}
        )
        error = response.get_json()["error"]
        assert (
            response.status_code == 400
            and error["param"] == "messages"
            and len(error["message"]) < 250
        )
        assert "reads text alone" in error["message"] and 'send {"type": "text"' in error["message"]


def test_top_p_0_is_greedy_and_seed_minus_1_is_none(client_of: Callable[..., FlaskClient]) -> None:
    client = client_of()
    samplings = []
    manager = client.application.extensions["server"].manager
    enqueue = manager.enqueue

    def seen(group: list[Inference]) -> None:
        samplings.append(group[0].sampling)
        enqueue(group)

    manager.enqueue = seen
    for path, ask in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        samplings.clear()
        for body in (
            {"top_p": 0},
            {"top_p": 0.0},
            {"top_p": 1},
            {"top_p": 0.5},
            {"seed": -1},
            {"seed": -1},
        ):
            assert client.post(path, json=ask | {"temperature": 0.9} | body).status_code == 200
        greedy, also, whole, half, *unseeded = samplings
        assert (greedy.temperature, greedy.top_p) == (0, None) and also.temperature == 0
        assert (whole.temperature, whole.top_p, half.top_p) == (0.9, None, 0.5)
        assert (
            unseeded[0].seed != unseeded[1].seed
            and min(sampling.seed for sampling in unseeded) >= 0
        )
        assert whole.seed == half.seed, "a seed that is given stays"


def test_a_405_names_the_methods_and_allows_them(client_of: Callable[..., FlaskClient]) -> None:
    client = client_of()
    for method, path, allowed in (
        ("GET", "/inference", {"POST"}),
        ("DELETE", "/stats", {"GET"}),
        ("PUT", "/stats/reset", {"POST"}),
    ):
        response = client.open(path, method=method, json={})
        assert response.status_code == 405 and allowed <= {*response.headers["Allow"].split(", ")}
        assert f"use {', '.join(allowed)}." in response.get_json()["error"]["message"]
