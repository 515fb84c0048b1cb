"""The app in process, with the fake model: POST /inference and the routes about the server."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

from wire.routes import ROUTES

JSON = "application/json"
HI = {"prompt": "hi", "num_tokens": 5}
NOT_CACHED = {"prompt_tokens_details": {"cached_tokens": 0}}


@pytest.fixture
def client(client_of: Callable[..., FlaskClient]) -> FlaskClient:
    return client_of()


def infer(client: FlaskClient, body: dict[str, Any]) -> Any:
    """The answer to a request that is served."""
    response = client.post("/inference", json=body)
    assert response.status_code == 200, response.data
    return response.get_json()


def error(response: Any, status: int) -> Any:
    """The error of a response, in the form that all have."""
    found = response.get_json()["error"]
    assert response.status_code == status and set(found) == {"message", "type", "param", "code"}
    return found


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


@pytest.mark.parametrize(
    "text", ["a\0b", "😀", "<|endoftext|>", " ", "日本語", "\u202e"], ids=ascii
)
def test_unusual_text_is_ordinary_text(client: FlaskClient, text: str) -> None:
    answer = infer(client, {"prompt": text, "num_tokens": 1, "echo": True})
    assert answer["completion"].startswith(text)
    assert answer["usage"]["prompt_tokens"] == len(text.encode())


def test_methods_and_sizes_are_refused_with_what_is_taken(client: FlaskClient) -> None:
    assert "POST /inference" in error(client.get("/nope"), 404)["message"]
    response = client.put("/stats/reset", json={})
    assert "use POST." in error(response, 405)["message"]
    assert "POST" in response.headers["Allow"].split(", ")
    chunks = client.post(
        "/inference",
        input_stream=io.BytesIO(b"x" * 1_000_001),
        environ_overrides={"wsgi.input_terminated": True},
        content_type=JSON,
    )
    error(chunks, 413)  # of a chunked body, which names no length
    largest = json.dumps(HI).ljust(1_000_000)
    assert client.post("/inference", data=largest, content_type=JSON).status_code == 200


def test_a_deadline_is_the_request_s_or_else_the_server_s(
    client_of: Callable[..., FlaskClient],
) -> None:
    client = client_of(request_timeout_s=0.02)
    late = client.post("/inference", json={"prompt": "hi", "num_tokens": 1000})
    assert error(late, 504)["code"] == "deadline_passed"
    infer(client, HI | {"timeout_s": 30})
    assert client.get("/stats").get_json()["expired"] == 1


def test_the_front_page_describes_the_server(client: FlaskClient) -> None:
    page = client.get("/").get_json()
    assert page["mode"] == "dynamic" and page["model"] == "fake"
    assert page["config"]["max_batch_size"] == 32 and page["routes"].keys() == ROUTES.keys()
