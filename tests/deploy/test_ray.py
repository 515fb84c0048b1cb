"""Replicas on Ray Serve: what test_conformance.py does not ask of every front end. Skipped where
Ray is not installed (requirements-ray.txt).
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.faults import replicas, tools
from benchmarks.faults.tools import Fault, Served
from client.calls import ServerError, get, post
from deploy.routers import PrefixAffinity
from tests.servers import PATIENCE_S, ROOT, free_port, wait_until
from wire.request import Request

pytest.importorskip("ray", reason="Ray is not installed: pip install -r requirements-ray.txt")
pytestmark = pytest.mark.extra


def started(*flags: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """deploy/serve.py in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "deploy.serve", "dynamic", "--port", str(free_port()), *flags],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, env=os.environ | (environment or {}),
    )  # fmt: skip


def remaining_of(session: int) -> list[str]:
    """Its processes that still run."""
    command = ["ps", "-o", "pid=,args=", "--sid", str(session)]
    found = subprocess.run(command, capture_output=True, text=True)
    return [line for line in found.stdout.splitlines() if "<defunct>" not in line]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Served]:
    """Two replicas for all tests, since they take long to start: each test leaves them whole, but
    the last, which ends them.
    """
    with tools.serving(replicas.SLOW, replicas.FLEET) as served:
        yield served


@pytest.fixture
def two(fleet: Served) -> str:
    return fleet.url


def names(url: str) -> list[str]:
    return [*get(f"{url}/stats")["replicas"]]


def burst(url: str, n: int, tokens: int = 30) -> list[Any]:
    body = {"prompt": "hi", "num_tokens": tokens}
    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(lambda _: post(f"{url}/inference", body), range(n)))


def test_as_many_in_flight_as_a_batch_has_rows_are_one_batch_on_each_replica(two: str) -> None:
    """Ray's own caps are 5 requests at a replica, and an adapter's 10 threads."""
    post(f"{two}/stats/reset")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: burst(f"{two}/replicas/{name}", 32, 150), names(two)))
    stats = get(f"{two}/stats")
    assert [each["largest_batch"] for each in stats["replicas"].values()] == [32, 32]
    assert [each["completed"] for each in stats["replicas"].values()] == [32, 32]
    assert stats["completed"] == 64 and stats["kv_blocks"] == 2 * 32 * 64
    parts = [each["live_rows"] for each in stats["replicas"].values()]
    assert stats["live_rows"] == sum(parts)


def test_reports_of_replicas_are_merged_and_shown_for_each(two: str) -> None:
    post(f"{two}/stats/reset")
    burst(two, 40, 5)
    with pytest.raises(ServerError, match="num_tokens"):
        post(f"{two}/inference", {"prompt": "hi", "num_tokens": 0})
    stats = get(f"{two}/stats")
    each = [of["completed"] for of in stats["replicas"].values()]
    assert sum(each) == stats["completed"] == 40 and min(each) > 5, "power of two"
    assert stats["invalid"] == 1
    assert stats["max_e2el_ms"] == max(of["max_e2el_ms"] for of in stats["replicas"].values())
    with contextlib.closing(http.client.HTTPConnection(two.removeprefix("http://"))) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1
    for name in names(two):
        assert (
            f'vllm:num_requests_running{{mode="dynamic",model_name="fake",replica="{name}"}}'
            in text
        )
    page = get(f"{two}/replicas/{names(two)[0]}/stats?iterations=1")
    assert page["iterations"] and page["completed"] in each
    for path in ("/stats?iterations=1", "/live/events", "/timeline"):
        with pytest.raises(ServerError, match="/replicas/NAME/"):
            get(f"{two}{path}")


def test_a_replica_that_is_killed_harms_those_alone_that_it_had(two: str) -> None:
    """They are told so, and another one comes in its place."""
    before = names(two)
    pids = {name: get(f"{two}/replicas/{name}/")["pids"] for name in before}
    outputs: dict[str, list[str]] = {name: [] for name in before}

    def ask(name: str) -> None:
        try:
            body = {"prompt": "hi", "num_tokens": 100}
            answered = post(f"{two}/replicas/{name}/inference", body)
            outputs[name].append(f"{len(answered['completion'])} letters")
        except ServerError as error:
            outputs[name].append(str(error))

    threads = [threading.Thread(target=ask, args=(name,)) for name in before * 5]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(get(f"{two}/replicas/{name}/stats")["live_rows"] for name in before))
    connection = http.client.HTTPConnection(two.removeprefix("http://"))
    body = json.dumps({"prompt": "hi", "num_tokens": 100, "stream": True})
    path = f"/replicas/{before[0]}/inference"
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    stream = connection.getresponse()
    assert stream.readline().startswith(b'data: {"index":0')
    os.kill(pids[before[0]][-1], signal.SIGKILL)
    *_, last, done = stream.read().decode().split("\n\n")[:-1]
    assert "is gone; send it once more" in last and done == "data: [DONE]"
    connection.close()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert outputs[before[1]] == ["100 letters"] * 5
    assert len(outputs[before[0]]) == 5
    assert all("is gone; send it once more" in each for each in outputs[before[0]])
    wait_until(lambda: len(set(names(two)) - {before[0]}) == 2)
    assert post(f"{two}/inference", {"prompt": "hi", "num_tokens": 3})["completion"]


def test_what_cannot_be_started_is_said_and_leaves_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('there is none')")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        wrong = {
            "Ray is missing; install it": started(
                "--model", "fake", environment={"PYTHONPATH": str(tmp_path)}
            ),
            "choose another --port": started("--model", "fake", "--port", port),
            "64 replicas of 1 CPUs need 64": started("--model", "demo", "--replicas", "64"),
            "give 1 or more": started("--model", "fake", "--replicas", "0"),
            "file of one server": started("--model", "fake", "--record", str(tmp_path / "x")),
        }
        for sentence, process in wrong.items():
            output, _ = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 2 and sentence in output, output
            assert "Traceback" not in output
            assert not remaining_of(process.pid)


# ---- routers, without a cluster


class Id(str):
    """A ReplicaID: one that has a name, and may be a key."""

    @property
    def unique_id(self) -> str:
        return str(self)


def pending(request: Request, number: int, to: str | None = None, tried: Sequence[str] = ()) -> Any:
    return SimpleNamespace(
        args=[request],
        kwargs={"to": to, "tried": tried},
        metadata=SimpleNamespace(internal_request_id=str(number)),
        routing_context=SimpleNamespace(should_backoff=False),
    )


class Fleet:
    """A router, and replicas that it is told of."""

    def __init__(self, name: str, *names: str):
        with warnings.catch_warnings(action="ignore"):  # Ray's own
            from deploy.ray_routers import OurRouter, PowerOfTwo
        self.router: Any
        if name == "power_of_two":
            self.router = PowerOfTwo.__new__(PowerOfTwo)
        else:
            self.router = OurRouter.__new__(OurRouter)
            self.router.initialize_state(name, 16)
        self.replicas = [SimpleNamespace(replica_id=Id(each), routing_stats={}) for each in names]
        self._n = 0

    def sent(self, request: Request, to: str | None = None, tried: Sequence[str] = ()) -> str:
        """Where it goes; it is not answered."""
        self._n += 1
        asked = pending(request, self._n, to, tried)
        ranks = asyncio.run(self.router.choose_replicas(self.replicas, asked))
        chosen = ranks[0][0].replica_id
        self.router.on_request_routed(asked, chosen, None)
        return str(chosen)


def test_prompts_that_begin_alike_go_where_their_blocks_are() -> None:
    fleet = Fleet("prefix", "a", "b", "c")
    begins = [list(range(k, k + 64)) for k in (0, 100, 200)]
    first = [fleet.sent(Request([begin], 8)) for begin in begins]
    assert sorted(first) == ["a", "b", "c"]
    for _ in range(3):
        again = [fleet.sent(Request([begin + [7] * 20], 8)) for begin in begins]
        assert again == first
    # also after that replica was full for one of them
    assert fleet.sent(Request([[7] * 64], 8), tried=[first[0]]) != first[0]
    assert fleet.sent(Request([begins[0]], 8)) == first[0]
    salted = {fleet.sent(Request([begins[0]], 8, cache_salt=str(k))) for k in range(6)}
    assert len(salted) > 1, "another salt shares no blocks"
    assert isinstance(fleet.router._router, PrefixAffinity)


def test_a_user_stays_with_a_replica() -> None:
    fleet = Fleet("session", "a", "b", "c")
    users = [f"user {k}" for k in range(30)]
    first = [fleet.sent(Request([[1]], 8, user=user)) for user in users]
    assert [fleet.sent(Request([[1]], 8, user=user)) for user in users] == first
    assert len(set(first)) == 3


def test_the_fewest_tokens_are_what_was_reported_and_what_was_sent_since() -> None:
    fleet = Fleet("least_tokens", "a", "b")
    a, b = fleet.replicas
    began = time.time()
    for each, tokens in ((a, 500), (b, 0)):
        each.routing_stats = {"at": began - 2, "tokens": tokens}
    assert fleet.sent(Request([[1] * 100], 300)) == "b"
    assert fleet.sent(Request([[1] * 10], 200)) == "b", "400 there now"
    assert fleet.sent(Request([[1] * 10], 10)) == "a", "610 there now"
    b.routing_stats = {"at": began - 1, "tokens": 0}
    assert fleet.sent(Request([[1] * 10], 10)) == "a", "a new one, made before all that"
    b.routing_stats = {"at": time.time(), "tokens": 5}
    assert fleet.sent(Request([[1] * 10], 10)) == "b"


def test_a_request_that_names_a_replica_goes_there() -> None:
    fleet = Fleet("least_tokens", "a", "b")
    assert [fleet.sent(Request([[1]], 8), to) for to in "aaabbb"] == list("aaabbb")


@pytest.mark.parametrize("name", ["power_of_two", "least_tokens", "prefix", "session"])
def test_a_request_that_found_no_room_goes_to_another_while_there_is_one(name: str) -> None:
    fleet = Fleet(name, "a", "b", "c")
    request = Request([[1] * 64], 8, user="ann")
    assert {fleet.sent(request, tried=["a", "b"]) for _ in range(20)} == {"c"}
    assert {fleet.sent(request, tried=["b"]) for _ in range(20)} <= {"a", "c"}
    assert fleet.sent(request, tried=["a", "b", "c"]) in "abc"


@pytest.mark.parametrize(
    "fault",
    [
        fault
        for fault in replicas.FAULTS
        if not fault.name.startswith("kill -9 of one")  # as a test above does
    ],
    ids=lambda fault: fault.name,
)
def test_a_promise_is_kept(fault: Fault, fleet: Served) -> None:
    seen = fault.seen(fleet, True)
    assert seen.kept, seen.text


def test_sigterm_finishes_what_is_in_flight_and_leaves_nothing_running(fleet: Served) -> None:
    connection = http.client.HTTPConnection(*fleet.address())
    body = json.dumps({"prompt": "hi", "num_tokens": 100, "stream": True})
    connection.request("POST", "/inference", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    fleet.process.send_signal(signal.SIGTERM)
    assert response.read().endswith(b"data: [DONE]\n\n")
    connection.close()
    assert fleet.process.wait(PATIENCE_S) == 0
    wait_until(lambda: not remaining_of(fleet.process.pid))
