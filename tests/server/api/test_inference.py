"""The app in process, with the fake model: POST /inference and the routes about the server."""

from __future__ import annotations

import io
from typing import Any
from unittest import mock

import pytest
from flask.testing import FlaskClient

from server.api.routes import ROUTES
from server.serving import member_seed
from tests.server.api.test_conformance import joined
from tests.server.api.test_door import OF_MODELS
from tests.servers import ClientOf, events

JSON = "application/json"
HI = {"prompt": "hi", "num_tokens": 5}
NOT_CACHED = {"prompt_tokens_details": {"cached_tokens": 0}}


@pytest.fixture
def client(client_of: ClientOf) -> FlaskClient:
    return client_of(max_batch_size=4, loop_interval_ms=1)


def infer(client: FlaskClient, body: dict[str, Any]) -> Any:
    """The answer to a request that is served."""
    response = client.post("/inference", json=body)
    assert response.status_code == 200, response.data
    return response.get_json()


def test_a_prompt_is_completed_with_usage_timings_and_the_seed(client: FlaskClient) -> None:
    answer = infer(client, HI | {"seed": 7})
    assert set(answer) == {"completion", "usage", "timings", "seed"}
    assert len(answer["completion"]) == 5 and answer["seed"] == 7
    counts = {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
    assert answer["usage"] == NOT_CACHED | counts
    timings = answer["timings"]
    assert len(timings["itl_s"]) == 4
    assert sum(timings["itl_s"]) == pytest.approx(timings["decode_s"], abs=1e-5)
    parts = timings["ttft_s"] + timings["decode_s"] + timings["held_s"]
    assert timings["e2e_s"] == pytest.approx(parts, abs=1e-5)


def test_a_body_without_a_length_is_read_to_the_limit(client: FlaskClient) -> None:
    chunked = {"wsgi.input": io.BytesIO(b"x" * 1_000_001), "wsgi.input_terminated": True}
    large = client.post("/inference", environ_overrides=chunked, content_type=JSON)
    assert large.status_code == 413
    assert large.get_json()["error"]["message"] == "The body is larger than 1,000,000 bytes."


def test_a_deadline_is_the_request_s_or_else_the_server_s(client_of: ClientOf) -> None:
    client = client_of(request_timeout_s=0.02)
    late = client.post("/inference", json={"prompt": "hi", "num_tokens": 1000})
    assert (late.status_code, late.get_json()["error"]["code"]) == (504, "deadline_passed")
    infer(client, HI | {"timeout_s": 30})
    assert client.get("/stats").get_json()["expired"] == 1


def test_the_front_page_describes_the_server(client: FlaskClient) -> None:
    page = client.get("/").get_json()
    assert page["mode"] == "dynamic" and page["model"] == "fake"
    assert page["config"]["max_batch_size"] == 4
    assert [*page["routes"]] == [route.name for route in ROUTES]


ASK = {"num_tokens": 12, "temperature": 1.0}


def test_completions_of_a_request_are_drawn_apart_and_again_alone(client: FlaskClient) -> None:
    """Equal prompts once got equal texts, by one seed. Choice index = prompt · n + i."""
    prompts = ["The file", "The file", "A list"]
    body: dict[str, Any] = ASK | {"prompt": prompts, "n": 2}
    seeds: list[dict[str, int]] = [{}, {"seed": 7}, {"seed": 7}]
    unseeded, seeded, again = (infer(client, body | seed) for seed in seeds)
    for group in (unseeded, seeded):
        assert len(set(group["completion"][:4])) > 1 and len(set(group["seed"])) == 6
        for i, (text, seed) in enumerate(zip(group["completion"], group["seed"], strict=True)):
            alone = infer(client, ASK | {"prompt": prompts[i // 2], "seed": seed})
            assert (alone["completion"], alone["seed"]) == (text, seed)
    assert seeded["completion"] == again["completion"] and seeded["seed"] == again["seed"]
    assert seeded["seed"][0] == 7 and unseeded["completion"] != seeded["completion"]
    assert seeded["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert seeded["usage"]["completion_tokens"] == 6 * 12 and len(seeded["timings"]) == 6
    one = infer(client, ASK | {"prompt": "A list", "n": 2})
    assert isinstance(one["completion"], list) and len(one["completion"]) == len(one["seed"]) == 2


def test_members_seeds_of_near_groups_do_not_meet() -> None:
    seeds = [member_seed(seed, i) for seed in range(50) for i in range(20)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)


def test_n_streams_interleave_by_index_on_every_route(client: FlaskClient) -> None:
    asked = {"prompt": "The file", "num_tokens": 60, "temperature": 1.0, "seed": 7, "n": 3}
    plain = infer(client, asked)
    *chunks, last = events(raw := client.post("/inference", json=asked | {"stream": True}).data)
    assert joined(raw)["texts"] == dict(enumerate(plain["completion"]))
    assert last["seed"] == plain["seed"] and last["usage"] == plain["usage"]
    order = [chunk["index"] for chunk in chunks]
    assert order != sorted(order), "they come as they are computed"
    theirs = {"max_tokens": 60, "temperature": 1.0, "seed": 7, "n": 3, "ignore_eos": True}
    completion = client.post("/v1/completions", json=theirs | {"prompt": "The file"}).get_json()
    assert [choice["text"] for choice in completion["choices"]] == plain["completion"]
    chat = theirs | {"messages": [{"role": "user", "content": "Hi"}]}
    choices = client.post("/v1/chat/completions", json=chat).get_json()["choices"]
    raw = client.post("/v1/chat/completions", json=chat | {"stream": True}).data
    assert joined(raw)["texts"] == {c["index"]: c["message"]["content"] for c in choices}


def test_an_n_that_cannot_be_served_is_refused(client_of: ClientOf) -> None:
    client = client_of(mode="static", max_batch_size=4, max_waiting=3)
    for n, message in (
        (5, "Maximum batch size exceeded: 5 completions in one request"),
        (8, "This server holds 7 completions at most; lower n."),
    ):
        response = client.post("/inference", json={"prompt": "hi", "num_tokens": 2, "n": n})
        assert response.status_code == 400 and message in response.get_json()["error"]["message"]
    assert client.get("/stats").get_json()["invalid"] == 2


@pytest.mark.parametrize("path", [*OF_MODELS][:3])
@pytest.mark.parametrize("stream", [False, True])
def test_each_inference_has_a_user_and_level(path: str, stream: bool, client_of: ClientOf) -> None:
    client = client_of(order="priority", queue_policy="2:timeout_ms=60000,override=yes")
    scheduler = client.application.extensions["engine"].scheduler
    who = {"user": "ann", "priority": 2, "queue_timeout_s": 20.5, "n": 2}
    with mock.patch.object(scheduler, "enqueue", wraps=scheduler.enqueue) as enqueue:
        for more in (who, {}):
            body = OF_MODELS[path] | {"stream": stream} | more
            assert client.post(path, json=body).status_code == 200
    queued = [inference for call in enqueue.call_args_list for inference in call.args[0]]
    found = [(i.user, i.priority, i.queue_timeout_s) for i in queued]
    assert found == [*2 * [("ann", 2, 20.5)], (None, 2, None)], "the level in the middle"
