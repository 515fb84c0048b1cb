"""Iterations between which nothing changes are computed at once, to the same end as one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from client.load import Watch
from client.measure import measure
from client.traces import Request
from config import build
from scheduling.adapters import Adapters, Rule
from scheduling.inference import Inference, Iteration
from scheduling.policies import MODES, Dynamic, Fcfs, Order, Policy, Static
from simulate import PS, Arrival, Loop, SimulatedReplica, drive
from simulate.apart import Apart
from simulate.costs import FAKE, SECOND, Costs, Line
from simulate.fleet import Layout
from simulate.layouts import described
from simulate.loop import ARRIVE
from simulate.replica import Stretch
from simulate.run import SimulatedServer
from simulate.time import instant
from tests.counts import examples
from tests.virtual import Ask, any_order, any_policy, make_scheduler

ODD = Costs(
    "odd",
    Line(PS // 7, PS // 97, 12_345_678, PS // 1009, 999),
    *(PS // 333, 77, PS // 55, 9, 5),  # gaps
    request_turn=PS // 13,
    answer_turn=PS // 31,
    decode={1: Line(PS // 9, context=5), 3: Line(PS // 8, context=1)},
    load=PS // 19,
    adapter_token=12_345,
)
# so that requests come, and leave, when iterations begin and end
EVEN = Costs("even", Line(PS // 10), gap=PS // 10)


def serve(
    policy: Policy, order: Order, asks: Sequence[Ask], jump: bool, leaves: Sequence[float] = (),
    costs: Costs = ODD, **limits: Any,
) -> tuple[list[list[Any]], list[Any], int]:  # fmt: skip
    """Return the outcome of each inference, all iterations, and the number of stretches.

    leaves: how long after its request the k-th client goes, if it is still there.
    """
    scheduler = make_scheduler(policy, order=order, **limits)
    scheduler.plans_repeat &= jump  # else each iteration is planned
    groups = [ask.group(scheduler.limits.block_size) for ask in asks]
    loop, iterations, stretches = Loop(), [], 0

    def computed(stretch: Stretch) -> None:
        nonlocal stretches
        stretches += 1
        for k in range(stretch.n):
            rows = [
                (row.inference.id, row.start, row.n_tokens, row.idle, row.blocks[:])
                for row in stretch.rows(k)
            ]
            of = stretch.iteration
            facts = of.padding, of.running, of.preempted
            iterations.append((stretch.begins(k), stretch.end(k), rows, *facts))

    replica = SimulatedReplica(loop, scheduler, costs, computed=computed, jump=jump)
    for after, ask, group in zip(leaves, asks, groups):
        loop.at(instant(ask.at + after), ARRIVE, replica.cancel, group)
    loop.serve([(ask.at, group) for ask, group in zip(asks, groups)], replica)
    served = [
        [
            i.id, i.state, i.admitted_at, i.answered_at, i.token_times, i.tokens, i.standing.batch,
            i.standing.position, i.interruptions, i.cached_tokens, type(i.error),
            i.prefix and i.prefix.keys,
        ]
        for group in groups
        for i in group
    ]  # fmt: skip
    return served, iterations, stretches


@st.composite
def loads(draw: st.DrawFn) -> list[Ask]:
    several = st.builds(
        Ask, at=st.integers(0, 60).map(lambda t: t / 10), prompt=st.integers(1, 12),
        tokens=st.integers(1, 40), rows=st.sampled_from([1, 1, 1, 2]), n=st.sampled_from([1, 1, 2]),
        content=st.none() | st.sampled_from([0, 0, 1]), user=st.sampled_from([None, "a", "b"]),
        adapter=st.sampled_from(["", "a", "b", "c"]), priority=st.integers(0, 2),
        seed=st.integers(0, 3), deadline=st.none() | st.integers(1, 120).map(lambda t: t / 10),
        streamed=st.booleans(),
    )  # fmt: skip
    return sorted(draw(st.lists(several, min_size=1, max_size=8)), key=lambda ask: ask.at)


# the second one fills a block before the first does that comes to hold the same: that one is found
ALIKE = [Ask(0.0, 1, 20, content=0), Ask(0.1, 3, 30, content=0), Ask(2.5, 12, 2, content=0)]
THREE = [Ask(0.0, tokens=20), Ask(0.1, tokens=20), Ask(2.5, tokens=20)]


@examples(300)
@example(Dynamic(), Fcfs(), ALIKE, 3, 9, [], ODD, None)
# more rows decode than the budget allows; and the number of iterations decides when B joins
@example(Dynamic("whole", budget_counts="all", prefill="first"), Fcfs(), THREE, 3, 2, [], ODD, None)
@example(Dynamic(prefill="every:3"), Fcfs(), THREE, 2, 9, [], ODD, None)
@given(
    any_policy(), any_order(), loads(), st.integers(2, 4), st.sampled_from([2, 9]),
    st.lists(st.integers(0, 40).map(lambda t: t / 10), max_size=4), st.sampled_from([ODD, EVEN]),
    st.none()
    | st.tuples(st.integers(1, 2), st.sampled_from(get_args(Rule)), st.none() | st.just(1)),
)  # fmt: skip
def test_jumping_comes_to_what_stepping_does(
    policy: Policy, order: Order, asks: list[Ask], rows: int, budget: int, leaves: list[float],
    costs: Costs, slots: tuple[Any, ...] | None,
) -> None:  # fmt: skip
    limits: dict[str, Any] = {"max_batch_size": rows, "token_budget": budget, "n_blocks": 40}
    limits |= {"decoder_batch_sizes": [4], "max_in_flight": 12}
    if order.preemptive and not isinstance(policy, Dynamic):
        order = Fcfs()

    def served(jump: bool) -> tuple[Any, Any]:
        own = Adapters(*slots) if slots else None
        return serve(policy, order, asks, jump, leaves, costs, adapters=own, **limits)[:2]

    assert served(True) == served(False)


def test_a_prompt_that_sits_an_iteration_out_is_not_jumped_over() -> None:
    """Of a budget of one prompt the third waited until one of the first two ended."""
    asks = [Ask(0.0, prompt=9, tokens=20) for _ in range(3)]
    limits: dict[str, Any] = {"max_batch_size": 3, "token_budget": 9}
    stepped, jumped = (serve(Static(), Fcfs(), asks, jump, **limits) for jump in (False, True))
    assert jumped[:2] == stepped[:2]


@pytest.mark.parametrize("mode", list(MODES))
def test_who_decodes_alone_is_computed_in_few_stretches(mode: str) -> None:
    asks = [Ask(at=0.0, prompt=3, tokens=100), Ask(at=5.0, prompt=3, tokens=50)]
    _, iterations, stretches = serve(MODES[mode](), Fcfs(), asks, True)
    assert len(iterations) >= 100 and stretches <= 8, (len(iterations), stretches)


def test_a_trace_is_drawn_as_it_comes() -> None:
    drawn, seen = list[float](), list[int]()

    def trace() -> Iterable[Arrival]:
        for at in (0.0, 5.0, 6.0):
            drawn.append(at)
            yield at, [Inference([0], 1)]

    def planned(now: float, iteration: Iteration) -> None:
        seen.append(len(drawn))

    drive(make_scheduler(Dynamic()), trace(), lambda _: 1.0, planned=planned)
    assert seen[0] == 2, "the first, and the one that is waited for"


# ---- disaggregated prefill: the worked example of docs/scaling.md, and jumping, too


def served_apart(
    asks: Sequence[Ask], policy: Policy,
    order: Order = Fcfs(),  # noqa: B008  (it is frozen)
    costs: Costs = SECOND, jump: bool = True, prefill: int = 1, decode: int = 1, **limits: Any,
) -> tuple[list[Inference], list[tuple[Any, ...]]]:  # fmt: skip
    """Inferences and iterations. A token's keys and values travel for half a second."""
    layout = Layout(prefill + decode, "least_tokens", prefill_replicas=prefill, kv_gbps=16e-9)
    loop, iterations, groups = Loop(), [], [ask.group(4) for ask in asks]

    def computed(number: int, stretch: Stretch) -> None:
        for k in range(stretch.n):
            rows = [(row.inference.id, row.start, row.n_tokens) for row in stretch.rows(k)]
            iterations.append((number, stretch.begins(k) / PS, stretch.end(k) / PS, rows))

    apart = Apart(
        loop, layout, lambda: make_scheduler(policy, order=order, **limits), costs, token_bytes=1,
        computed=computed, ended=lambda *_: (), session=lambda inference: inference.user, jump=jump,
    )  # fmt: skip
    loop.serve([(ask.at, group) for ask, group in zip(asks, groups)], apart)
    return [inference for group in groups for inference in group], sorted(iterations)


def test_the_example_of_the_page() -> None:
    """Two rows, 3 blocks of 4 tokens, a budget of 4. B's keys and values wait for the link until
    A's are there, and then for A's blocks; D waits until both have left the prefill replica.
    """
    asks = [Ask(0, prompt=4, tokens=3), Ask(0, prompt=2, tokens=3), Ask(0), Ask(2, prompt=8)]
    served, iterations = served_apart(asks, Dynamic(), token_budget=4, n_blocks=3)
    assert [i.token_times for i in served] == [[3, 4, 5], [4, 6, 7], [2], [6]]
    assert [i.arrived_at for i in served] == [0, 0, 0, 2]
    assert [i.admitted_at for i in served] == [0, 0, 1, 4]
    assert iterations == [
        (0, 0, 1, [(0, 0, 4)]), (0, 1, 2, [(1, 0, 2), (2, 0, 1)]), (0, 4, 5, [(3, 0, 4)]),
        (0, 5, 6, [(3, 4, 4)]), (1, 3, 4, [(0, 4, 1)]), (1, 4, 5, [(0, 5, 1)]),
        (1, 5, 6, [(1, 2, 1)]), (1, 6, 7, [(1, 3, 1)]),
    ]  # fmt: skip


def test_a_request_preempted_while_it_decodes_is_computed_again_there() -> None:
    """Of 4 blocks each takes 2, until the first needs a third for its ninth token."""
    asks = [Ask(0, prompt=4, tokens=8), Ask(0, prompt=4, tokens=8)]
    (first, second), iterations = served_apart(asks, Dynamic(kv_reservation="demand"), n_blocks=4)
    assert (first.interruptions.preemptions, second.interruptions.preemptions) == (0, 1)
    again = [rows for number, *_, rows in iterations if number == 1 and rows[-1][1] == 0]
    assert again == [[(1, 0, second.interruptions.recomputed_tokens + 1)]]
    assert len(second.tokens) == 8


@examples(150)
@given(
    any_policy(), any_order(), loads(), st.sampled_from([ODD, EVEN]), st.integers(1, 2),
    st.integers(1, 2),
)  # fmt: skip
def test_prefill_and_decode_apart_jump_to_what_stepping_does(
    policy: Policy, order: Order, asks: list[Ask], costs: Costs, prefill: int, decode: int
) -> None:
    asks = [replace(ask, content=None, n=1) for ask in asks]
    limits = {"max_batch_size": 3, "n_blocks": 40, "token_budget": 9, "max_in_flight": 12}
    if order.preemptive and not isinstance(policy, Dynamic):
        order = Fcfs()
    (stepped, one_by_one), (jumped, at_once) = (
        served_apart(asks, policy, order, costs, jump, prefill, decode, **limits)
        for jump in (False, True)
    )
    assert at_once == one_by_one
    for a, b in zip(stepped, jumped):
        for name in ("state", "arrived_at", "admitted_at", "answered_at", "token_times"):
            assert getattr(a, name) == getattr(b, name), name
        assert a.interruptions == b.interruptions and type(a.error) is type(b.error)
        assert a.error or len(a.tokens) == a.num_tokens


def test_keys_and_values_and_a_second_http_request_come_before_the_first_token() -> None:
    """Eight bytes a token, 5 ms for ten of them; 2 ms for a request, and 1 ms for its answer."""
    config = build("dynamic", {"model": "fake", "device": "cpu"}, {})
    layout = Layout(3, prefill_replicas=1, kv_gbps=80 * 8 / 5e6, slow={2: 2.0})
    request = Request(id=0, at=0.0, prompt_ids=[1] * 10, num_tokens=4)
    costs = replace(FAKE, request=2 * PS // 1000, answer=PS // 1000)
    target = SimulatedServer("", config, costs, layout, stream=True)
    result, [outcome] = measure(target, [request], {}, 1.0, Watch())
    [decoder] = result["server"]["replicas"]["requests"].keys() - {0}
    step = 1.06 * (2 if decoder == 2 else 1)
    assert result["mean_ttft_ms"] == pytest.approx(2 + (2 + 1.16 + 5 + 1) + 1)
    assert result["server"]["mean_ttft_ms"] == pytest.approx(2 + 1.16 + 5 + 1)
    assert outcome.answer and [1e3 * gap for gap in outcome.answer.itl_s] == pytest.approx(
        [step] * 3
    )
    assert result["server"]["busy_s"] == pytest.approx((1.16 + 3 * step) / 1e3)
    assert described(layout) == (
        "1 prefill and 2 decode replicas, each kind behind the router power_of_two, 0.000128 "
        "Gbit/s for keys and values, iterations of replica 2 take 2 times as long"
    )
