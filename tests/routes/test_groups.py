"""Several prompts in one request, and several completions of a prompt: each has a seed of its own,
which the answer names, and what is too large is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

from serving import member_seed
from tests.oracle import N_VOCAB, Oracle, engine, model, serve  # noqa: F401
from tests.sse import events

FOUR = {"prompt": ["The file"] * 4, "num_tokens": 12, "temperature": 1.0}


@pytest.fixture
def demo(client_of: Callable[..., FlaskClient]) -> FlaskClient:
    return client_of(model="demo", max_batch_size=4, max_model_len=64)


def answer(client: FlaskClient, body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = client.post("/inference", json=body).get_json()
    return found


def test_equal_prompts_of_one_request_are_drawn_apart_and_each_again_alone(
    demo: FlaskClient,
) -> None:
    """Four times the same prompt at temperature 1 once gave four equal texts: the group's members
    shared a seed.
    """
    unseeded, seeded, again = (answer(demo, FOUR | seed) for seed in ({}, {"seed": 7}, {"seed": 7}))
    for group in (unseeded, seeded):
        assert len(set(group["completion"])) > 1 and len(set(group["seed"])) == 4
        for text, seed in zip(group["completion"], group["seed"]):
            alone = answer(demo, FOUR | {"prompt": "The file", "seed": seed})
            assert (alone["completion"], alone["seed"]) == (text, seed)
    assert seeded["completion"] == again["completion"] and seeded["seed"] == again["seed"]
    assert seeded["seed"][0] == 7 and unseeded["completion"] != seeded["completion"]


def test_members_seeds_of_near_groups_do_not_meet() -> None:
    seeds = [member_seed(seed, i) for seed in range(50) for i in range(20)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)


def test_n_completions_are_those_of_n_requests_with_their_seeds(demo: FlaskClient) -> None:
    """Choice index = prompt · n + i; a prompt counts once."""
    body: dict[str, Any] = FOUR | {"prompt": ["The file", "A list"], "num_tokens": 9, "seed": 7}
    found = answer(demo, body | {"n": 2})
    assert len(set(found["completion"])) == 4 == len(found["timings"])
    for i, (text, seed) in enumerate(zip(found["completion"], found["seed"])):
        alone = answer(demo, body | {"prompt": body["prompt"][i // 2], "seed": seed})
        assert alone["completion"] == text
    assert found["usage"]["prompt_tokens"] == len("The file") + len("A list")
    assert found["usage"]["completion_tokens"] == 36
    one = answer(demo, body | {"prompt": "A list", "n": 2})
    assert isinstance(one["completion"], list) and len(one["completion"]) == len(one["seed"]) == 2


def test_n_streams_interleave_by_index_on_every_route(
    client_of: Callable[..., FlaskClient],
) -> None:
    demo = client_of(model="demo", max_batch_size=4)
    # 9 tokens of all three are computed before the first is sent
    asked = {"num_tokens": 600, "temperature": 1.0, "seed": 7, "n": 3}
    plain = answer(demo, asked | {"prompt": "The file"})
    stream = demo.post("/inference", json=asked | {"prompt": "The file", "stream": True})
    *chunks, last = events(stream.data)
    assert texts_of(chunks) == plain["completion"] and last["seed"] == plain["seed"]
    assert last["usage"] == plain["usage"]
    order = [chunk["index"] for chunk in chunks]
    assert order != sorted(order), "they come as they are computed"
    theirs = {"max_tokens": 600, "temperature": 1.0, "seed": 7, "n": 3, "ignore_eos": True}
    completion = demo.post("/v1/completions", json=theirs | {"prompt": "The file"}).get_json()
    assert [choice["text"] for choice in completion["choices"]] == plain["completion"]
    chat = theirs | {"messages": [{"role": "user", "content": "Hi"}]}
    choices = demo.post("/v1/chat/completions", json=chat).get_json()["choices"]
    streamed = ["", "", ""]
    for chunk in events(demo.post("/v1/chat/completions", json=chat | {"stream": True}).data):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["delta"]["content"]
    assert streamed == [choice["message"]["content"] for choice in choices]


def texts_of(chunks: list[dict[str, Any]]) -> list[str]:
    n = 1 + max(chunk["index"] for chunk in chunks)
    return ["".join(chunk["text"] for chunk in chunks if chunk["index"] == i) for i in range(n)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"n": 0}, "n: Input should be greater than or equal to 1"),
        ({"n": 17}, "n: Input should be less than or equal to 16"),
        ({"n": 2.0}, "n: Input should be a valid integer"),
        ({"n": 5}, "Maximum batch size exceeded: 5 completions in one request"),
        ({"n": 8}, "This server holds 7 completions at most; lower n."),
    ],
)
def test_an_n_that_cannot_be_served_is_refused(
    client_of: Callable[..., FlaskClient], body: dict[str, Any], message: str
) -> None:
    client = client_of(mode="static", max_batch_size=4, max_waiting=3)
    response = client.post("/inference", json={"prompt": "hi", "num_tokens": 2} | body)
    assert response.status_code == 400 and message in response.get_json()["error"]["message"]
