"""One trace sent by several processes: what a server gets, and what a watch sees, is the same."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from client.bounds import BoundedWatch, Bounds
from client.load import Interrupted, Watch, replay
from client.outcomes import Outcome
from client.processes import number_for, parts, read_number, replay_in
from client.traces import Request
from client.wire import wire
from client.workloads import Workload
from tests.programs import ran
from tests.servers import assert_all_answered
from tests.stub import Stub, stub

STUB = wire("openai", "stub")


class CountingWatch(Watch):
    def __init__(self) -> None:
        self.sends = self.ticks = 0
        self.seen: list[Outcome] = []

    def sent(self) -> None:
        self.sends += 1

    def ended(self, outcome: Outcome) -> None:
        self.seen.append(outcome)

    def tick(self) -> None:
        self.ticks += 1


def ours() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "client.processes" in p.cmdline()]


def bodies(server: Stub) -> list[str]:
    return sorted(map(repr, server.bodies))


def test_a_server_gets_the_same_requests_from_three_processes_as_from_one() -> None:
    requests = Workload("uniform:1:9").requests(60, "poisson:100")
    with stub() as alone:
        outcomes = replay(alone.url, requests, STUB)
    watch = CountingWatch()
    with stub() as server:
        of_three = replay_in(3, server.url, requests, STUB, watch=watch)
    assert_all_answered(of_three)
    assert bodies(server) == bodies(alone)
    assert [o.request for o in of_three] == list(requests) == [o.request for o in outcomes]
    assert [o.text for o in of_three] == [o.text for o in outcomes]
    for outcome in of_three:  # by one clock
        assert outcome.scheduled_at == outcome.request.at <= outcome.sent_at
    assert watch.sends == 60 and watch.ticks > 5
    assert sorted(o.request.id for o in watch.seen) == [r.id for r in requests]


def test_conversations_and_users_stay_whole() -> None:
    turns = Workload(sessions="3:0.1").requests(30, "poisson:50")
    shared = parts(turns, 4)
    assert sorted(r.id for part in shared for r in part) == [r.id for r in turns]
    for part in shared:
        here = {request.id for request in part}
        assert all(request.after in here for request in part if request.after is not None)
        assert sum(request.after is None for request in part) >= 2
    with stub() as server:
        assert_all_answered(replay_in(2, server.url, turns, STUB))
    closed = Workload("fixed:2").requests(40, "closed:5")
    shared = parts(closed, 3)
    assert [part[0].users for part in shared] == [2, 2, 1]
    assert [len(part) for part in shared] == [16, 16, 8]
    with stub(first_s=0.02) as server:
        outcomes = replay_in(3, server.url, closed, STUB)
    assert server.most_in_flight <= 5
    assert [outcome.request for outcome in outcomes] == list(closed)


def test_there_are_no_more_processes_than_users_or_requests() -> None:
    assert len(parts(Workload().requests(9, "closed:2"), 4)) == 2
    assert len(parts(Workload().requests(3, "poisson:9"), 8)) == 3
    assert len(parts(Workload().requests(2, "closed:100"), 8)) == 2


@pytest.mark.alone
def test_a_bound_ends_all_processes() -> None:
    requests = [Request(id=i, at=i / 20, prompt="a", num_tokens=2) for i in range(200)]
    bounded = BoundedWatch(Watch(), Bounds(max_seconds=1.0))
    with stub() as server, pytest.raises(Interrupted) as stopped:
        replay_in(2, server.url, requests, STUB, watch=bounded)
    ended = [outcome.request.id for outcome in stopped.value.outcomes]
    assert bounded.cut == "--max-seconds 1" and bounded.ticks == 20
    assert ended == sorted(ended) and 10 <= len(ended) < 60
    failing = BoundedWatch(Watch(), Bounds(max_failures=3))
    with pytest.raises(Interrupted):
        replay_in(2, "http://127.0.0.1:9", requests, STUB, watch=failing)
    assert failing.cut == "--max-failures 3"
    assert not ours()


def test_a_process_that_dies_ends_the_replay_with_what_there_is(
    capfd: pytest.CaptureFixture[str],
) -> None:
    requests = [Request(id=i, at=i / 20, prompt="a", num_tokens=2) for i in range(400)]

    class Killing(CountingWatch):
        def ended(self, outcome: Outcome) -> None:
            super().ended(outcome)
            if len(self.seen) == 20:
                ours()[0].kill()

    with stub() as server, pytest.raises(Interrupted) as stopped:
        replay_in(2, server.url, requests, STUB, watch=Killing())
    assert stopped.value.outcomes
    assert "ended with code -9" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_client(number: signal.Signals) -> None:
    with stub() as server:
        command = [sys.executable, "client/client.py", "--url", server.url, "--api", "openai"]
        load = ["--numsamples", "900", "--arrival", "poisson:30", "--client-processes", "2"]
        client = subprocess.Popen([*command, *load, "--quiet"], start_new_session=True)
        until = time.monotonic() + 60
        while len(server.bodies) < 20 and time.monotonic() < until:
            time.sleep(0.05)
        children = psutil.Process(client.pid).children()
        assert len(children) >= 2
        send = os.killpg if number == signal.SIGINT else os.kill
        send(client.pid, number)  # a terminal's Ctrl-C is for the group
        assert client.wait(20) == {signal.SIGKILL: -9}.get(number, 130)
        assert not psutil.wait_procs(children, 5)[1]


def test_the_number_is_one_until_a_load_needs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert number_for(Workload().requests(100, "poisson:20")) == 1
    assert number_for(Workload().requests(100, "closed:64")) == 1
    assert number_for(Workload().requests(100, "burst")) == 1, "a hundred at once are few"
    assert number_for(Workload().requests(768, "burst")) == 4
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert number_for(Workload().requests(768, "burst")) == 1
    assert read_number("auto") is None and read_number("64") == 64
    for text in ("0", "65", "-1", "two", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError, match="a number from 1 to 64"):
            read_number(text)


def test_the_flag_is_refused_in_a_sentence() -> None:
    done = ran("client.client", "--numsamples", "9", "--client-processes", "0")
    assert done.returncode == 2
    assert "--client-processes: give auto, or a number from 1 to 64" in done.stderr
