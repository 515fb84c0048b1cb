"""Replicas on Ray Serve, where Ray is installed: what test_conformance.py does not ask."""

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
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from client.calls import ServerError, get, post
from compare import servers
from compare.servers import Launched
from config.settings import ConfigError
from scheduling import routers
from scheduling.routers import ON_RAY, PrefixAffinity
from server.replicas import serve
from server.request import Request
from tests.server.fronts import fetch
from tests.servers import PATIENCE_S, ROOT, free_port, launched, metric, scrape, wait_until

pytest.importorskip("ray", reason="Ray is not installed: pip install -r requirements-ray.txt")
pytestmark = pytest.mark.extra


def remaining_of(session: int) -> list[str]:
    """Return its processes that still run."""
    command = ["ps", "-o", "pid=,args=", "--sid", str(session)]
    listed = subprocess.run(command, capture_output=True, text=True)
    return [line for line in listed.stdout.splitlines() if "<defunct>" not in line]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """Two replicas, since they start slowly; each test leaves them whole, but the last one.

    The interpreter's path is one that bash would take apart: `ray.init` never returned. The current
    folder has a config.py and a server.py of a user's: replicas imported those.
    """
    settings = "--model fake --loop-interval-ms 20 --max-batch-size 32 --body-timeout-s 3"
    program = f"-m server.replicas.serve dynamic --replicas 2 {settings}".split()
    folder = tmp_path_factory.mktemp("user")
    for name in ("config.py", "server.py"):
        (folder / name).write_text("raise SystemExit")
    venv = tmp_path_factory.mktemp("of") / 'a "new" co$mer; #ü'
    venv.symlink_to(sys.prefix)
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(sys, "executable", str(venv / "bin" / "python"))
        with contextlib.chdir(folder):
            launched = stack.enter_context(servers.launched(program))
        servers.wait_until_ready(launched.process, launched.url, PATIENCE_S)
        yield launched


def place_of(fleet: Launched) -> str:
    return fleet.url.removeprefix("http://")


def names(url: str) -> list[str]:
    return [*get(f"{url}/stats")["replicas"]]


def answering(url: str) -> set[str]:
    """The replicas that answer; none if one is silent."""
    try:
        return {*names(url)}
    except ServerError:
        return set()


def burst(url: str, n: int, tokens: int = 30) -> list[Any]:
    body = {"prompt": "hi", "num_tokens": tokens}
    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(lambda _: post(f"{url}/inference", body), range(n)))


@contextlib.contextmanager
def stream_at(
    fleet: Launched, path: str = "/inference", num_tokens: int = 100
) -> Iterator[http.client.HTTPResponse]:
    """Send a streamed request; yield the answer once its first event has come."""
    with contextlib.closing(http.client.HTTPConnection(place_of(fleet))) as connection:
        body = json.dumps({"prompt": "hi", "num_tokens": num_tokens, "stream": True})
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.readline().startswith(b'data: {"index":0')
        yield response


def test_each_replica_has_a_batch_as_large_as_its_rows_and_reports_add_up(fleet: Launched) -> None:
    """Ray's own caps are 5 requests at a replica, and an adapter's 10 threads."""
    two = fleet.url
    post(f"{two}/stats/reset")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: burst(f"{two}/replicas/{name}", 32, 150), names(two)))
    with pytest.raises(ServerError, match="num_tokens"):
        post(f"{two}/inference", {"prompt": "hi", "num_tokens": 0})
    stats = get(f"{two}/stats")
    each = stats["replicas"].values()
    assert [(of["largest_batch"], of["completed"]) for of in each] == [(32, 32), (32, 32)]
    assert (stats["completed"], stats["invalid"]) == (64, 1)
    assert stats["kv_blocks"] == 2 * 32 * 64
    assert stats["live_rows"] == sum(of["live_rows"] for of in each)
    assert stats["max_e2el_ms"] == max(of["max_e2el_ms"] for of in each)
    text = scrape(two)
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1
    for name in names(two):
        labels = f'{{mode="dynamic",model_name="fake",replica="{name}"}}'
        assert f"vllm:num_requests_running{labels}" in text
    page = get(f"{two}/replicas/{names(two)[0]}/stats?iterations=1")
    assert page["iterations"] and page["completed"] == 32
    for path in ("/stats?iterations=1", "/live/events", "/requests/1"):
        with pytest.raises(ServerError, match="/replicas/NAME/"):
            get(f"{two}{path}")
    one, other = (f"{two}/replicas/{name}" for name in names(two))
    post(f"{one}/stats/reset")
    assert [get(f"{each}/stats")["completed"] for each in (one, other)] == [0, 32]
    assert [get(f"{one}/{path}")["status"] for path in ("health", "ready")] == ["ok", "ready"]
    for path in ("health", "ready"):
        with pytest.raises(ServerError, match="no replica none"):
            get(f"{two}/replicas/none/{path}")


def test_a_body_that_does_not_come_is_a_408(fleet: Launched) -> None:
    connection = http.client.HTTPConnection(place_of(fleet), timeout=PATIENCE_S)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json", "Content-Length": "20"}
        connection.request("POST", "/inference", b'{"prompt"', headers)
        response = connection.getresponse()
        assert response.status == 408 and b"--body-timeout-s of 3 s" in response.read()


def test_a_stream_of_a_replica_that_is_killed_ends_with_a_sentence(fleet: Launched) -> None:
    pids = {name: get(f"{fleet.url}/replicas/{name}/")["pids"][-1] for name in names(fleet.url)}
    victim = min(pids)
    with stream_at(fleet, f"/replicas/{victim}/inference") as response:
        os.kill(pids[victim], signal.SIGKILL)
        *_, last, done = response.read().decode().split("\n\n")[:-1]
    assert "is gone; send it once more" in last and done == "data: [DONE]"
    wait_until(lambda: len(answering(fleet.url) - {victim}) == 2)


def test_requests_of_an_ingress_that_is_killed_end_with_a_sentence(fleet: Launched) -> None:
    """A plain one had Ray's bare 500, and a stream was cut off; later ones wait for the next."""

    def ingress() -> int:
        return int(get(fleet.url)["pids"][-1])

    def running() -> float:
        servers = [f"{fleet.url}/replicas/{name}" for name in names(fleet.url)]
        return sum(metric(each, "vllm:num_requests_running") for each in servers)

    killed, sentence = ingress(), "The ingress that had this request is gone; send it once more."
    body = {"prompt": "hi", "num_tokens": 300}
    with stream_at(fleet, num_tokens=300) as streamed, ThreadPoolExecutor(1) as pool:
        plain = pool.submit(fetch, fleet.url, "POST", "/inference", body)
        wait_until(lambda: running() == 2)
        os.kill(killed, signal.SIGKILL)
        *_, last, done = streamed.read().decode().split("\n\n")[:-1]
        response = plain.result()
    assert sentence in last and done == "data: [DONE]"
    assert response.status == 503 and sentence in response.body.decode()
    assert response.headers["Content-Type"] == "application/json"
    assert ingress() != killed


@pytest.mark.parametrize(("flags", "sentences"), [
    (["--model", "fake", "--port", "TAKEN"], ["choose another --port"]),
    (
        ["--model", "demo", "--host", "0.0.0.0"],
        ["warning: any client that reaches 0.0.0.0", "64 replicas of 1 CPUs need 64"],
    ),
])  # fmt: skip
def test_a_failed_start_is_a_sentence_and_leaves_nothing(
    flags: list[str], sentences: list[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"TAKEN": str(taken.getsockname()[1])}
        argv = ["--port", str(free_port()), *(ports.get(flag, flag) for flag in flags)]
        program = "-m", "server.launch", "dynamic", "--replicas", "64"
        with launched(sys.executable, *program, *argv) as process:
            output, _ = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 2 and all(each in output for each in sentences), output
            assert "Traceback" not in output and not remaining_of(process.pid)


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_cluster_that_is_not_there_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def init(*_: Any, **__: Any) -> None:
        raise ConnectionError("Ray says so")

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(SystemExit):
        serve.main(["dynamic", "--model", "fake", "--replicas", "2", "--port", str(free_port())])
    assert "error: Ray says so" in capsys.readouterr().err


def test_paths_are_of_the_folder_from_which_it_is_started(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("ann short")
    program = "-m", "server.launch", "dynamic", "--replicas", "2", "--api-keys", "keys"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2 and "line 1" in done.stderr, done.stderr


# ---- settings and routers, without a cluster


def read(*words: str) -> serve.Fleet:
    return serve.read(["dynamic", "--model", "fake", "--replicas", "3", *words])


def test_values_of_autoscale_are_ray_serves_own() -> None:
    fleet = read("--autoscale", "max_replicas=4", "target_ongoing_requests=24")
    assert fleet.rule is not None and fleet.most == 4
    assert (fleet.rule.min_replicas, fleet.rule.initial_replicas) == (1, 3)
    assert fleet.rule.target_ongoing_requests == 24
    assert read().rule is None and read().most == 3


@pytest.mark.parametrize(("words", "sentence"), [
    ("target_tokens=4000", "--autoscale target_tokens: name one of min_replicas, "),
    ("max_replicas", "--autoscale max_replicas: "),
    ("max_replicas=many", "--autoscale max_replicas: "),
    ("max_replicas=1 min_replicas=2", "--autoscale max_replicas"),
])  # fmt: skip
def test_a_wrong_value_of_autoscale_is_a_sentence(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read("--autoscale", *words.split())
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)


def test_new_settings_do_not_move_it_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["dynamic", "--model", "fake", "--replicas", "3"]
    address = read().config.address
    monkeypatch.setenv("EB_MAX_BATCH_SIZE", "7")
    assert serve.reread(argv, address).config.max_batch_size == 7
    monkeypatch.setenv("EB_PORT", "8765")
    with pytest.raises(ConfigError, match=f"--port stay {address} until"):
        serve.reread(argv, address)


class Id(str):
    """A ReplicaID: one that has a name, and may be a key."""

    @property
    def unique_id(self) -> str:
        return str(self)


def pending(request: Request, number: int, to: str | None = None, tried: Sequence[str] = ()) -> Any:
    metadata = SimpleNamespace(internal_request_id=str(number))
    context = SimpleNamespace(should_backoff=False)
    kwargs = {"to": to, "tried": tried}
    return SimpleNamespace(
        args=[request], kwargs=kwargs, metadata=metadata, routing_context=context
    )


class RoutedReplicas:
    """A router, and the replicas that it knows."""

    def __init__(self, name: str, *names: str):
        with warnings.catch_warnings(action="ignore"):  # of Ray
            from server.replicas.ray_routers import OurRouter
        self.router: Any = OurRouter.__new__(OurRouter)
        self.router.initialize_state(name, 16)
        self.router._use_replica_queue_len_cache = False  # Ray's own counts
        self.replicas = [SimpleNamespace(replica_id=Id(each), routing_stats={}) for each in names]
        self._n = 0

    def sent(self, request: Request, to: str | None = None, tried: Sequence[str] = ()) -> str:
        """Return the replica that gets a request; it is not answered."""
        self._n += 1
        call = pending(request, self._n, to, tried)
        ranks = asyncio.run(self.router.choose_replicas(self.replicas, call))
        chosen = ranks[0][0].replica_id
        self.router.on_send_request(chosen)
        return str(chosen)

    def is_answered(self, replica: str) -> None:
        """A request there ends; of a short one Ray says only then that it was routed."""
        self.router.on_request_completed(Id(replica), "")
        self.router.on_request_routed(pending(Request([[1]], 1), 0), Id(replica), None)


def test_prompts_that_begin_alike_go_where_their_blocks_are() -> None:
    fleet = RoutedReplicas("prefix", "a", "b", "c")
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


def test_the_fewest_tokens_are_what_was_reported_and_what_was_sent_since() -> None:
    routers.report_ages_s.clear()
    fleet = RoutedReplicas("least_tokens", "a", "b")
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
    assert {round(age) for age in [*routers.report_ages_s][:2]} == {2}, "for report_age_ms"


def test_answered_requests_are_no_load_and_a_new_replica_does_not_get_all() -> None:
    fleet = RoutedReplicas("power_of_two", "a", "b")
    request = Request([[1]], 1)
    for _ in range(100):
        fleet.is_answered(fleet.sent(request))
    fleet.replicas[0].replica_id = Id("new")
    assert {fleet.sent(request) for _ in range(2)} == {"b", "new"}


def test_requests_that_come_at_once_do_not_all_go_where_the_fewest_tokens_were() -> None:
    fleet = RoutedReplicas("least_tokens", "a", "b")
    fleet.replicas[0].routing_stats = {"at": time.time() - 1, "tokens": 5}
    calls = [pending(Request([[1]], 9), number) for number in range(8)]
    # Ray has sent none of them yet
    ranks = [asyncio.run(fleet.router.choose_replicas(fleet.replicas, call)) for call in calls]
    chosen = [each[0][0].replica_id for each in ranks]
    assert (chosen.count("a"), chosen.count("b")) == (4, 4)
    waits = pending(Request([[1]], 9), 8)
    for _ in range(3):  # Ray asks again while no replica has room
        asyncio.run(fleet.router.choose_replicas(fleet.replicas, waits))
    loads = [fleet.router._load(each.replica_id).known.tokens for each in fleet.replicas]
    assert sum(loads) == 5 + 9 * 10, "each request once"


def test_a_replica_that_died_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = RoutedReplicas("prefix", "a")
    fleet.sent(Request([[1] * 64], 8))
    (of_ray,) = type(fleet.router).__bases__
    monkeypatch.setattr(of_ray, "update_replicas", lambda router, replicas: None)
    fleet.router._replica_id_set = set()  # Ray leaves a dead one out before it says so
    fleet.router.update_replicas([])
    assert not fleet.router._router._sent and not fleet.router._sent


@pytest.mark.parametrize("name", ON_RAY)
def test_a_request_goes_to_the_replica_that_it_names_or_to_one_with_room(name: str) -> None:
    fleet = RoutedReplicas(name, "a", "b", "c")
    request = Request([[1] * 64], 8, user="ann")
    assert [fleet.sent(request, to) for to in "aabbcc"] == list("aabbcc")
    homes = {fleet.sent(request) for _ in range(20)}
    assert len(homes) == 1 or name != "session", "a user stays where the first request went"
    assert {fleet.sent(request, tried=["a", "b"]) for _ in range(20)} == {"c"}
    assert {fleet.sent(request, tried=["b"]) for _ in range(20)} <= {"a", "c"}
    assert fleet.sent(request, tried=["a", "b", "c"]) in "abc"


def test_sigterm_finishes_what_is_in_flight_and_leaves_nothing_running(fleet: Launched) -> None:
    with stream_at(fleet) as response:
        fleet.process.send_signal(signal.SIGTERM)
        body = {"prompt": "hi", "num_tokens": 1}

        def refusal() -> tuple[int, bytes] | None:
            late = fetch(fleet.url, "POST", "/inference", body)
            return None if late.status == 200 else (late.status, late.body)

        status, text = wait_until(refusal)
        assert status == 503 and json.loads(text)["error"]["code"] == "draining", "no 404 of Ray's"
        assert response.read().endswith(b"data: [DONE]\n\n")
    assert fleet.process.wait(PATIENCE_S) == 0
    assert fleet.process.stdin
    fleet.process.stdin.close()  # else what ends a server with us goes on waiting for that
    wait_until(lambda: not remaining_of(fleet.process.pid))
