"""On whose behalf a request comes, how urgent it is and how long it would wait: from the body to
the scheduler, and back to the client where the scheduler refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from flask.testing import FlaskClient

from scheduling.errors import InvalidRequest, RateLimited, ServingError
from scheduling.inference import Inference

ROUTES: dict[str, dict[str, Any]] = {
    "/inference": {"prompt": "hi", "num_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
}
STREAMED = [{}, {"stream": True}]
ClientOf = Callable[..., FlaskClient]


@pytest.fixture(params=ROUTES)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def queued(client: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> list[Inference]:
    """All that is queued from now on, as it comes to the scheduler."""
    scheduler = client.application.extensions["server"].scheduler
    enqueue, seen = scheduler.enqueue, []

    def watch(group: list[Inference], now: float) -> None:
        seen.extend(group)
        enqueue(group, now)

    monkeypatch.setattr(scheduler, "enqueue", watch)
    return seen


@pytest.mark.parametrize("stream", STREAMED)
def test_every_inference_of_a_request_has_its_user_priority_and_queue_timeout(
    path: str, stream: dict[str, bool], client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(order="priority", queue_policy="2:timeout_ms=60000,override=yes")
    seen = queued(client, monkeypatch)
    body = ROUTES[path] | stream
    who = {"user": "ann", "priority": 2, "queue_timeout_s": 20.5, "n": 2}
    assert client.post(path, json=body | who).status_code == 200
    assert client.post(path, json=body).status_code == 200
    assert [(i.user, i.priority, i.queue_timeout_s) for i in seen] == [
        ("ann", 2, 20.5),
        ("ann", 2, 20.5),
        (None, 2, None),  # the level in the middle
    ]


def test_where_levels_have_no_meaning_every_priority_is_taken_and_changes_nothing(
    path: str, client_of: ClientOf
) -> None:
    client = client_of()

    def texts(**who: Any) -> Any:
        answer = client.post(path, json=ROUTES[path] | {"seed": 3} | who).get_json()
        return answer.get("choices") or answer["completion"]

    expected = texts()
    for priority in (0, 7, 2**63 - 1, -(2**63)):
        assert texts(priority=priority) == expected


@pytest.mark.parametrize("stream", STREAMED)
@pytest.mark.parametrize(
    "refusal",
    [
        InvalidRequest("priority: this server has the levels 1 to 3.", param="priority"),
        InvalidRequest("queue_timeout_s: not here.", param="queue_timeout_s"),
        RateLimited("ann has had 3 requests in this minute.", retry_after_s=16.2),
    ],
    ids=lambda error: error.param or error.code,
)
def test_what_the_scheduler_refuses_comes_to_the_client_with_its_field_and_its_header(
    path: str, refusal: ServingError, stream: dict[str, bool], client_of: ClientOf
) -> None:  # fmt: skip
    client, body = client_of(), ROUTES[path] | stream
    scheduler = client.application.extensions["server"].scheduler
    with mock.patch.object(scheduler, "enqueue", side_effect=refusal):
        response = client.post(path, json=body)
    assert (response.status_code, response.mimetype) == (refusal.status, "application/json")
    assert response.get_json() == refusal.body()
    assert response.get_json()["error"]["param"] == refusal.param
    assert response.headers.get("Retry-After") == ("17" if refusal.status == 429 else None)
    stats = client.get("/stats").get_json()
    assert (stats["invalid"], stats["refused"]) == ((0, 1) if refusal.status == 429 else (1, 0))
    assert client.post(path, json=body).status_code == 200
