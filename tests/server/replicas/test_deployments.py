"""A comparison of replicas on Ray Serve: sums of all, and nothing left running."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from client.load import Watch
from client.measure import Target, measure
from client.wire import Plain
from compare import deployments, options
from compare.deployments import Deployed, added_over_time
from compare.report import sentences
from config.flags import parse as build_from
from config.settings import ConfigError
from generate import auto
from generate.auto import build
from server.api.messages import Answer
from server.replicas import serve
from server.replicas.replica import Full, Replica
from server.request import Request
from tests.programs import output
from tests.servers import asks, processes_with


@pytest.mark.extra
@pytest.mark.nightly
def test_a_comparison_on_ray_serve_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In `dynamic` each token is one live row, if the budget is so large that no prompt is cut."""
    pytest.importorskip("ray", reason="Ray is not installed: requirements-ray.txt")
    monkeypatch.setenv("STARTED_BY", str(tmp_path))  # all that is started has it, orphans too
    words = f"--skip-calibration --replicas 2 --router least_tokens --out {tmp_path} "
    words += "--modes dynamic --model fake --fake-slowdown 3 --token-budget 2048 "
    output("compare", words + "--numsamples 20 --arrival poisson:40 --lengths choice:5,20")
    assert processes_with("STARTED_BY", str(tmp_path)) == []
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["deployment"] == {"replicas": 2, "router": "least_tokens"}
    result = json.loads((tmp_path / "dynamic.json").read_text())
    tokens = sum(request["completion_tokens"] for request in result["requests"])
    assert result["completed"] == 20 and result["live_rows"] == tokens, result["server"]
    assert result["config"]["fake_slowdown"] == 3
    each = result["server"]["by_replica"].values()
    assert len(each) == 2 and sum(replica["completed"] for replica in each) == 20
    assert sum(replica["total_output_tokens"] for replica in each) == tokens
    assert result["largest_batch"] == max(replica["largest_batch"] for replica in each)
    assert min(replica["completed"] for replica in each) > 0, "both got some"
    over_time = result["occupancy_over_time"]
    busy_rows_s = sum(replica["occupancy"] * replica["busy_s"] * 32 for replica in each)
    assert sum(over_time["live"]) * over_time["bin_s"] == pytest.approx(busy_rows_s, rel=0.01)
    page = (tmp_path / "report.md").read_text()
    assert "each on 2 replicas on Ray Serve, router least_tokens" in page
    for name in result["server"]["by_replica"]:
        assert f"| dynamic | {name} |" in page.replace("dynamic (overloaded)", "dynamic")


def of_serve(words: list[str]) -> Any:
    return serve.read(["dynamic", "--model", "fake", *words])


WORDS: dict[Callable[[list[str]], Any], dict[str, str]] = {
    options.parse: {
        "--replicas 2": "pip install -r requirements-ray.txt",
        "--replicas 0": "--replicas 0: give 1 or more",
        "--replicas two": "argument --replicas",
        "--replicas 2 --router rr": "on Ray Serve there are power_of_two, least_tokens",
        "--router prefix": "add --replicas N",
    },
    of_serve: {
        "--replicas 0": "give 1 or more",
        "--router prefix": "add --replicas N",
        "--replicas 2 --router rr": "invalid choice: 'rr'",
        "--replicas 2 --record x": "file of one server",
        "--replicas 2 --header-timeout-s 5": "Ray's proxy has no --header-timeout-s",
        "--replicas 2 --http-processes=2": "leave --http-processes out",
        "--replicas 2 --max-batch-size 0": "--max-batch-size",
        "--replicas 2 --replica 2": "unknown flag --replica",
    },
}


@pytest.mark.parametrize(
    ("parse", "argv"), [(parse, argv) for parse, table in WORDS.items() for argv in table]
)
def test_a_wrong_word_is_a_sentence_before_any_server_starts(
    parse: Callable[[list[str]], Any], argv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = object() if parse is of_serve else None  # None: it is not installed
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ray)
    with pytest.raises(ConfigError) as caught:
        parse(argv.split())
    assert WORDS[parse][argv] in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("character", "'\\")
def test_a_folder_in_which_ray_does_not_start_is_a_sentence(
    character: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(sys, "executable", path := f"/a/new{character}comer/.venv/bin/python")
    with pytest.raises(ConfigError, match="rename the folder of") as caught:
        of_serve(["--replicas", "2"])
    assert path in str(caught.value)


def test_memory_is_counted_for_all_replicas_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray spreads them; how many a machine gets it does not say before."""
    settings = {"model": "gpt2", "weights": "random", "tokenizer": "bytes", "device": "cpu"}
    config = build("dynamic", settings | {"kv_cache": "2GB", "max_batch_size": 99}, {})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=5e9))
    up, down = {"Alive": True}, {"Alive": False}

    def refused(replicas: int, *nodes: dict[str, bool]) -> str:
        known = {"cluster_resources": lambda: {"CPU": 64}, "nodes": lambda: nodes}
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(**known))
        try:
            serve.check_resources(serve.Fleet(config, replicas, "power_of_two", None))
        except ConfigError as error:
            return str(error)
        return ""

    assert refused(1, up) == refused(2, up) == refused(4, up, up) == ""
    assert refused(3, up).startswith("3 replicas of gpt2 need 0.")
    assert refused(3, up).endswith(
        "has 5.00 GB; lower --replicas or --kv-cache or choose a smaller --model"
    )
    apart = "with 5 replicas spread evenly over 2 machines, 3 replicas of gpt2 need "
    assert refused(5, up, down, up).startswith(apart)


def test_servers_share_the_cores_unless_threads_are_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "physical_cores", lambda: 8)

    def threads(servers: int, **environment: str) -> int:
        argv = ["dynamic", "--model", "gpt2", "--weights", "random", "--device", "cpu"]
        return build_from(argv, serve.sharing_cores(servers), environment, None).threads

    assert [threads(3), threads(16), threads(3, EB_THREADS="auto")] == [2, 1, 2]
    assert threads(3, EB_THREADS="8") == 8


def test_a_report_of_an_earlier_run_says_what_its_servers_were_behind() -> None:
    """Runs until 2026-11-27 name their front end, Ray's or HAProxy, which has left."""
    now = {"replicas": 2, "router": "prefix"}
    for ray in (now, now | {"front": "ray"}):
        assert sentences.deployed({"deployment": ray}) == "2 replicas on Ray Serve, router prefix"
    before = {"front": "proxy", "replicas": 1, "router": "leastconn"}
    behind = "1 replica behind HAProxy, router leastconn"
    assert sentences.deployed({"deployment": before}) == behind


def test_rows_of_replicas_over_time_add_up() -> None:
    """One runs 2 rows from 0 to 4, the other 3 rows from 2 to 6; a third nothing."""
    total = added_over_time([[[0.0, 4.0, 2, 0, 0, 0, 0]], [[2.0, 4.0, 3, 0, 0, 0, 0]], []])
    thirds = [float(np.mean(part)) for part in np.array_split(total["live"], 3)]
    assert thirds == pytest.approx([2.0, 5.0, 3.0], abs=0.02)
    assert total["started_at"] == 0 and total["bin_s"] * len(total["live"]) == pytest.approx(6)
    assert added_over_time([[], []])["live"] == []


def test_with_a_replaced_replica_no_sums_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(url: str, *_: Any, **__: Any) -> dict[str, Any]:
        return {"replicas": {"a": {}, "c": {}}}

    monkeypatch.setattr(deployments, "get", get)
    monkeypatch.setattr(Target, "begin", lambda self: None)
    monkeypatch.setattr(Target, "replay", lambda *_: [])
    target = Deployed("x", "http://x", Plain(), replicas=["a", "b"])
    assert target.are_several
    result, _ = measure(target, asks(1, 1), {}, 1.0, Watch())
    assert result.live_rows is None and result.occupancy is None
    assert "a replica was replaced" in next(iter(result.errors))


@pytest.mark.parametrize("more", ["", "--autoscale max_replicas=4"])
def test_without_ray_the_command_that_installs_it_is_named_before_a_file_is_fetched(
    more: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(serve, "load_tokenizer", lambda name: pytest.fail("it was fetched"))
    with pytest.raises(SystemExit) as ended:
        serve.main(["dynamic", "--model", "fake", "--replicas", "2", *more.split()])
    assert ended.value.code == 2
    assert "pip install -r requirements-ray.txt" in capsys.readouterr().err


# ---- a replica in an event loop, as in an ingress: requests that it hands back or refuses

# two rows and no queue; an iteration takes 20 ms
SETTINGS = {"model": "fake", "max_batch_size": 2, "max_waiting": 0, "loop_interval_ms": 20}
SHORT, LONG = Request([[1, 2]], 2), Request([[1, 2]], 30)


def run(what: Callable[[Replica], Awaitable[Any]], **settings: Any) -> Any:
    """Return the result of a call of a replica `a` that has loaded."""

    async def alone() -> Any:
        replica = Replica(build("dynamic", SETTINGS | settings, {}), "a")
        try:
            assert await asyncio.to_thread(replica.manager.wait_until_loaded)
            return await what(replica)
        finally:
            await asyncio.to_thread(replica.engine.close)

    return asyncio.run(alone())


async def first_of(events: AsyncIterator[Any]) -> Any:
    """Return the first event; the rest is read, too."""
    first, *_ = [each async for each in events]
    return first


def status(result: Any) -> int:
    assert isinstance(result, Answer)
    return result.status


def counts(replica: Replica) -> list[int]:
    stats = replica.engine.report(None)
    return [stats[name] for name in ("completed", "refused", "cancelled")]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(("offer", "is_refused"), [
    ({"tries": 2}, False),
    ({"tries": 3, "tried": ["b"]}, False),
    ({"tries": 2, "tried": ["b"]}, True),  # the last one
    ({"tries": 3, "tried": ["a"]}, True),  # it had it already
    ({"tries": 3, "to": "a"}, True),  # no other is meant
    ({}, True),
])  # fmt: skip
def test_a_full_replica_hands_back(offer: dict[str, Any], is_refused: bool, stream: bool) -> None:
    async def fill(replica: Replica) -> None:
        held = [asyncio.create_task(replica.answer(LONG)) for _ in range(2)]
        while replica.manager.snapshot().running < 2:
            await asyncio.sleep(0.01)
        if stream:
            result = await first_of(replica.stream(SHORT, **offer))
        else:
            result = await replica.answer(SHORT, **offer)
        assert [*map(status, await asyncio.gather(*held))] == [200, 200]
        assert (status(result) == 429) if is_refused else (result == Full("a"))
        assert counts(replica) == [2, int(is_refused), 0]

    run(fill)


def test_with_room_it_answers_and_a_users_limit_is_not_asked_of_another_replica() -> None:
    async def twice(replica: Replica) -> None:
        first, second = [await replica.answer(SHORT, tried=["b"], tries=3) for _ in range(2)]
        assert (status(first), status(second)) == (200, 429)
        assert isinstance(second, Answer) and b"rate_limit_exceeded" in second.body

    run(twice, user_requests_per_minute=1)


def test_requests_while_it_drains_are_refused() -> None:
    async def drained(replica: Replica) -> None:
        replica.manager.drain()
        assert status(await replica.answer(SHORT, tries=3)) == 503
        assert status(await first_of(replica.stream(SHORT, tries=3))) == 503
        assert counts(replica)[2] == 0

    run(drained)
