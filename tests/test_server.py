"""A real gunicorn and real HTTP: many at once, shutdown in the middle, clients that die, bodies that are too large."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from client.data import PromptData, Request
from client.load import Outcome, ServerError, get, post, replay
from client.servers import wait_until_ready
from tests.servers import ROOT, launched, server

PATIENCE_S = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def asks(n: int, num_tokens: int, prompt: str = "one two three") -> list[Request]:
    return [Request(id=i, at=0, prompt=f"{prompt} {i}", num_tokens=num_tokens, seed=i) for i in range(n)]


def assert_all_answered(outcomes: list[Outcome]) -> None:
    assert [outcome.error for outcome in outcomes if outcome.error] == []


@pytest.mark.parametrize("mode", ["nobatch", "static", "windowed", "dynamic"])
def test_300_requests_at_once_are_all_answered(mode: str) -> None:
    with server(mode, {"model": "fake"}) as url:
        outcomes = replay(url, asks(300, 3))
        assert_all_answered(outcomes)
        assert all(outcome.answer and outcome.answer.completion_tokens == 3 for outcome in outcomes)
        stats = get(f"{url}/stats")
        assert stats["completed"] == 300 and stats["total-tokens-handled"] == 900
        assert stats["largest_batch"] == (1 if mode == "nobatch" else 32)


def test_256_rows_are_filled_and_1200_requests_at_once_are_all_answered() -> None:
    with server("dynamic", {"model": "fake", "max_batch_size": 256}) as url:
        assert_all_answered(replay(url, asks(256, 200)))
        assert get(f"{url}/stats")["largest_batch"] == 256
        assert_all_answered(replay(url, asks(1200, 5)))
        assert get(f"{url}/stats")["refused"] == 0


def test_requests_beyond_the_queue_are_refused_and_the_others_answered() -> None:
    with server("nobatch", {"model": "fake", "max_batch_size": 4, "max_waiting": 16}) as url:
        outcomes = replay(url, asks(60, 20))
        refused = [outcome.error for outcome in outcomes if outcome.error]
        assert 0 < len(refused) <= 40 and all(error.startswith("429 ") for error in refused)
        assert get(f"{url}/stats")["completed"] == 60 - len(refused)


def in_background(url: str, requests: list[Request]) -> tuple[threading.Thread, list[Outcome]]:
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.extend(replay(url, requests)))
    thread.start()
    return thread, outcomes


def wait_until_running(url: str, n: int) -> None:
    for _ in range(PATIENCE_S * 20):
        if get(f"{url}/stats")["largest_batch"] >= n:
            return
        time.sleep(0.05)
    raise AssertionError("the requests never ran")


def test_sigterm_finishes_what_is_in_flight_and_exits_0() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with launched(sys.executable, "app.py", "dynamic", "--model", "fake", "--port", str(port)) as process:
        wait_until_ready(process, url)
        thread, outcomes = in_background(url, asks(20, 500))
        wait_until_running(url, 20)
        process.send_signal(signal.SIGTERM)
        thread.join(PATIENCE_S)
        assert_all_answered(outcomes)
        assert len(outcomes) == 20
        assert process.wait(PATIENCE_S) == 0
        with pytest.raises(ServerError):
            get(f"{url}/health")


def test_ctrl_c_ends_at_once_and_tells_those_in_flight() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with launched(sys.executable, "app.py", "dynamic", "--model", "fake", "--port", str(port)) as process:
        wait_until_ready(process, url)
        thread, outcomes = in_background(url, asks(3, 1000))
        wait_until_running(url, 3)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
        assert process.wait(PATIENCE_S) == 0
        thread.join(PATIENCE_S)
        assert len(outcomes) == 3 and all(outcome.error for outcome in outcomes)
        assert "Traceback" not in (process.stdout.read() if process.stdout else "")


def test_requests_of_clients_that_have_gone_are_cancelled_and_their_row_is_free() -> None:
    with server("nobatch", {"model": "fake"}) as url:
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "hi", "num_tokens": 1000}).encode()
        dying = [socket.create_connection((host, int(port))) for _ in range(5)]
        for connection in dying:
            connection.sendall(b"POST /inference HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        wait_until_running(url, 1)
        for connection in dying:
            connection.close()
        assert_all_answered(replay(url, asks(1, 3)))
        stats = get(f"{url}/stats")
        assert stats["cancelled"] == 5 and stats["completed"] == 1


def test_a_killed_client_disturbs_nobody() -> None:
    with server("dynamic", {"model": "fake"}) as url:
        alone = replay(url, asks(5, 100))
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "hi", "num_tokens": 900}).encode()
        for abrupt in (True, False):
            with socket.create_connection((host, int(port))) as dying:
                dying.sendall(b"POST /inference HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                if abrupt:  # RST instead of FIN
                    dying.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        beside = replay(url, asks(5, 100))
        assert_all_answered(beside)
        assert [outcome.text for outcome in beside] == [outcome.text for outcome in alone]


def test_bodies_that_are_too_large_get_413_and_disturb_nobody() -> None:
    with server("dynamic", {"model": "fake"}) as url:
        thread, outcomes = in_background(url, asks(5, 300))
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as sending:
            sending.sendall(b"POST /inference HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\n\r\n")
            for _ in range(50):
                try:
                    sending.sendall(b"x" * 1_000_000)
                except OSError:
                    break  # refused before all of it was sent
            assert b"413" in sending.recv(100)
        for body, status in (({"prompt": "", "num_tokens": 1}, 400), ({"prompt": "x", "num_tokens": 2000}, 400)):
            with pytest.raises(ServerError, match=f"answered {status}"):
                post(f"{url}/inference", body)
        thread.join(PATIENCE_S)
        assert_all_answered(outcomes)


def test_a_slow_client_does_not_hold_up_the_others() -> None:
    with server("dynamic", {"model": "fake", "max_batch_size": 1, "max_waiting": 0}) as url:
        host, port = url.removeprefix("http://").split(":")
        slow = [socket.create_connection((host, int(port))) for _ in range(10)]
        for connection in slow:
            connection.sendall(b"POST /inf")  # and nothing more
        assert_all_answered(replay(url, asks(1, 3)))
        for connection in slow:
            connection.close()


def test_a_port_in_use_is_a_sentence_that_names_another() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with launched(sys.executable, "app.py", "dynamic", "--model", "fake", "--port", str(taken.getsockname()[1])) as process:
            output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 2 and "Address already in use" in output and "--port" in output


def test_start_up_says_what_is_served_and_how_to_listen_to_others() -> None:
    port = free_port()
    with launched(sys.executable, "app.py", "dynamic", "--model", "fake", "--port", str(port)) as process:
        wait_until_ready(process, f"http://127.0.0.1:{port}")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert (
        "serving fake" in output and "--host 0.0.0.0" in output and f"ready: dynamic mode on http://127.0.0.1:{port}" in output
    )


def test_demo_gives_the_same_greedy_texts_in_every_mode_over_http() -> None:
    requests = PromptData("uniform:1:80", seed=1).requests(24, "burst")
    texts: dict[str, list[str]] = {}
    for mode, settings in (
        ("nobatch", {}),
        ("static", {}),
        ("windowed", {}),
        ("dynamic", {}),
        ("naive", {"generator": "naive"}),
    ):
        with server("dynamic" if mode == "naive" else mode, {"model": "demo", **settings}) as url:
            outcomes = replay(url, requests)
            assert_all_answered(outcomes)
            texts[mode] = [outcome.text for outcome in outcomes]
    assert len(set(texts["nobatch"])) > 15
    assert all(found == texts["nobatch"] for found in texts.values())


def test_a_checkpoint_without_weights_stops_the_server_with_a_sentence(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 64, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    ended = subprocess.run(
        [sys.executable, "app.py", "dynamic", "--model", str(tmp_path), "--port", str(free_port())],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert ended.returncode == 2 and "damaged or no safetensors file" in ended.stderr and "Traceback" not in ended.stderr
