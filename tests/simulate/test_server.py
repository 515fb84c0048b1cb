"""A simulated server: numbers that a hand confirms.

The fake engine takes 1 ms an iteration, 0.06 ms a row and 0.01 ms a prompt token. So a request
that is alone, of p prompt tokens and n completion tokens, takes n · 1.06 + 0.01 p milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from client import results
from client.bounds import Bounds
from client.draws import WorkloadError
from client.load import Watch
from client.measure import measure, with_requests
from client.outcomes import Outcome
from client.results import OF_FILE, Result
from client.traces import Request
from client.workloads import Workload
from compare.report import tables
from generate.auto import build
from scheduling.policies import NoBatching
from scheduling.user_policies import SOURCES, Source
from simulate import PS
from simulate.costs import FAKE, Costs
from simulate.fleet import Layout
from simulate.server import SimulatedServer

MS = PS // 1000
AWAY = replace(FAKE, name="away", request=1 * MS, answer=4 * MS)
ms = 1e-3


def served(
    requests: Sequence[Request], mode: str = "nobatch", costs: Costs = FAKE, stream: bool = False,
    jump: bool = True, watch: Watch | None = None, **settings: Any,
) -> tuple[Result, list[Outcome]]:  # fmt: skip
    config = build(mode, {"model": "fake", "device": "cpu", **settings}, {})
    target = SimulatedServer(mode, config, costs, stream=stream, jump=jump)
    return measure(target, requests, {}, 3600.0, watch or Watch())


def ask(i: int, at: float = 0.0, tokens: int = 10, **fields: Any) -> Request:
    """A prompt of ten ids: alone it takes 10.7 ms for ten tokens."""
    return Request(id=i, at=at, prompt_ids=[1 + i] * 10, num_tokens=tokens, **fields)


def latencies(outcomes: Sequence[Outcome]) -> list[float]:
    return [round(outcome.ended_at - outcome.sent_at, 9) for outcome in outcomes]


def answered(outcome: Outcome) -> tuple[Outcome, Any]:
    """Return an answer, and its timings by the server."""
    assert outcome.timings and not outcome.error
    return outcome, outcome.timings


def test_a_request_alone_takes_what_its_iterations_take() -> None:
    result, outcomes = served(Workload("fixed:10", prompts="ids").requests(30, "constant:50"))
    for answer, timings in map(answered, outcomes):
        first = (1.06 + answer.prompt_tokens * 0.01) * ms
        assert [answer.ttft_s, answer.e2e_s] == pytest.approx([first, first + 9 * 1.06 * ms])
        assert list(answer.itl_s) == pytest.approx([1.06 * ms] * 9)
        assert answer.sent_at == answer.scheduled_at and timings["queue_s"] == 0
    assert result.tpot.mean == pytest.approx(1.06) and result.live_rows == 300
    assert result.largest_batch == 1 and result.occupancy == pytest.approx(1 / 32)
    assert result.server["busy_s"] == pytest.approx(sum(latencies(outcomes)))


@pytest.mark.parametrize(("rate", "useful"), [("1", 1.0), ("0", 400 / (1 + 397 * 3 + 2 + 1))])
def test_draft_tokens_are_useful_as_often_as_they_are_accepted(rate: str, useful: float) -> None:
    """Before the last two tokens there are fewer: one, and none."""
    draft = f"acceptance:{rate}"
    result, _ = served([ask(0, tokens=400)], "dynamic", speculate=2, draft=draft)
    assert result.acceptance == float(rate) and result.live_rows == 400
    assert result.useful_fraction == pytest.approx(useful)
    assert result.occupancy == pytest.approx(1 / 32)
    shown, without = results.keys("acceptance"), served([ask(0)])[0]
    assert tables.present(shown, [([], [result])]) == shown
    assert tables.present(shown, [([], [without])]) == []


def test_a_queue_of_requests_one_at_a_time_is_lindleys() -> None:
    """Each waits for what is left of all before it."""
    result, outcomes = served(Workload("normal", prompts="ids").requests(200, "poisson:10"))
    free_at = 0.0
    for outcome in outcomes:
        (answer, timings), begins = answered(outcome), max(free_at, outcome.sent_at)
        assert timings["queue_s"] == pytest.approx(begins - outcome.sent_at, abs=1e-6)
        free_at = begins + (1.06 * answer.completion_tokens + 0.01 * answer.prompt_tokens) * ms
        assert outcome.ended_at == pytest.approx(free_at)
    assert (
        result.wall_clock_s == pytest.approx(free_at) and result.number("p99_queue_time_ms") > 100
    )
    law = result.littles_law
    assert law
    assert law["in_flight"] == pytest.approx(law["rate_x_latency"], rel=0.05)


def test_costs_around_iterations_are_seen_where_they_arise() -> None:
    """5 ms to the server, 7 back, 2 before each iteration: the server sees these last alone."""
    around = replace(FAKE, name="around", gap=2 * MS, request=5 * MS, answer=7 * MS)
    result, outcomes = served([ask(0), ask(1, at=1.0)], costs=around)
    assert latencies(outcomes) == [pytest.approx((10.7 + 10 * 2 + 5 + 7) * ms)] * 2
    answer, timings = answered(outcomes[1])
    assert timings["arrived_at"] == pytest.approx(1.005)
    assert timings["queue_s"] == pytest.approx(2 * ms)
    assert timings["e2e_s"] == pytest.approx((10.7 + 20) * ms)
    assert answer.ttft_s == pytest.approx((5 + 2 + 1.16 + 7) * ms)
    assert list(answer.itl_s) == pytest.approx([3.06 * ms] * 9)
    assert result.e2el.mean == pytest.approx(result.server["mean_e2el_ms"] + 12)
    slept, _ = served([ask(0)], loop_interval_ms=2)
    assert slept.e2el.mean == pytest.approx(10.7 + 20), "as the server's own sleep does"


def test_a_stream_ends_with_its_own_last_token_and_a_plain_answer_with_its_batch() -> None:
    together = [ask(0, tokens=2), ask(1, tokens=10)]
    first, each = 1 + 2 * 0.06 + 20 * 0.01, 1 + 2 * 0.06
    plain, outcomes = served(together, "static")
    assert latencies(outcomes) == [pytest.approx((first + 9 * each) * ms)] * 2
    assert plain.useful_fraction == pytest.approx(12 / 20)
    live = 2 * (first + each) + 8 * each
    assert plain.occupancy == pytest.approx(live / (32 * (first + 9 * each)))
    assert answered(outcomes[0])[1]["held_s"] == pytest.approx(8 * each * ms, abs=1e-6)
    _, outcomes = served(together, "static", stream=True)
    assert latencies(outcomes) == pytest.approx([(first + each) * ms, (first + 9 * each) * ms])


def test_users_of_a_closed_loop_send_when_they_are_answered() -> None:
    result, outcomes = served([ask(i, users=2) for i in range(6)])
    each = 10.7 * ms
    sent_at = [outcome.sent_at for outcome in outcomes]
    assert sent_at == pytest.approx([0, 0, each, 2 * each, 3 * each, 4 * each])
    assert latencies(outcomes) == pytest.approx([each] + [2 * each] * 5)
    assert result.wall_clock_s == pytest.approx(6 * each) and result.completed == 6
    _, outcomes = served([ask(i, users=1) for i in range(3)], costs=AWAY)
    assert [outcome.sent_at for outcome in outcomes] == pytest.approx([0, 15.7 * ms, 31.4 * ms])


def test_a_turn_repeats_the_conversation_a_thinking_time_after_the_answer() -> None:
    """Twenty bytes at first; then these, the three tokens of the answer, and ten more."""
    first = Request(id=0, at=1.0, prompt="x" * 20, num_tokens=3)
    second = Request(id=1, at=1.0, prompt="y" * 10, num_tokens=4, after=0, think_s=0.5)
    _, outcomes = served([first, second], costs=AWAY)
    ended = 1 + (3 * 1.06 + 20 * 0.01 + 5) * ms
    assert outcomes[0].ended_at == pytest.approx(ended)
    assert outcomes[1].sent_at == outcomes[1].scheduled_at == pytest.approx(ended + 0.5)
    assert answered(outcomes[1])[0].prompt_tokens == 20 + 3 + 10
    assert latencies(outcomes)[1] == pytest.approx((4 * 1.06 + 33 * 0.01 + 5) * ms)
    result, outcomes = served([first, second], request_timeout_s=0.002)
    assert outcomes[0].error.startswith("504 ") and not outcomes[1].sent
    assert (result.completed, result.failed) == (0, 2), "what was never sent failed too"
    cached, _ = served([first, second], "dynamic", prefix_caching=True, block_size=4)
    assert cached.cached_tokens == 20, "the last token of an answer was never computed"


def test_a_turn_that_outgrows_the_context_is_refused_as_a_server_does() -> None:
    first = Request(id=0, at=0.0, prompt="x" * 20, num_tokens=3)
    second = Request(id=1, at=0.0, prompt="y" * 20, num_tokens=3, after=0, think_s=0.25)
    third = second.model_copy(update={"id": 2, "after": 1})
    result, outcomes = served([first, second, third], max_model_len=40, block_size=8)
    beyond = "400 43 prompt tokens + 3 completion tokens is beyond the context of 40."
    assert outcomes[1].error == beyond
    assert outcomes[1].sent_at == pytest.approx(outcomes[0].ended_at + 0.25)
    assert [outcome.sent for outcome in outcomes] == [True, True, False]
    assert result.littles_law is None and result.failed == 2


def test_a_deadline_ends_a_waiting_request_and_a_full_queue_refuses_a_new_one() -> None:
    three, away = [ask(0), ask(1), ask(2)], replace(AWAY, answer=2 * MS)
    result, outcomes = served(three, costs=away, request_timeout_s=0.0145)
    assert not outcomes[0].error and [o.error[:4] for o in outcomes[1:]] == ["504 ", "504 "]
    # at the end of the iteration that runs 14.5 ms after they arrived: the second's own fourth
    assert latencies(outcomes)[1] == pytest.approx((1 + 10.7 + 1.16 + 3 * 1.06 + 2) * ms)
    assert (result.completed, result.failed, result.server["expired"]) == (1, 2, 2)
    full: dict[str, Any] = {"max_batch_size": 1, "max_waiting": 1}
    result, outcomes = served(three, costs=away, **full)
    assert [outcome.error[:4] for outcome in outcomes] == ["", "", "429 "]
    assert latencies(outcomes)[2] == pytest.approx(3 * ms) and result.server["refused"] == 1
    # the third user comes back at once, and again
    _, outcomes = served([ask(i, users=3) for i in range(6)], costs=away, **full)
    assert [o.sent_at for o in outcomes[3:]] == pytest.approx([3 * ms, 6 * ms, 9 * ms])


def test_a_trace_names_adapters_which_are_loaded_and_computed_at_a_cost() -> None:
    costs = replace(FAKE, load=20 * MS, adapter_token=MS)
    lora: dict[str, Any] = {"lora_random": "2:8", "max_loras": 1}
    asks = [ask(i, model=name) for i, name in enumerate(("lora-0", "fake", "lora-0", "lora-1"))]
    _, outcomes = served(asks, costs=costs, **lora)
    alone = [20 + 19 + 10.7, 10.7, 19 + 10.7, 20 + 19 + 10.7]
    assert latencies(outcomes) == pytest.approx([ms * sum(alone[: i + 1]) for i in range(4)])
    with pytest.raises(WorkloadError, match="names the model 'c', and there are fake, lora-0, "):
        served([ask(0, model="c")], **lora)


def test_a_request_that_no_server_takes_is_no_fault_of_a_users_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SOURCES, NoBatching, Source("mine.py:Mine", "0"))
    with pytest.raises(WorkloadError, match="request 0 of the trace can never be served"):
        served([ask(0, tokens=2000)])


def test_what_is_in_flight_is_counted_once_in_50_ms_from_first_to_last() -> None:
    class Ticks(Watch):
        n = 0

        def tick(self) -> None:
            self.n += 1

    result, _ = served([ask(0, at=3.0, tokens=900)], watch=(ticks := Ticks()))
    assert result.wall_clock_s == pytest.approx(0.9541) and 18 <= ticks.n <= 20
    assert result.mean_in_flight == 1.0


@pytest.mark.parametrize("limit", ["user_requests_per_minute", "user_tokens_per_minute"])
def test_a_request_counts_once_against_its_users_limits_beside_prefill_replicas(limit: str) -> None:
    """It counted at its prefill replica, and at its decode replica once its keys and values were
    there: here after 20 s, so that one was refused 61 s after the one before.
    """
    config = build("dynamic", {"model": "fake", limit: 1 if "requests" in limit else 600}, {})
    gbps = 8e-9 * config.token_bytes * 500 / 20
    long, later = Request(id=0, at=0.0, prompt_ids=[1] * 500, num_tokens=9), ask(2, 61.0, 60)
    asks = [long, ask(1, 30.0, 91), later]
    layout = Layout(2, prefill_replicas=1, kv_gbps=gbps)
    result, outcomes = measure(SimulatedServer("", config, FAKE, layout), asks, {}, 3600.0, Watch())
    assert [outcome.error[:4] for outcome in outcomes] == ["", "429 ", ""]
    assert outcomes[1].ended_at == 30.0, "before its prompt is computed"
    assert result.server["refused"] == 1


def test_quiet_days_are_counted_and_cost_no_time() -> None:
    """Ten took 84 s: twenty observations a second."""
    calls = mock.Mock(wraps=Watch(), over=False)
    days = 10 * 86_400.0
    asks = [ask(0, tokens=900), ask(1, at=days, tokens=900)]
    result, _ = served(asks, watch=calls)
    assert calls.tick.call_count < 1000
    assert result.mean_in_flight == pytest.approx(2 * 0.954 / days, rel=0.1)
    target = SimulatedServer("nobatch", build("nobatch", {"model": "fake"}, {}), FAKE)
    cut, _ = measure(target, asks, {}, 3600.0, Watch(), Bounds(max_seconds=60.0))
    assert cut.cut == {"at": "--max-seconds 60", "in_flight": 0, "unsent": 1}
    assert cut.mean_in_flight == pytest.approx(0.954 / 60, rel=0.1)


def test_requests_that_bring_no_seed_are_mispredicted_each_in_its_own_way() -> None:
    """As by a server, which counts seeds; once all had the same error, which orders nothing."""
    noisy: dict[str, Any] = {"order": "sjf", "length_predictor": "noisy:1"}
    ends = [
        [outcome.ended_at for outcome in served(asks, **noisy)[1]]
        for asks in ([ask(i) for i in range(8)], [ask(i, seed=i) for i in range(8)])
    ]
    assert ends[0] == ends[1] != sorted(ends[0])


CASES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("nobatch", {}, "poisson:20", {"sessions": "3:0.05"}),
    ("static", {"preserve_ordering": True}, "closed:6", {}),
    ("windowed", {"request_timeout_s": 0.3}, "poisson:60", {"priorities": ["0.5:1", "0.5:0"]}),
    ("dynamic", {"prefix_caching": True, "token_budget": 16}, "burst", {"prefixes": "3:40:1"}),
    ("dynamic", {"order": "srpt", "max_waiting": 3}, "poisson:60", {}),
    ("dynamic", {"kv_reservation": "demand", "kv_cache": "32blocks"}, "burst", {}),
    ("multibin", {}, "gamma:60:3", {"sessions": "2:0"}),
    ("dynamic", {"shed": True}, "poisson:90", {"slo_mix": ["1:a=ttft:100"]}),
]


@pytest.mark.parametrize(("mode", "settings", "arrival", "drawn"), CASES)
def test_jumping_gives_what_stepping_does_to_the_byte(
    mode: str, settings: dict[str, Any], arrival: str, drawn: dict[str, Any]
) -> None:
    settings = {"max_batch_size": 4, "max_model_len": 480, **settings}
    requests = Workload("uniform:1:60", seed=3, **drawn).requests(30, arrival)
    around = replace(FAKE, name="around", gap=MS // 3, request=MS, answer=MS)
    jumped, stepped, again = (
        json.dumps(
            with_requests(*served(requests, mode, around, mode == "static", k, **settings)).json(
                OF_FILE
            )
        )
        for k in (True, False, True)
    )
    assert jumped == stepped == again
