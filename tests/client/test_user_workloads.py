"""Workloads of several users and of priorities, and how both are sent to servers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from rich.console import Console

from client.draws import WorkloadError
from client.groups import describe, described
from client.progress import Progress
from client.traces import Request
from client.wire import wire
from client.workloads import Workload
from compare.comparison import Comparison
from compare.options import parse

GREEDY, MODEST = "greedy,20,uniform:50:200", "modest,2,choice:1,25,100,10-40"
LEVELS = ["0.1:1", "0.9:2"]


def of(requests: Sequence[Request], user: str) -> list[Request]:
    return [request for request in requests if request.user == user]


def test_each_user_sends_at_a_rate_with_lengths_and_in_seconds_of_its_own() -> None:
    requests = Workload(users=[GREEDY, MODEST], seed=3).requests(None)
    at = [request.at for request in requests]
    assert at == sorted(at) and max(at) < 40, "the trace ends with the last TO"
    assert [request.id for request in requests] == list(range(len(requests)))
    greedy, modest = of(requests, "greedy"), of(requests, "modest")
    assert len(greedy) + len(modest) == len(requests)
    assert len(greedy) == pytest.approx(800, abs=3 * 800**0.5) and greedy[0].at < 1
    assert len(modest) == pytest.approx(60, abs=3 * 60**0.5)
    assert 10 <= modest[0].at < modest[-1].at < 40
    assert {r.num_tokens for r in modest} == {1, 25, 100}, "lengths with commas"
    assert min(r.num_tokens for r in greedy) >= 50 and max(r.num_tokens for r in greedy) <= 200
    gaps = np.diff([request.at for request in greedy])
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.15), "exponential, as Poisson's are"
    assert requests == Workload(users=[GREEDY, MODEST], seed=3).requests(None)
    assert requests != Workload(users=[GREEDY, MODEST], seed=4).requests(None)


def test_users_without_seconds_send_a_number_of_requests() -> None:
    requests = Workload(users=["a,30,fixed:5", "b,10,fixed:7"]).requests(2000)
    assert len(requests) == 2000 and len(of(requests, "a")) == pytest.approx(1500, abs=80)
    assert requests[-1].at == pytest.approx(50, abs=5)


def test_one_users_requests_do_not_depend_on_what_the_other_asks() -> None:
    def greedy(modest: str) -> list[tuple[float, int]]:
        requests = Workload(users=["greedy,20,uniform:50:200,0-30", modest]).requests(None)
        return [(request.at, request.num_tokens) for request in of(requests, "greedy")]

    assert greedy("modest,2,fixed:3,0-30") == greedy("modest,9,normal,10-12")


def test_a_user_who_comes_back_is_named_twice() -> None:
    users = ["greedy,5,fixed:9", "modest,5,fixed:9,0-10", "modest,5,fixed:9,20-30"]
    at = np.array([r.at for r in of(Workload(users=users).requests(None), "modest")])
    assert np.any(at < 10) and not np.any((at > 10) & (at < 20)) and np.any(at > 20)


def test_priorities_are_drawn_in_their_shares_and_change_nothing_else() -> None:
    plain = Workload(seed=3, prefixes="2:9:1").requests(3000, "poisson:5")
    requests = Workload(seed=3, prefixes="2:9:1", priorities=LEVELS).requests(3000, "poisson:5")
    levels = [request.priority for request in requests]
    assert levels.count(1) == pytest.approx(300, abs=50)
    assert levels.count(1) + levels.count(2) == 3000
    assert [r.model_copy(update={"priority": None}) for r in requests] == plain
    some = Workload(priorities=["0.5:1", "0.5:0"]).requests(200)
    assert {request.priority for request in some} == {1, None}, "the default needs no saying"
    talks = Workload(sessions="4:1", priorities=["0.5:1", "0.5:2"]).requests(80, "poisson:5")
    by_talk = [{r.priority for r in talks[i : i + 4]} for i in range(0, 80, 4)]
    assert all(len(levels) == 1 for levels in by_talk), "a conversation keeps its level"
    assert {1} in by_talk and {2} in by_talk


def test_classes_are_drawn_in_their_shares_with_their_limits_and_change_nothing_else() -> None:
    plain = Workload(seed=3).requests(3000, "poisson:5")
    mix = ["0.3:chat=ttft:200,tpot:50", "0.7:batch=ttft:9000"]
    requests = Workload(seed=3, slo_mix=mix).requests(3000, "poisson:5")
    found = [(r.slo_class, r.slo_ttft_ms, r.slo_tpot_ms) for r in requests]
    assert set(found) == {("chat", 200.0, 50.0), ("batch", 9000.0, None)}
    assert found.count(("chat", 200.0, 50.0)) == pytest.approx(900, abs=80)
    without = {"slo_class": None, "slo_ttft_ms": None, "slo_tpot_ms": None}
    assert [r.model_copy(update=without) for r in requests] == plain
    assert " of class chat" in described(describe(requests))


def several(*whose: tuple[str | None, int | None]) -> list[Request]:
    """A request a second of these users and priorities."""
    return [
        Request(id=i, at=i, prompt="a", num_tokens=5, user=user, priority=priority)
        for i, (user, priority) in enumerate(whose)
    ]


FIVE, NINE = Workload("fixed:5"), "abcdefghi"
TALKS = Workload("fixed:5", sessions="2:0")
DESCRIBED: dict[str, Sequence[Request]] = {
    "3 requests, TOKENS, all at once": FIVE.requests(3),
    "3 requests, TOKENS, 7 in flight: the next is sent when one is answered":
        FIVE.requests(3, "closed:7"),
    "100 requests, TOKENS, 20 requests a second with index of dispersion 0.00":
        FIVE.requests(100, "constant:20"),
    "20 requests, TOKENS, 20 requests a second": FIVE.requests(20, "constant:20"),
    "4 requests in 2 conversations, TOKENS, 5 conversations a second, each later turn 0 s on "
    "average after an answer": TALKS.requests(4, "constant:5"),
    "4 requests, TOKENS, 1 requests a second; 2 of ann from 0.0 to 1.0 s, 1 of no user from 2.0 to "
    "2.0 s, 1 of bob from 3.0 to 3.0 s; 2 of level 1, 1 of level 2, 1 of the default level":
        several(("ann", 1), ("ann", 1), (None, None), ("bob", 2)),
    "9 requests, TOKENS, 1 requests a second; of 9 users": several(*((name, 0) for name in NINE)),
}  # fmt: skip


@pytest.mark.parametrize("words", DESCRIBED)
def test_a_load_is_described_as_it_was_realised(words: str) -> None:
    expected = words.replace("TOKENS", "5.0 completion tokens on average")
    assert described(describe(DESCRIBED[words])) == expected


def test_arrivals_that_come_in_bursts_are_dispersed() -> None:
    loads = [describe(FIVE.requests(2000, f"gamma:20:{cv}")) for cv in (0.3, 1, 3)]
    assert [load["requested_rate"] for load in loads] == pytest.approx([20] * 3, rel=0.15)
    even, poisson, bursty = [load["index_of_dispersion"] for load in loads]
    assert even < 0.3 and poisson == pytest.approx(1, abs=0.25) and bursty > 3


def test_users_of_a_comparison_send_for_their_seconds_or_300_requests() -> None:
    assert parse(["--users", GREEDY, MODEST]).numsamples is None
    assert parse(["--users", GREEDY, "b,2,normal"]).numsamples == 300
    assert parse(["--users", GREEDY, "b,2,normal", "--numsamples", "7"]).numsamples == 7


def test_a_user_who_would_send_nothing_is_found_before_any_server_starts() -> None:
    options = parse(["--users", GREEDY, "b,0.01,normal", "--numsamples", "20", "--repeats", "2"])
    with pytest.raises(WorkloadError, match=r"user b sends none of the 20 requests of seed \d; "):
        Comparison(options, Progress(Console()))


@pytest.mark.parametrize("api", ["inference", "openai"])
def test_a_server_gets_adapter_user_and_priority_where_there_are_any(api: str) -> None:
    ask = Request(id=0, at=0, prompt="hi", num_tokens=3, model="a", user="ann", priority=1)
    body = wire(api, "m", stream=True).body(ask)
    assert (body["model"], body["user"], body["priority"]) == ("a", "ann", 1)
    without = wire(api, "m").body(Request(id=0, at=0, prompt="hi", num_tokens=3))
    assert not {"user", "priority"} & without.keys(), "which some servers refuse"
