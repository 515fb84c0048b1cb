"""Several prompts in one request, and several completions of a prompt: each has a seed of its own,
which the answer names, and what is too large is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

from serving import member_seed
from tests.sse import events

ASK = {"num_tokens": 12, "temperature": 1.0}


@pytest.fixture
def client(client_of: Callable[..., FlaskClient]) -> FlaskClient:
    return client_of(max_batch_size=4, loop_interval_ms=1)


def answer(client: FlaskClient, body: dict[str, Any]) -> dict[str, Any]:
    return dict(client.post("/inference", json=body).get_json())


def test_completions_of_one_request_are_drawn_apart_and_each_again_alone(
    client: FlaskClient,
) -> None:
    """Four times the same prompt at temperature 1 once gave four equal texts: the group's members
    shared a seed. Choice index = prompt · n + i; a prompt counts once.
    """
    prompts = ["The file", "The file", "A list"]
    body: dict[str, Any] = ASK | {"prompt": prompts, "n": 2}
    unseeded, seeded, again = (
        answer(client, body | seed) for seed in ({}, {"seed": 7}, {"seed": 7})
    )
    for group in (unseeded, seeded):
        assert len(set(group["completion"][:4])) > 1 and len(set(group["seed"])) == 6
        for i, (text, seed) in enumerate(zip(group["completion"], group["seed"], strict=True)):
            alone = answer(client, ASK | {"prompt": prompts[i // 2], "seed": seed})
            assert (alone["completion"], alone["seed"]) == (text, seed)
    assert seeded["completion"] == again["completion"] and seeded["seed"] == again["seed"]
    assert seeded["seed"][0] == 7 and unseeded["completion"] != seeded["completion"]
    assert seeded["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert seeded["usage"]["completion_tokens"] == 6 * 12 and len(seeded["timings"]) == 6
    one = answer(client, ASK | {"prompt": "A list", "n": 2})
    assert isinstance(one["completion"], list) and len(one["completion"]) == len(one["seed"]) == 2


def test_members_seeds_of_near_groups_do_not_meet() -> None:
    seeds = [member_seed(seed, i) for seed in range(50) for i in range(20)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)


def test_n_streams_interleave_by_index_on_every_route(client: FlaskClient) -> None:
    asked = {"prompt": "The file", "num_tokens": 60, "temperature": 1.0, "seed": 7, "n": 3}
    plain = answer(client, asked)
    *chunks, last = events(client.post("/inference", json=asked | {"stream": True}).data)
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk["index"]] += chunk["text"]
    assert texts == plain["completion"]
    assert last["seed"] == plain["seed"] and last["usage"] == plain["usage"]
    order = [chunk["index"] for chunk in chunks]
    assert order != sorted(order), "they come as they are computed"
    theirs = {"max_tokens": 60, "temperature": 1.0, "seed": 7, "n": 3, "ignore_eos": True}
    completion = client.post("/v1/completions", json=theirs | {"prompt": "The file"}).get_json()
    assert [choice["text"] for choice in completion["choices"]] == plain["completion"]
    chat = theirs | {"messages": [{"role": "user", "content": "Hi"}]}
    choices = client.post("/v1/chat/completions", json=chat).get_json()["choices"]
    texts = ["", "", ""]
    for chunk in events(client.post("/v1/chat/completions", json=chat | {"stream": True}).data):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"]["content"]
    assert texts == [choice["message"]["content"] for choice in choices]


def test_an_n_that_cannot_be_served_is_refused(client_of: Callable[..., FlaskClient]) -> None:
    client = client_of(mode="static", max_batch_size=4, max_waiting=3)
    for n, message in (
        (5, "Maximum batch size exceeded: 5 completions in one request"),
        (8, "This server holds 7 completions at most; lower n."),
    ):
        response = client.post("/inference", json={"prompt": "hi", "num_tokens": 2, "n": n})
        assert response.status_code == 400 and message in response.get_json()["error"]["message"]
