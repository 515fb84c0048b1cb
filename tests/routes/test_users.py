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

ROUTES: dict[str, dict[str, Any]] = {
    "/inference": {"prompt": "hi", "num_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
}
ClientOf = Callable[..., FlaskClient]
on_every_route = pytest.mark.parametrize("path", ROUTES)
plain_or_streamed = pytest.mark.parametrize("stream", [False, True])


@on_every_route
@plain_or_streamed
def test_every_inference_of_a_request_has_its_user_priority_and_queue_timeout(
    path: str, stream: bool, client_of: ClientOf
) -> None:
    client = client_of(order="priority", queue_policy="2:timeout_ms=60000,override=yes")
    scheduler = client.application.extensions["server"].scheduler
    who = {"user": "ann", "priority": 2, "queue_timeout_s": 20.5, "n": 2}
    with mock.patch.object(scheduler, "enqueue", wraps=scheduler.enqueue) as enqueue:
        for more in (who, {}):
            body = ROUTES[path] | {"stream": stream} | more
            assert client.post(path, json=body).status_code == 200
    queued = [inference for call in enqueue.call_args_list for inference in call.args[0]]
    assert [(i.user, i.priority, i.queue_timeout_s) for i in queued] == [
        ("ann", 2, 20.5),
        ("ann", 2, 20.5),
        (None, 2, None),  # the level in the middle
    ]


@on_every_route
@plain_or_streamed
@pytest.mark.parametrize(
    "refusal",
    [
        InvalidRequest("queue_timeout_s: not here.", param="queue_timeout_s"),
        RateLimited("ann has had 3 requests in this minute.", retry_after_s=16.2),
    ],
    ids=lambda error: error.code,
)
def test_what_the_scheduler_refuses_comes_to_the_client_with_its_field_and_its_header(
    path: str, refusal: ServingError, stream: bool, client_of: ClientOf
) -> None:
    client, body = client_of(), ROUTES[path] | {"stream": stream}
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
