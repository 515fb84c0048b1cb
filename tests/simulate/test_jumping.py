"""Iterations between which nothing changes are computed at once, to the same end as one by one."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from client.load import Watch
from client.measure import measure
from client.traces import Request
from generate.auto import build
from scheduling.adapters import Adapters, Rule
from scheduling.errors import EngineFailed
from scheduling.history import Done, Memory
from scheduling.inference import Inference, Iteration
from scheduling.policies import MODES, Dynamic, Fair, Fcfs, Mlfq, Order, Policy, Srpt, Static, View
from scheduling.queue import Queue
from simulate import PS, Arrival, Loop, SimulatedReplica, drive, instant
from simulate.asynchronous import AsynchronousReplica
from simulate.costs import FAKE, SECOND, Costs, Line
from simulate.disaggregated import Disaggregated
from simulate.fleet import Layout
from simulate.layouts import described
from simulate.loop import ARRIVE, Serves
from simulate.replica import Stretch
from simulate.server import SimulatedServer
from tests.counts import examples
from tests.virtual import Ask, any_asks, any_order, any_policy, make_scheduler

ODD = Costs(
    "odd",
    {1: Line(PS // 9, context=5), 3: Line(PS // 8, context=1)},
    *(PS // 333, 77, PS // 55, 9, 5),  # gaps
    request_turn=PS // 13,
    answer_turn=PS // 31,
    prompts=Line(PS // 7, 0, PS // 1009, 999),
    products={1: PS // 70, 4: PS // 60, 5: PS // 40},
    load=PS // 19,
    adapter_token=12_345,
)
# so that requests come, and leave, when iterations begin and end
EVEN = Costs.straight("even", PS // 10, gap=PS // 10)
NO_GAPS: dict[str, Any] = dict.fromkeys(("gap", "gap_row", "gap_stream", "gap_stream_row"), 0)
TIMES = ("arrived_at", "admitted_at", "answered_at", "token_times", "interruptions")
SAME = ("id", "state", *TIMES, "tokens", "cached_tokens", "prefix", "standing")


class ServedAsks:
    """Asks, served by what `make` returns, which calls `computed` with each stretch."""

    def __init__(self, asks: Sequence[Ask], make: Callable[[Loop, Any], Serves]):
        self.iterations: list[tuple[Any, ...]] = []
        self.stretches = 0
        loop, groups = Loop(), [ask.group(4) for ask in asks]
        loop.serve([(ask.at, each) for ask, each in zip(asks, groups)], make(loop, self.computed))
        self.inferences = [inference for group in groups for inference in group]
        self.iterations.sort(key=lambda each: each[:3])

    def computed(self, replica: int, stretch: Stretch) -> None:
        self.stretches += 1
        of = stretch.iteration
        for k in range(stretch.n):
            rows = [
                # those that it needs by then: a list grows in place
                (
                    row.inference.id,
                    *row[1:3],
                    row.idle,
                    row.blocks[: -(-(row.start + row.n_tokens) // 4)],
                )
                for row in stretch.rows(k)
            ]
            facts = of.padding, of.running, of.preempted
            self.iterations.append((replica, stretch.begins(k), stretch.end(k), rows, *facts))

    @property
    def facts(self) -> list[Any]:
        """All that jumping must not change."""
        return self.iterations + [
            (*(getattr(i, name) for name in SAME), type(i.error)) for i in self.inferences
        ]


def serve(
    policy: Policy, asks: Sequence[Ask], jump: bool = True, fails_at: float = math.inf,
    costs: Costs = ODD, layout: Layout | None = None, ahead: bool = False, **limits: Any,
) -> ServedAsks:  # fmt: skip
    """Serve by a replica, or by disaggregated ones."""

    def make(loop: Loop, computed: Any) -> Serves:
        build = functools.partial(make_scheduler, policy, **limits)
        if layout:
            own: dict[str, Any] = {"ended": lambda *_: (), "session": lambda i: i.user}
            own |= {"token_bytes": 1, "computed": computed, "jump": jump}
            return Disaggregated(loop, layout, build, costs, **own)
        scheduler, computed = build(), functools.partial(computed, 0)
        scheduler.plans_repeat &= jump  # else each iteration is planned
        kind = AsynchronousReplica if ahead else SimulatedReplica
        replica = kind(loop, scheduler, costs, computed=computed, jump=jump)
        if fails_at < math.inf:
            loop.at(instant(fails_at), ARRIVE, replica.fail, EngineFailed("It was told to."))
        return replica

    return ServedAsks(asks, make)


def disaggregated(prefill: int = 1, decode: int = 1) -> Layout:
    """A token's keys and values travel for half a second."""
    return Layout(prefill + decode, "least_tokens", prefill_replicas=prefill, kv_gbps=16e-9)


def tenths(most: int) -> st.SearchStrategy[float]:
    return st.integers(0, most).map(lambda t: t / 10)


# the second one fills a block before the first does that comes to hold the same: that one is found
ALIKE = [Ask(0.0, 1, 20, content=0), Ask(0.1, 3, 30, content=0), Ask(2.5, 12, 2, content=0)]
THREE = [Ask(0.0, tokens=20), Ask(0.1, tokens=20), Ask(2.5, tokens=20)]
SLOTS = st.tuples(st.integers(1, 2), st.sampled_from(get_args(Rule)), st.none() | st.just(1))
LAYOUTS = st.builds(disaggregated, st.integers(1, 2), st.integers(1, 2))
FAILS_AT = st.just(math.inf) | tenths(80)
LONG = {"prompt": st.integers(1, 12), "tokens": st.integers(1, 40), "streamed": st.booleans()}
ASKS = any_asks(8, 1, at=tenths(60), deadline=st.none() | tenths(120), **LONG)
COSTS = st.sampled_from([ODD, EVEN])
COUNTS_ALL = Dynamic("whole", budget_counts="all", prefill="first")


def test_rows_that_repeat_are_computed_as_they_joined_where_all_are() -> None:
    """They were computed by turn, which is another order where users take turns."""
    asks = [Ask(0.0, tokens=2, n=4, user="a"), Ask(0.0, tokens=20, user="b")]
    policy, limits = Dynamic("demand", row_order="joined"), {"max_batch_size": 2, "n_blocks": 40}
    of: Any = limits | {"max_in_flight": 12, "order": Fair(), "token_budget": 2}
    jumping, stepping = (serve(policy, asks, jump, **of) for jump in (True, False))
    assert jumping.facts == stepping.facts


def test_a_row_that_expires_while_it_is_idle_keeps_no_blocks_where_jumps_are_ahead() -> None:
    asks = [
        Ask(1.4, prompt=4, tokens=8, deadline=7.2), Ask(3.3, prompt=8, tokens=24, deadline=5.7),
        Ask(0.1, prompt=8, tokens=30, n=3),
    ]  # fmt: skip
    of: Any = {"max_batch_size": 4, "token_budget": 9, "n_blocks": 40, "max_in_flight": 12}
    of |= {"costs": Costs.straight("even", PS // 10), "ahead": True, "order": Fcfs()}
    jumping, stepping = (serve(Static(), asks, jump, **of) for jump in (True, False))
    assert jumping.facts == stepping.facts


@examples(300)
@given(any_policy(), any_order(), ASKS, st.integers(2, 4), st.sampled_from([2, 9]), FAILS_AT,
       st.booleans())  # fmt: skip
def test_jumping_ahead_comes_to_what_stepping_ahead_does(
    policy: Policy, order: Order, asks: list[Ask], rows: int, budget: int, fails_at: float,
    even: bool,
) -> None:  # fmt: skip
    """Without gaps an iteration begins when the one before it ends."""
    costs = Costs.straight("even", PS // 10) if even else replace(ODD, **NO_GAPS)
    limits: dict[str, Any] = {"max_batch_size": rows, "token_budget": budget, "n_blocks": 40}
    limits |= {"max_in_flight": 12, "order": order, "costs": costs, "ahead": True}
    if order.preemptive and not isinstance(policy, Dynamic):
        return
    jumping, stepping = (serve(policy, asks, jump, fails_at, **limits) for jump in (True, False))
    assert jumping.facts == stepping.facts


@examples(1000)
@example([Ask(0.0, 3, 40), Ask(0.1, 3, 40), Ask(0.2, 9, 30)], 13, True, False)
@given(ASKS, st.integers(10, 30), st.booleans(), st.booleans())
def test_jumping_gives_blocks_as_stepping_does_and_ends_where_none_is_free(
    asks: list[Ask], n_blocks: int, ahead: bool, content: bool
) -> None:
    """Rows are preempted in the same iteration, and get the same blocks."""
    if not content:
        asks = [replace(ask, content=None, n=1) for ask in asks]
    costs = replace(ODD, **NO_GAPS) if ahead else ODD
    limits: dict[str, Any] = {"max_batch_size": 4, "token_budget": 9, "n_blocks": n_blocks}
    limits |= {"max_in_flight": 12, "costs": costs, "ahead": ahead}
    policy = Dynamic("demand", budget_counts="all")
    jumping, stepping = (serve(policy, asks, jump, **limits) for jump in (True, False))
    assert jumping.facts == stepping.facts


@examples(500)
@example(Dynamic(), Fcfs(), ALIKE, 3, 9, math.inf, ODD, None, None)
# more rows decode than the budget allows; and the number of iterations decides when B joins
@example(COUNTS_ALL, Fcfs(), THREE, 3, 2, 4.1, ODD, None, None)
# of a budget of one prompt the third waited until one of the first two ended
@example(Static(), Fcfs(), 3 * [Ask(0.0, 9, 20)], 3, 9, math.inf, ODD, None, None)
@example(Dynamic(prefill="every:3"), Fcfs(), THREE, 2, 9, 1.0, EVEN, None, None)
# an order that pauses rows pauses none of a batch, and may still change by each iteration
@example(Static(), Srpt(), 2 * THREE, 2, 9, math.inf, ODD, None, None)
@example(Static(), Mlfq(max_wait_s=0.3), 2 * THREE, 2, 9, math.inf, ODD, None, None)
@given(any_policy(), any_order(), ASKS, st.integers(2, 4), st.sampled_from([2, 9]), FAILS_AT,
       COSTS, st.none() | SLOTS, st.none() | LAYOUTS)  # fmt: skip
def test_jumping_comes_to_what_stepping_does(
    policy: Policy, order: Order, asks: list[Ask], rows: int, budget: int, fails_at: float,
    costs: Costs, slots: tuple[Any, ...] | None, layout: Layout | None,
) -> None:  # fmt: skip
    limits: dict[str, Any] = {"max_batch_size": rows, "token_budget": budget, "n_blocks": 40}
    limits |= {"max_in_flight": 12, "order": order}
    if order.preemptive and not (policy.request_level or isinstance(policy, Dynamic)):
        limits["order"] = Fcfs()
    if layout:
        asks = [replace(ask, content=None, n=1) for ask in asks]
    else:
        limits["decoder_batch_sizes"] = [4]

    def facts(jump: bool) -> list[Any]:
        own = Adapters(*slots) if slots and not layout else None
        served = serve(policy, asks, jump, fails_at, costs, layout, adapters=own, **limits)
        assert all(i.error or len(i.tokens) == i.num_tokens for i in served.inferences)
        return served.facts

    assert facts(True) == facts(False)


class Counted(Memory):
    def __init__(self) -> None:
        self.n = 0

    def add(self, done: Done) -> None:
        self.n += 1


class Alternating(Order):
    """The first or the last, by how many iterations there were."""

    remembers = (Counted,)

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        waiting = [*queue.by_key.values()]
        return iter(waiting if view.memories[Counted].n % 2 else waiting[::-1])


@pytest.mark.parametrize("mode", list(MODES))
def test_a_memory_takes_each_iteration(mode: str) -> None:
    """In a batch that nothing joins it took one of many that were computed at once."""
    asks = [Ask(at=i / 2, prompt=3, tokens=2 + i * i % 7) for i in range(12)]
    how: dict[str, Any] = {"order": Alternating(), "max_batch_size": 2}
    assert serve(MODES[mode](), asks, **how).facts == serve(MODES[mode](), asks, False, **how).facts


class Derived(Dynamic):
    """It may plan otherwise, and does not say that its plans repeat."""


class Saying(Derived):
    repeats = True


@pytest.mark.parametrize("kind", [*MODES.values(), Derived, Saying])
def test_who_decodes_alone_is_computed_in_few_stretches(kind: type[Policy]) -> None:
    """A mode that does not say whether its plans repeat was slow, and nothing said so. One that
    gives blocks as they fill was, too.
    """
    asks = [Ask(at=0.0, prompt=3, tokens=100), Ask(at=5.0, prompt=3, tokens=50)]
    served, few = serve(kind(), asks, n_blocks=50), kind is not Derived
    if kind is Dynamic:
        assert serve(Dynamic("demand"), asks, n_blocks=50).stretches <= 8
    assert "repeats" in vars(kind) or kind is Derived, f"{kind} must say whether its plans repeat"
    assert len(served.iterations) >= 100 and (served.stretches <= 8) == few, served.stretches


class TwoBins(Saying):
    n_bins = 2


def test_a_request_of_another_bin_joins_as_soon_as_a_row_is_free() -> None:
    """One in the second bin waited until the row of the first one ended."""
    asks = [Ask(at=0.0, prompt=3, tokens=50), Ask(at=1.0, prompt=3, tokens=90)]
    scheduler = make_scheduler(TwoBins())
    groups = [ask.group(4) for ask in asks]
    drive(scheduler, [(ask.at, each) for ask, each in zip(asks, groups)], lambda _: 1.0)
    assert [group[0].standing.bin for group in groups] == [0, 1]
    assert groups[1][0].admitted_at == 1.0


def test_an_order_that_pauses_rows_stops_no_jumps_over_a_batch() -> None:
    asks = [Ask(at=0.0, prompt=3, tokens=100), Ask(at=5.0, prompt=3, tokens=50)]
    assert serve(Static(), asks, order=Srpt()).stretches <= 8


def test_a_trace_is_drawn_as_it_comes() -> None:
    drawn, seen = list[float](), list[int]()

    def trace() -> Iterator[Arrival]:
        for at in (0.0, 5.0, 6.0):
            drawn.append(at)
            yield at, [Inference([0], 1)]

    def planned(now: float, iteration: Iteration) -> None:
        seen.append(len(drawn))

    drive(make_scheduler(Dynamic()), trace(), lambda _: 1.0, planned=planned)
    assert seen[0] == 2, "the first, and the one that is waited for"


# ---- disaggregated prefill: the worked example of docs/scaling.md

ALONE: dict[str, Any] = {"costs": SECOND, "layout": disaggregated()}


def rows_of(served: ServedAsks) -> list[tuple[Any, ...]]:
    """Return each iteration's replica and seconds; of its rows ids, positions and tokens."""
    return [
        (replica, begun / PS, end / PS, [row[:3] for row in rows])
        for replica, begun, end, rows, *_ in served.iterations
    ]


def test_the_example_of_the_page() -> None:
    """Two rows, 3 blocks of 4 tokens, a budget of 4. B's keys and values wait for the link until
    A's are there, and then for A's blocks; D waits until both have left the prefill replica.
    """
    asks = [Ask(0, prompt=4, tokens=3), Ask(0, prompt=2, tokens=3), Ask(0), Ask(2, prompt=8)]
    served = serve(Dynamic(), asks, **ALONE, token_budget=4, n_blocks=3)
    assert [i.token_times for i in served.inferences] == [[3, 4, 5], [4, 6, 7], [2], [6]]
    assert [i.arrived_at for i in served.inferences] == [0, 0, 0, 2]
    assert [i.admitted_at for i in served.inferences] == [0, 0, 1, 4]
    assert rows_of(served) == [
        (0, 0, 1, [(0, 0, 4)]), (0, 1, 2, [(1, 0, 2), (2, 0, 1)]), (0, 4, 5, [(3, 0, 4)]),
        (0, 5, 6, [(3, 4, 4)]), (1, 3, 4, [(0, 4, 1)]), (1, 4, 5, [(0, 5, 1)]),
        (1, 5, 6, [(1, 2, 1)]), (1, 6, 7, [(1, 3, 1)]),
    ]  # fmt: skip


@pytest.mark.parametrize("mode", list(MODES))
def test_a_prompt_waits_for_blocks_that_are_still_sent(mode: str) -> None:
    """Of 3 blocks each needs all, and the first one's 2 are kept for the 4 s of their way."""
    asks = [Ask(0, prompt=8, tokens=3), Ask(0, prompt=8, tokens=3)]
    served = serve(MODES[mode](), asks, **ALONE, n_blocks=3)
    first, second = (inference.token_times[0] for inference in served.inferences)
    assert second - first >= 5 and all(len(i.tokens) == 3 for i in served.inferences)


def test_a_request_preempted_while_it_decodes_is_computed_again_there() -> None:
    """Of 4 blocks each takes 2, until the first needs a third for its ninth token."""
    asks = [Ask(0, prompt=4, tokens=8), Ask(0, prompt=4, tokens=8)]
    served = serve(Dynamic(kv_reservation="demand"), asks, **ALONE, n_blocks=4)
    first, second = (inference.interruptions for inference in served.inferences)
    assert (first.preemptions, second.preemptions) == (0, 1)
    again = [rows for replica, *_, rows in rows_of(served) if replica == 1 and rows[-1][1] == 0]
    assert again == [[(1, 0, second.recomputed_tokens + 1)]]


def test_keys_and_values_and_a_second_http_request_come_before_the_first_token() -> None:
    """Eight bytes a token, 5 ms for ten of them; 2 ms for a request, and 1 ms for its answer."""
    config = build("dynamic", {"model": "fake", "device": "cpu"}, {})
    layout = Layout(3, prefill_replicas=1, kv_gbps=80 * 8 / 5e6, slow={2: 2.0})
    request = Request(id=0, at=0.0, prompt_ids=[1] * 10, num_tokens=4)
    costs = replace(FAKE, request=2 * PS // 1000, answer=PS // 1000)
    target = SimulatedServer("", config, costs, layout, stream=True)
    result, [outcome] = measure(target, [request], {}, 1.0, Watch())
    [decoder] = result.server["replicas"]["requests"].keys() - {0}
    step = 1.06 * (2 if decoder == 2 else 1)
    assert result.ttft.mean == pytest.approx(2 + (2 + 1.16 + 5 + 1) + 1)
    assert result.server["mean_ttft_ms"] == pytest.approx(2 + 1.16 + 5 + 1)
    assert outcome.itl_s == pytest.approx([step / 1e3] * 3)
    assert result.server["busy_s"] == pytest.approx((1.16 + 3 * step) / 1e3)
    assert described(layout) == (
        "1 prefill and 2 decode replicas, each kind behind the router power_of_two, 0.000128 "
        "Gbit/s for keys and values, iterations of replica 2 take 2 times as long"
    )


def test_ahead_a_replica_jumps_until_an_arrival_and_computes_what_was_planned() -> None:
    """The second request comes in the fifth iteration, beside which the sixth was planned."""
    asks = [Ask(0.0, tokens=100), Ask(0.45, tokens=3)]
    costs, limits = Costs.straight("even", PS // 10), dict[str, Any](max_batch_size=4, n_blocks=40)
    jumping, stepping = (
        serve(Dynamic(), asks, jump, costs=costs, ahead=True, token_budget=9, **limits)
        for jump in (True, False)
    )
    assert jumping.facts == stepping.facts
    assert jumping.stretches < 15 < stepping.stretches
    rows = [len(facts[3]) for facts in jumping.iterations]
    assert rows[:8] == [1, 1, 1, 1, 1, 1, 2, 2]
