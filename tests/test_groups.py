"""Several prompts in one request: each has a seed of its own, which the answer names, and a group
too large is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

from serving import member_seed
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


def test_openais_routes_and_streams_draw_a_group_alike(demo: FlaskClient) -> None:
    plain = answer(demo, FOUR | {"seed": 7})
    *chunks, last = events(demo.post("/inference", json=FOUR | {"seed": 7, "stream": True}).data)
    texts = ["".join(chunk["text"] for chunk in chunks if chunk["index"] == i) for i in range(4)]
    assert texts == plain["completion"] and last["seed"] == plain["seed"]
    asked = {"prompt": FOUR["prompt"], "max_tokens": 12, "seed": 7, "ignore_eos": True}
    choices = demo.post("/v1/completions", json=asked).get_json()["choices"]
    assert [choice["text"] for choice in choices] == plain["completion"]


def test_members_seeds_of_near_groups_do_not_meet() -> None:
    seeds = [member_seed(seed, i) for seed in range(50) for i in range(20)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
