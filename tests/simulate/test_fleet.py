"""Replicas behind a router, beside what queueing theory says of them, and by hand."""

from __future__ import annotations

import functools
import math
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scheduling.errors import EngineFailed
from scheduling.inference import CachedPrefix, Inference
from scheduling.policies import Dynamic, NoBatching, Plan, View
from scheduling.prefix_cache import block_keys
from simulate import PS, Loop, SimulatedReplica
from simulate.costs import Costs
from simulate.fleet import Failure, Fleet, Layout
from simulate.loop import ARRIVE
from tests.virtual import make_scheduler

TOKEN_S = 0.01
COSTS = Costs.straight("token", round(TOKEN_S * PS))  # each iteration as long as the others


def poisson(rate: float, tokens: list[int], seed: int) -> list[tuple[float, Inference]]:
    at = np.random.default_rng([seed, 1]).exponential(1 / rate, len(tokens)).cumsum()
    return [(float(t), Inference([0], n)) for t, n in zip(at, tokens)]


def geometric(mean: float, n: int, seed: int) -> list[int]:
    return [int(k) for k in np.random.default_rng(seed).geometric(1 / mean, n)]


def serve(
    trace: list[tuple[float, Inference]], layout: Layout, policy: Any = None, **limits: Any
) -> Fleet:
    limits = {"max_in_flight": 10**6, "n_blocks": 10**6} | limits
    build = functools.partial(make_scheduler, policy or NoBatching(), **limits)
    fleet = Fleet(loop := Loop(), layout, build, COSTS)
    loop.serve([(at, [inference]) for at, inference in trace], fleet)
    return fleet


def mean_wait(trace: list[tuple[float, Inference]]) -> float:
    return statistics.mean(
        math.nan if i.admitted_at is None else i.admitted_at - i.arrived_at for _, i in trace
    )


def erlang_c(k: int, offered: float) -> float:
    """The probability of waiting of M/M/k."""
    terms = [offered**n / math.factorial(n) for n in range(k)]
    last = offered**k / math.factorial(k) * k / (k - offered)
    return last / (sum(terms) + last)


@pytest.mark.nightly
def test_rows_that_cost_nothing_are_servers_of_one_queue() -> None:
    """M/M/k: Erlang's C. An arrival waits for the end of an iteration besides."""
    rows, load, mean = 8, 0.85, 25.0
    rate = load * rows / (mean * TOKEN_S)
    trace = poisson(rate, geometric(mean, 20_000, 1), 2)
    serve(trace, Layout(), Dynamic(), max_batch_size=rows)
    expected = erlang_c(rows, load * rows) * mean * TOKEN_S / (rows * (1 - load))
    assert mean_wait(trace) - TOKEN_S / 2 == pytest.approx(expected, rel=0.1)


@pytest.mark.nightly
def test_at_random_each_replica_is_a_queue_of_its_own_and_a_look_at_them_helps() -> None:
    load, mean, k = 0.8, 25.0, 4
    rate = load * k / (mean * TOKEN_S)
    waits = {}
    for router in ("random", "round_robin", "power_of_two", "least_requests"):
        trace = poisson(rate, geometric(mean, 10_000, 4), 5)
        fleet = serve(trace, Layout(k, router))
        assert min(fleet.sent.values()) > 0.9 * 10_000 / k, router
        waits[router] = mean_wait(trace)
    alone = load * mean * TOKEN_S / (1 - load)  # M/M/1
    shared = erlang_c(k, load * k) * mean * TOKEN_S / (k * (1 - load))  # M/M/k: none can be better
    assert waits["random"] == pytest.approx(alone, rel=0.1)
    assert alone > waits["round_robin"] > waits["power_of_two"] > waits["least_requests"]
    assert waits["least_requests"] > 0.95 * shared


def test_tokens_tell_more_than_requests_where_lengths_differ() -> None:
    def wait(router: str) -> float:
        tokens = [int(n) for n in np.random.default_rng(8).choice([5, 500], 3_000, p=[0.9, 0.1])]
        trace = poisson(0.8 * 4 / (54.5 * TOKEN_S), tokens, 9)
        serve(trace, Layout(4, router))
        return mean_wait(trace)

    assert wait("least_tokens") < 0.8 * wait("least_requests")


def test_shared_prefixes_are_found_where_they_were_computed() -> None:
    def cached(router: str) -> int:
        rng = np.random.default_rng(10)
        trace = []
        for k in range(400):
            ids = [int(rng.integers(40))] * 40 + [k] * 4
            keys = block_keys(ids, 4)
            trace.append((k / 20, Inference(ids, 5, prefix=CachedPrefix(keys))))
        serve(trace, Layout(8, router), Dynamic(), max_batch_size=8, n_blocks=200)
        return sum(inference.cached_tokens for _, inference in trace)

    assert cached("prefix") > 1.3 * cached("random")


def test_a_slow_replica_gets_less_from_whoever_looks() -> None:
    sent = {}
    for router in ("round_robin", "least_requests"):
        trace = poisson(4.0, geometric(50.0, 1_000, 11), 12)
        sent[router] = serve(trace, Layout(4, router, slow={2: 3.0})).sent
    assert sent["round_robin"][2] == 250
    assert sent["least_requests"][2] < 0.6 * sent["least_requests"][0]


def test_what_a_failing_replica_has_ends_and_a_new_one_comes() -> None:
    """A request of 1 s each 0.5 s: replica 0 fails at 2.25 s, and number 2 is up at 4.25 s."""
    trace = [(0.5 * k, Inference([0], 100)) for k in range(12)]
    layout = Layout(2, "least_requests", start_s=2.0, failures=[Failure(0, 2.25)], seed=1)
    fleet = serve(trace, layout)
    failed = [k for k, (_, i) in enumerate(trace) if isinstance(i.error, EngineFailed)]
    assert len(failed) == 1 and trace[failed[0]][1].answered_at == 2.25
    assert fleet.changes[2:] == [(2.25, 1, 1), (4.25, 2, 0)]
    assert set(fleet.sent) == {0, 1, 2}
    served = [i for k, (_, i) in enumerate(trace) if k not in failed]
    assert all(i.error is None and i.answered_at for i in served)
    # two until 1 s; two, then one that starts beside one that is up, until 4 s
    assert [fleet.facts(end_s)["replica_s"] for end_s in (1.0, 4.0)] == [2.0, 8.0]


def test_requests_and_answers_of_a_server_come_one_after_another() -> None:
    """Iterations of 10 ms; 4 ms a request and 3 ms an answer, of three that come at once."""
    ms = PS // 1000
    costs = replace(COSTS, request_turn=4 * ms, answer_turn=3 * ms)
    loop, left = Loop(), {}

    def ended(now: float, inference: Inference) -> tuple[()]:
        left[inference] = now
        return ()

    scheduler = make_scheduler(Dynamic(), max_batch_size=4)
    replica = SimulatedReplica(loop, scheduler, costs, ended=ended)
    at = [0.0, 0.0, 0.0, 0.031, 0.06, 0.06]
    trace = [Inference([0], 2) for _ in at]
    loop.at(63 * ms, ARRIVE, replica.fail, EngineFailed("The replica failed."))
    loop.serve([(t, [inference]) for t, inference in zip(at, trace)], replica)
    assert [i.arrived_at for i in trace[:4]] == [0.0, 0.004, 0.008, 0.036]
    assert [i.answered_at for i in trace[:4]] == [0.02, 0.03, 0.03, 0.056]
    assert [left[i] for i in trace[:4]] == [0.02, 0.03, 0.033, 0.056]
    # of the last two, one was queued when it failed
    assert [(type(i.error), i.arrived_at) for i in trace[4:]] == [
        (EngineFailed, 0.06),
        (EngineFailed, 0.0),
    ]
    assert not replica.has_work


def test_whoever_comes_while_none_is_up_waits_and_missed_failures_are_told() -> None:
    late = Inference([0], 100)
    missed = [Failure(0, 1.2), Failure(0, 5.0)]  # while it starts again, and when all is done
    layout = Layout(1, start_s=2.0, failures=[Failure(0, 1.0), *missed])
    fleet = serve([(0.0, Inference([0], 100)), (1.5, late)], layout)
    assert late.arrived_at == 3.0 and late.answered_at == 4.0 and fleet.missed == missed


def test_a_policy_that_runs_nobody_is_found_out() -> None:
    class Idle(Dynamic):
        def plan(self, view: View) -> Plan:
            return Plan()

    with pytest.raises(RuntimeError, match="1 requests wait and 0 run, and the plan computes none"):
        serve([(0.0, Inference([0], 1))], Layout(), Idle())
