"""Iterations between which nothing changes are computed at once, to the same end as one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scheduling.adapters import Adapters, Rule
from scheduling.inference import Inference, Iteration
from scheduling.policies import MODES, Dynamic, Fcfs, Order, Policy, Static
from simulate import PS, Arrival, Loop, SimulatedReplica, drive
from simulate.costs import Costs, Line
from simulate.loop import ARRIVE
from simulate.replica import Stretch
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
    policy: Policy,
    order: Order,
    asks: Sequence[Ask],
    jump: bool,
    leaves: Sequence[float] = (),
    costs: Costs = ODD,
    **limits: Any,
) -> tuple[list[list[Any]], list[Any], int]:
    """Return the outcome of each inference, all iterations, and the number of stretches.

    leaves: how long after its request the k-th client goes, if it is still there.
    """
    scheduler = make_scheduler(policy, order=order, **limits)
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
            facts = [
                getattr(stretch.iteration, name) for name in ("padding", "running", "preempted")
            ]
            iterations.append((stretch.begins(k), stretch.end(k), rows, *facts))

    replica = SimulatedReplica(loop, scheduler, costs, computed=computed, jump=jump)
    for after, ask, group in zip(leaves, asks, groups):
        loop.at(instant(ask.at + after), ARRIVE, replica.cancel, group)
    loop.serve([(ask.at, group) for ask, group in zip(asks, groups)], replica)
    served = [
        [
            i.id, i.state, i.admitted_at, i.answered_at, i.token_times, i.tokens, i.standing.batch,
            i.standing.position, i.interruptions, i.cached_tokens, type(i.error), i.keys,
        ]
        for group in groups
        for i in group
    ]  # fmt: skip
    return served, iterations, stretches


@st.composite
def loads(draw: st.DrawFn) -> list[Ask]:
    several = st.builds(
        Ask,
        at=st.integers(0, 60).map(lambda t: t / 10),
        prompt=st.integers(1, 12),
        tokens=st.integers(1, 40),
        rows=st.sampled_from([1, 1, 1, 2]),
        n=st.sampled_from([1, 1, 2]),
        content=st.none() | st.sampled_from([0, 0, 1]),
        user=st.sampled_from([None, "a", "b"]),
        adapter=st.sampled_from(["", "a", "b", "c"]),
        priority=st.integers(0, 2),
        seed=st.integers(0, 3),
        deadline=st.none() | st.integers(1, 120).map(lambda t: t / 10),
        streamed=st.booleans(),
    )
    return sorted(draw(st.lists(several, min_size=1, max_size=8)), key=lambda ask: ask.at)


@examples(300)
# the second one fills a block before the first does that comes to hold the same: that one is found
@example(
    Dynamic(),
    Fcfs(),
    [
        Ask(0.0, prompt=1, tokens=20, content=0),
        Ask(0.1, prompt=3, tokens=30, content=0),
        Ask(2.5, prompt=12, tokens=2, content=0),
    ],
    3,
    [],
    ODD,
    None,
)
@given(
    any_policy(),
    any_order(),
    loads(),
    st.integers(2, 4),
    st.lists(st.integers(0, 40).map(lambda t: t / 10), max_size=4),
    st.sampled_from([ODD, EVEN]),
    st.none()
    | st.tuples(st.integers(1, 2), st.sampled_from(get_args(Rule)), st.none() | st.just(1)),
)
def test_jumping_comes_to_what_stepping_does(
    policy: Policy,
    order: Order,
    asks: list[Ask],
    rows: int,
    leaves: list[float],
    costs: Costs,
    slots: tuple[Any, ...] | None,
) -> None:
    limits = {"max_batch_size": rows, "n_blocks": 40, "token_budget": 9, "decoder_batch_sizes": [4]}
    limits |= {"max_in_flight": 12}
    if order.preemptive and not isinstance(policy, Dynamic):
        order = Fcfs()
    stepped, jumped = (
        serve(
            policy, order, asks, jump, leaves, costs, **limits, adapters=slots and Adapters(*slots)
        )
        for jump in (False, True)
    )
    assert jumped[0] == stepped[0]
    assert jumped[1] == stepped[1]


def test_a_prompt_that_sits_an_iteration_out_is_not_jumped_over() -> None:
    """The budget holds one prompt of three: when the second one was computed beside the first row,
    the third waited until one of both ended.
    """
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
