"""The app in process, with the fake model: every answer and every refusal of DESIGN section 7."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

from scheduling.inference import Generator, Inference, Iteration

JSON = "application/json"
HI = {"prompt": "hi", "num_tokens": 5}
NOT_CACHED = {"prompt_tokens_details": {"cached_tokens": 0}}


@pytest.fixture
def client(client_of: Callable[..., FlaskClient]) -> FlaskClient:
    return client_of()


def test_a_prompt_is_completed_with_usage_timings_and_the_seed(client: FlaskClient) -> None:
    answer = client.post("/inference", json=HI | {"seed": 7}).get_json()
    assert set(answer) == {"completion", "usage", "timings", "seed"}
    assert len(answer["completion"]) == 5 and answer["seed"] == 7
    assert answer["usage"] == {
        **NOT_CACHED,
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
    }
    timings = answer["timings"]
    assert set(timings) == {
        "arrived_at",
        "queue_s",
        "ttft_s",
        "decode_s",
        "held_s",
        "e2e_s",
        "itl_s",
        "preempted_s",
        "paused_s",
        "recomputed_tokens",
    }
    assert len(timings["itl_s"]) == 4 and sum(timings["itl_s"]) == pytest.approx(
        timings["decode_s"], abs=1e-5
    )
    assert timings["e2e_s"] == pytest.approx(
        timings["ttft_s"] + timings["decode_s"] + timings["held_s"], abs=1e-5
    )


def test_the_same_seed_gives_the_same_text_and_requests_without_one_differ(
    client: FlaskClient,
) -> None:
    one, same, other, another = (
        client.post("/inference", json=HI | extra).get_json()
        for extra in ({"seed": 1}, {"seed": 1}, {}, {})
    )
    assert one["completion"] == same["completion"]
    assert other["seed"] != another["seed"]


def test_echo_gives_the_prompt_back_too_and_ids_are_prompts_as_well(client: FlaskClient) -> None:
    text = client.post("/inference", json=HI | {"echo": True}).get_json()["completion"]
    assert text.startswith("hi") and len(text) == 7
    by_ids = {"prompt_ids": [104, 105], "num_tokens": 5, "echo": True, "seed": 0}
    assert client.post("/inference", json=by_ids).get_json()["completion"] == text


@pytest.mark.parametrize("mode", ["nobatch", "static", "windowed", "dynamic"])
def test_a_group_is_answered_together_with_the_texts_each_has_alone(
    mode: str, client_of: Callable[..., FlaskClient]
) -> None:
    client = client_of(mode)
    group = client.post(
        "/inference", json={"prompt": ["hi", "there"], "num_tokens": 4, "seed": 3}
    ).get_json()
    asks = [
        {"prompt": prompt, "num_tokens": 4, "seed": seed}
        for prompt, seed in zip(("hi", "there"), group["seed"])
    ]
    alone = [client.post("/inference", json=ask).get_json() for ask in asks]
    assert group["completion"] == [answer["completion"] for answer in alone]
    assert group["usage"] == {
        **NOT_CACHED,
        "prompt_tokens": 7,
        "completion_tokens": 8,
        "total_tokens": 15,
    }
    assert len(group["timings"]) == 2
    single = client.post(
        "/inference", json={"prompt": ["hi"], "num_tokens": 4, "seed": 3}
    ).get_json()
    assert single["completion"] == group["completion"][:1], "a list of one prompt is a group of one"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (HI | {"num_tokens": "10"}, "num_tokens"),
        (HI | {"num_tokens": True}, "num_tokens"),
        (HI | {"num_tokens": 1.5}, "num_tokens"),
        (HI | {"num_tokens": 0}, "num_tokens"),
        (HI | {"num_tokens": -3}, "num_tokens"),
        (HI | {"num_tokens": 2000}, "num_tokens"),
        (HI | {"num_tokens": 10**30}, "num_tokens"),
        ({"prompt": "x" * 1024, "num_tokens": 1}, "prompt"),
        ({"prompt": "x" * 900_000, "num_tokens": 1}, "prompt"),
        ({"prompt": "", "num_tokens": 1}, "prompt"),
        ({"prompt": [], "num_tokens": 1}, "prompt"),
        ({"prompt": ["a", ""], "num_tokens": 1}, "prompt"),
        ({"prompt": 5, "num_tokens": 1}, "prompt"),
        ({"prompt": ["a"] * 100_000, "num_tokens": 1}, "prompt"),
        ({"prompt_ids": [], "num_tokens": 1}, "prompt_ids"),
        ({"prompt_ids": [[]], "num_tokens": 1}, "prompt_ids"),
        ({"prompt_ids": [1, 257], "num_tokens": 1}, "prompt_ids"),
        ({"prompt_ids": [-1], "num_tokens": 1}, "prompt_ids"),
        ({"prompt_ids": ["1"], "num_tokens": 1}, "prompt_ids"),
        ({"num_tokens": 1}, None),
        (HI | {"prompt_ids": [1]}, None),
        (HI | {"temperature": -1}, "temperature"),
        (HI | {"top_p": 0}, "top_p"),
        (HI | {"top_k": 0}, "top_k"),
        (HI | {"top_k": 2**63}, "top_k"),
        (HI | {"seed": -1}, "seed"),
        (HI | {"timeout_s": 0}, "timeout_s"),
        (HI | {"max_tokens": 5}, "max_tokens"),
        (HI | {f"field{i}": 1 for i in range(50_000)}, "field0"),
        ({"prompt_ids": ["a"] * 100_000, "num_tokens": 1}, "prompt_ids"),
        ("a string", None),
        (None, None),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_an_invalid_request_is_a_400_that_names_the_field(
    client: FlaskClient, body: Any, param: str | None
) -> None:
    response = client.post("/inference", data=json.dumps(body), content_type=JSON)
    error = response.get_json()["error"]
    assert response.status_code == 400
    assert set(error) == {"message", "type", "param", "code"}
    code = "context_length_exceeded" if "the context of" in error["message"] else "invalid_request"
    assert (
        error["param"] == param
        and error["code"] == code
        and error["type"] == "invalid_request_error"
    )


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"\x00", b'{"prompt": "a\x00b", "num_tokens": 1}', b'{"prompt": "\xff", '
                                                                   b'"num_tokens": 1}',
     b'{"prompt": "hi", "num_tokens": NaN}', b'{"prompt": "hi", "num_tokens": 1, "temperature": '
                                             b'Infinity}',
     b'{"prompt": "\\ud800", "num_tokens": 1}', b"[" * 100_000],
    ids=lambda raw: repr(raw[:30]),
)  # fmt: skip
def test_malformed_json_is_a_400(client: FlaskClient, raw: bytes) -> None:
    assert client.post("/inference", data=raw, content_type=JSON).status_code == 400
    assert client.post("/inference", json=HI).status_code == 200


@pytest.mark.parametrize(
    "text", ["a\0b", "😀", "<|endoftext|>", " ", "日本語", "\u202e"], ids=ascii
)
def test_unusual_text_is_ordinary_text(client: FlaskClient, text: str) -> None:
    answer = client.post(
        "/inference", json={"prompt": text, "num_tokens": 1, "echo": True}
    ).get_json()
    assert answer["completion"].startswith(text)
    assert answer["usage"]["prompt_tokens"] == len(text.encode())


def test_routes_that_do_not_exist_methods_and_sizes_are_refused_in_the_same_form(
    client: FlaskClient,
) -> None:
    for response, status in (
        (client.get("/nope"), 404),
        (client.get("/inference"), 405),
        (client.post("/inference", data=b"x" * 1_000_001, content_type=JSON), 413),
    ):
        assert response.status_code == status and set(response.get_json()["error"]) == {
            "message",
            "type",
            "param",
            "code",
        }
    chunks = client.post(
        "/inference",
        input_stream=io.BytesIO(b"x" * 1_000_001),
        environ_overrides={"wsgi.input_terminated": True},
        content_type=JSON,
    )
    assert chunks.status_code == 413, "a chunked body, which names no length"
    assert (
        client.post(
            "/inference", data=json.dumps(HI).ljust(1_000_000), content_type=JSON
        ).status_code
        == 200
    )
    assert "POST /inference" in client.get("/nope").get_json()["error"]["message"]


@pytest.mark.parametrize(
    ("mode", "settings"), [("static", {"max_batch_size": 2}), ("windowed", {"batch_size_limit": 2})]
)
def test_a_group_beyond_the_modes_limit_is_refused(
    mode: str, settings: dict[str, Any], client_of: Callable[..., FlaskClient]
) -> None:
    response = client_of(mode, **settings).post(
        "/inference", json={"prompt": ["a", "b", "c"], "num_tokens": 1}
    )
    assert response.status_code == 400
    assert response.get_json()["error"]["message"].startswith(
        "Maximum batch size exceeded: 3 completions"
    )


def test_a_full_queue_is_a_429_with_retry_after(client_of: Callable[..., FlaskClient]) -> None:
    client = client_of(max_batch_size=1, max_waiting=1)
    long = [Inference([0], 1000), Inference([0], 1000)]
    client.application.extensions["server"].manager.enqueue(long)
    response = client.post("/inference", json=HI)
    assert response.status_code == 429 and response.headers["Retry-After"] == "1"
    assert client.get("/stats").get_json()["refused"] == 1
    client.application.extensions["server"].manager.cancel(long)
    assert client.post("/inference", json=HI).status_code == 200
    # more prompts than the server can ever hold: trying again would not help
    assert (
        client.post("/inference", json={"prompt": ["a", "b", "c"], "num_tokens": 1}).status_code
        == 400
    )


def test_a_deadline_is_a_504_from_the_request_or_from_the_server(
    client_of: Callable[..., FlaskClient],
) -> None:
    long = {"prompt": "hi", "num_tokens": 1000}
    assert client_of().post("/inference", json=long | {"timeout_s": 0.02}).status_code == 504
    strict = client_of(request_timeout_s=0.02)
    response = strict.post("/inference", json=long)
    assert response.status_code == 504 and response.get_json()["error"]["code"] == "deadline_passed"
    assert strict.post("/inference", json=HI | {"timeout_s": 30}).status_code == 200
    assert strict.get("/stats").get_json()["expired"] == 1


def test_a_server_that_drains_answers_503_and_is_not_ready(client: FlaskClient) -> None:
    client.application.extensions["server"].manager.drain()
    assert client.post("/inference", json=HI).status_code == 503
    assert client.get("/ready").status_code == 503 and client.get("/health").status_code == 200


def test_a_failing_engine_is_a_500_and_the_next_request_is_served(
    client_of: Callable[..., FlaskClient],
) -> None:
    class Sometimes(Generator):
        fails = True

        def generate(self, iteration: Iteration) -> list[int]:
            if self.fails:
                raise RuntimeError("no luck")
            return [65] * sum(row.samples for row in iteration.rows)

    generator = Sometimes()
    client = client_of(engine=lambda: generator)
    failed = client.post("/inference", json=HI)
    assert failed.status_code == 500 and failed.get_json()["error"]["code"] == "generation_failed"
    generator.fails = False
    assert client.post("/inference", json=HI).get_json()["completion"] == "AAAAA"


def test_stats_count_one_run_and_start_anew_after_a_reset(client: FlaskClient) -> None:
    for tokens in (3, 3, 5):
        client.post("/inference", json={"prompt": "hi", "num_tokens": tokens})
    client.post("/inference", json={"prompt": "", "num_tokens": 1})
    stats = client.get("/stats?iterations=1").get_json()
    assert stats["total-tokens-handled"] == 11 and stats["completed"] == 3 and stats["invalid"] == 1
    assert stats["throughput"] == pytest.approx(11 / stats["total-elapsed-time"])
    assert stats["latency-by-requested-tokens"]["3"]["requests"] == 2
    assert (
        stats["largest_batch"] == 1
        and stats["useful_fraction"] == 1.0
        and len(stats["iterations"]) == 11
    )
    assert {"mean_ttft_ms", "p99_tpot_ms", "mean_queue_time_ms", "definitions"} <= set(stats)
    assert client.get("/stats").get_json() == client.get("/stats").get_json()
    client.post("/stats/reset", json={})
    assert client.get("/stats").get_json()["completed"] == 0


def test_the_front_page_says_what_this_server_is(client: FlaskClient) -> None:
    page = client.get("/").get_json()
    assert (
        page["mode"] == "dynamic"
        and page["model"] == "fake"
        and page["config"]["max_batch_size"] == 32
    )
    bodies = {
        "/live/load": {"rate": 0},
        "/v1/completions": {"prompt": "hi"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    }
    for route in page["routes"]:
        method, path = route.replace("{name}", "fake").split()
        assert client.open(path, method=method, json=bodies.get(path, HI)).status_code == 200


def test_requests_at_once_share_a_batch(client_of: Callable[..., FlaskClient]) -> None:
    client = client_of(max_batch_size=8)
    application, statuses = client.application, []

    def ask() -> None:
        statuses.append(
            application.test_client()
            .post("/inference", json={"prompt": "hi", "num_tokens": 50})
            .status_code
        )

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 8 and client.get("/stats").get_json()["largest_batch"] > 1
