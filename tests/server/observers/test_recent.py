"""GET /requests/NAME: where the time of a request went, in flight or lately."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from flask.testing import FlaskClient

from scheduling.inference import Inference
from server.observers import recent
from tests.servers import ClientOf, Spelling, wait_until


def told(client: FlaskClient, name: str) -> Any:
    response = client.get(f"/requests/{name}")
    assert response.status_code == 200, response.text
    [request] = response.get_json()["requests"]
    assert sum(request["parts"].values()) == pytest.approx(request["latency_s"], abs=1e-5)
    return request


def test_a_request_is_known_while_it_waits_and_runs_and_afterwards(client_of: ClientOf) -> None:
    gate = Spelling(gated=True)
    client = client_of(engine=lambda: gate, max_batch_size=1)
    asked = [
        threading.Thread(
            target=client.application.test_client().post,
            args=["/inference"],
            kwargs={"json": {"prompt": "hi", "num_tokens": 2}, "headers": {"X-Request-Id": name}},
        )
        for name in ("first", "second")
    ]
    asked[0].start()
    gate.started.acquire()
    asked[1].start()
    manager = client.application.extensions["engine"].manager
    wait_until(lambda: manager.snapshot().waiting)
    first, second = told(client, "first"), told(client, "second")
    assert (first["state"], [*first["parts"]][-1]) == ("running", "prefill")
    assert (second["state"], [*second["parts"]], second["id"]) == ("waiting", ["batch"], 1)
    assert second["neighbours"]["ran_before"] == 1
    for _ in range(4):
        gate.go.release()
    for thread in asked:
        thread.join()
    second = told(client, "1")
    assert (second["state"], second["request_id"]) == ("finished", "second")
    assert [*second["parts"]] == ["batch", "prefill", "decode"]
    assert (second["completion_tokens"], second["neighbours"]["ran_before"]) == (2, 1)


def test_an_id_that_a_client_gave_is_found_and_not_the_number_of_another(
    client_of: ClientOf,
) -> None:
    """Of a client that numbers its requests, /requests/0 found two."""
    client = client_of()
    for name in ("5", "0", "other"):
        ask = {"prompt": "hi", "num_tokens": 2}
        client.post("/inference", json=ask, headers={"X-Request-Id": name})
    assert [told(client, name)["id"] for name in ("5", "0", "other", "2")] == [0, 1, 2, 2]


def test_a_request_that_failed_is_known_and_old_ones_are_forgotten(
    client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent, "KEPT", 2)
    client = client_of()
    manager = client.application.extensions["engine"].manager
    ended = [Inference([0], 1000, request_id=name) for name in "abc"]
    manager.enqueue(ended)
    manager.cancel(ended)
    assert (told(client, "c")["state"], told(client, "c")["error"]) == ("cancelled", "cancelled")
    response = client.get("/requests/a")
    assert response.status_code == 404
    assert response.get_json()["error"]["message"] == (
        "No request 'a' is in flight or among the last 2,000."
    )


def test_a_prompt_of_several_completions_counts_once_as_in_the_request_log(
    client_of: ClientOf,
) -> None:
    client = client_of()
    ask = {"prompt": ["hi", "you"], "num_tokens": 2, "n": 2}
    client.post("/inference", json=ask, headers={"X-Request-Id": "several"})
    found = client.get("/requests/several").get_json()["requests"]
    assert [request["prompt_tokens"] for request in found] == [2, 0, 3, 0]
