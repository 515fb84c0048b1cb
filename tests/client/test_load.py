"""The replay: when requests are sent, and what is measured of a server with known instants."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from client.groups import describe
from client.load import Interrupted, Watch, replay
from client.measure import Target, measure, with_requests
from client.results import Result
from client.stopping import end_as_on_ctrl_c
from client.summary import summarise
from client.traces import Request
from client.wire import wire
from client.workloads import Workload
from tests.client.test_analysis import columns
from tests.programs import output, ran
from tests.servers import assert_all_answered
from tests.stub import stub

alone = pytest.mark.alone
STUB = wire("openai", "stub")


def at(*instants: float, tokens: int = 4) -> list[Request]:
    return [Request(id=i, at=t, prompt="a", num_tokens=tokens) for i, t in enumerate(instants)]


@alone
def test_a_slow_server_does_not_slow_its_load() -> None:
    requests = at(0.4, 0.0, 0.1, 0.2, 0.3)  # a trace need not be in order
    with stub(first_s=1.0) as server:
        outcomes = replay(server.url, requests, STUB)
    assert_all_answered(outcomes)
    assert [outcome.request for outcome in outcomes] == requests
    assert server.most_in_flight == 5, "all were sent before the first was answered"
    for outcome in outcomes:
        at_ = outcome.request.at
        assert outcome.scheduled_at == at_ <= outcome.sent_at < at_ + 0.5
        assert 1.0 <= outcome.ttft_s < 2.0


@alone
def test_a_closed_loop_never_has_more_in_flight_than_users_and_keeps_them_busy() -> None:
    requests = Workload("fixed:2").requests(20, "closed:4")
    with stub(first_s=0.05) as server:
        outcomes = replay(server.url, requests, STUB)
    assert_all_answered(outcomes)
    assert server.most_in_flight == 4
    assert len(server.bodies) == 20
    answered = sorted(outcome.ended_at for outcome in outcomes)
    for outcome in outcomes[4:]:
        last = max(instant for instant in answered if instant <= outcome.sent_at)
        assert outcome.sent_at - last < 0.3, "each is sent when an answer comes"


def test_a_closed_loop_sends_in_the_order_of_times_and_has_no_rate() -> None:
    """As in virtual time; a trace of one's own may have any."""
    requests = [
        each.model_copy(update={"at": float(9 - each.id)})
        for each in Workload("fixed:2").requests(6, "closed:1")
    ]
    assert describe(requests)["requested_rate"] is None
    with stub() as server:
        outcomes = replay(server.url, requests, STUB)
    sent = sorted(outcomes, key=lambda outcome: outcome.sent_at)
    assert [outcome.request.id for outcome in sent] == [5, 4, 3, 2, 1, 0]


def test_a_closed_loop_has_no_more_users_than_requests() -> None:
    """A million users of two requests took 919 MB."""
    with stub() as server:
        assert_all_answered(replay(server.url, Workload().requests(2, f"closed:{10**9}"), STUB))


@alone
def test_a_late_client_is_seen_from_the_schedule_and_marked() -> None:
    class StandingStill(Watch):
        """Stands still once, as a client does that is short of processor time."""

        pauses = iter([0.5])

        def sent(self) -> None:
            time.sleep(next(self.pauses, 0))

    with stub() as server:
        outcomes = replay(server.url, at(0.0, 0.1, 0.2), STUB, watch=StandingStill())
    assert_all_answered(outcomes)
    result = summarise(
        columns(outcomes), [(o.scheduled_at, o.sent_at, o.ended_at) for o in outcomes], {}
    )
    assert result.client_limited and result.number("max_schedule_lag_ms") > 250
    # coordinated omission would hide the wait of the second and third
    assert result.number("p99_e2el_from_schedule_ms") > 250
    assert outcomes[1].e2e_s < 0.3 < outcomes[1].ended_at - outcomes[1].scheduled_at


@alone
def test_counts_of_what_is_in_flight_do_not_beat_with_a_load_of_equal_gaps() -> None:
    """At equal intervals each of twenty counts per second fell on the same instant of a gap."""
    requests = Workload("fixed:2").requests(60, "constant:20")
    with stub(first_s=0.025) as server:
        result, _ = measure(Target("stub", server.url, STUB, ours=False), requests, {}, 10, Watch())
    assert result.achieved_rate and result.e2el.mean
    by_littles_law = result.achieved_rate * result.e2el.mean / 1e3
    assert result.mean_in_flight == pytest.approx(by_littles_law, abs=0.2)


def test_a_failure_is_a_sentence_and_ends_when_it_is_known() -> None:
    with stub(usage=False) as server:
        [outcome] = replay(server.url, at(0.0), STUB)
        assert "without usage" in outcome.error
        [outcome] = replay(server.url, at(0.0), wire("openai", "absent"))
        assert outcome.error == "404 no such model"
    with stub(first_s=5.0) as server:
        [outcome] = replay(server.url, at(0.0), STUB, timeout_s=0.3)
        assert outcome.error == "the answer was not complete after 0.3 s"
        assert 0.3 <= outcome.ended_at - outcome.sent_at < 5
    [outcome] = replay("http://127.0.0.1:9", at(0.0), STUB)
    assert outcome.error.startswith("ClientConnector")


@alone
def test_a_later_turn_repeats_the_conversation_after_a_time_of_thinking() -> None:
    requests = [
        Request(id=5, at=0.2, prompt="one", num_tokens=4),
        Request(id=6, at=0.2, prompt=" two", num_tokens=2, after=5, think_s=0.4),
        Request(id=8, at=0.0, prompt="three", num_tokens=2),
        Request(id=7, at=0.2, prompt=" four", num_tokens=2, after=6, think_s=0.0),
    ]
    with stub(first_s=0.1) as server:
        outcomes = replay(server.url, requests, STUB)
    assert_all_answered(outcomes)
    assert [outcome.request for outcome in outcomes] == requests
    assert [body["prompt"] for body in server.bodies] == [
        "three", "one", "oneabab two", "oneabab twoab four",
    ], "each earlier prompt, and its answer as it came"  # fmt: skip
    first, second, _, third = outcomes
    for before, later, think_s in ((first, second, 0.4), (second, third, 0.0)):
        assert later.scheduled_at == pytest.approx(before.ended_at + think_s)
        assert 0 <= later.sent_at - later.scheduled_at < 0.2
        assert later.ttft_s < 0.5, "from when it was due"


def test_nothing_follows_a_turn_that_failed() -> None:
    requests = Workload("fixed:2", sessions="3:0").requests(8, "constant:50")
    with stub() as server:
        target = Target("stub", server.url, wire("openai", "absent"), ours=False)
        result, outcomes = measure(target, requests, {"e2el": 60e3}, 10, Watch())
        assert len(server.bodies) == 3, "the first turn of each conversation"
    assert (result.completed, result.failed, result.attainment) == (0, 8, 0)
    not_sent = "not sent, as an earlier turn of its conversation failed"
    assert result.errors == {not_sent: 5, "404 no such model": 3}
    sent = [outcome.sent_at for outcome in outcomes if outcome.sent]
    assert result.achieved_rate == pytest.approx(2 / (max(sent) - min(sent))), "of those sent"
    records = with_requests(result, outcomes).requests
    assert ["sent_at" in record for record in records] == [True, False, False] * 2 + [True, False]


def test_a_sigterm_that_comes_while_an_object_is_deleted_ends_the_replay_too() -> None:
    # an exception raised there is ignored: a comparison that was to end went on until it was killed
    class Doomed:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    class Deletes(Watch):
        def sent(self) -> None:
            Doomed()

    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    end_as_on_ctrl_c()
    try:
        with stub(first_s=20.0) as server, pytest.raises(Interrupted):
            replay(server.url, at(0.0), STUB, watch=Deletes())
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


@pytest.mark.usefixtures("undrawn")
def test_the_client_runs_against_any_openai_server(tmp_path: Path) -> None:
    with stub() as server:
        load = f"--url {server.url}/v1 --api openai --numsamples 8 --arrival closed:2 --quiet"
        load += f" --lengths fixed:5 --goodput e2el:60000 --out {tmp_path}/run"
        shown = output("client.client", f"{load} --figure {tmp_path}/figure.png")
        assert "8 answered, 0 failed" in shown
        assert "8 requests, 5.0 completion tokens on average, 2 in flight" in shown
        assert {body["model"] for body in server.bodies} == {"stub"} and server.most_in_flight <= 2
        ended = ran("client.client", "--url", server.url, "--numsamples", "1")
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert "are asked with --api openai" in ended.stderr
    saved = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert saved["also"] == {"stub": server.url} and saved["config"] == {}
    result = Result.of(json.loads((tmp_path / "run" / "stub.json").read_text()))
    assert (result.completed, result.failed, result.other_length) == (8, 0, 0)
    assert result.goodput is not None and result.number("p50_ttft_ms") > 0
    assert result.requests[3]["text"] == "ababa"
    engines = "occupancy useful_fraction server mean_queue_time_ms littles_law"
    assert not any(result.json(engines.split()).values()), "it is none of ours"
    assert "| stub |" in (tmp_path / "run" / "report.md").read_text()
