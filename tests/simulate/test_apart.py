"""Prefill and decode on replicas of their own: by hand, and jumping beside stepping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.load import Watch
from client.traces import Request
from compare.measure import measure
from config import build
from scheduling.inference import Inference
from scheduling.policies import Dynamic, Fcfs, Order, Policy
from simulate import PS, Loop
from simulate.apart import Apart
from simulate.costs import FAKE, SECOND, Costs
from simulate.fleet import Layout
from simulate.layouts import described
from simulate.replica import Stretch
from simulate.run import SimulatedServer
from tests.counts import examples
from tests.simulate.test_jumping import EVEN, ODD, loads
from tests.virtual import Ask, any_order, any_policy, make_scheduler


def serve(
    asks: Sequence[Ask],
    policy: Policy,
    order: Order = Fcfs(),  # noqa: B008  (it is frozen)
    costs: Costs = SECOND,
    jump: bool = True,
    prefill: int = 1,
    decode: int = 1,
    **limits: Any,
) -> tuple[list[Inference], list[tuple[Any, ...]]]:
    """Return the inferences and each iteration: its replica, times, rows. A token's keys and values
    travel for half a second.
    """
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
    served, iterations = serve(asks, Dynamic(), token_budget=4, n_blocks=3)
    assert [i.token_times for i in served] == [[1, 4, 5], [2, 6, 7], [2], [6]]
    assert [i.arrived_at for i in served] == [0, 0, 0, 2]
    assert [i.admitted_at for i in served] == [0, 0, 1, 4]
    assert iterations == [
        (0, 0, 1, [(0, 0, 4)]),
        (0, 1, 2, [(1, 0, 2), (2, 0, 1)]),
        (0, 4, 5, [(3, 0, 4)]),
        (0, 5, 6, [(3, 4, 4)]),
        (1, 3, 4, [(0, 4, 1)]),
        (1, 4, 5, [(0, 5, 1)]),
        (1, 5, 6, [(1, 2, 1)]),
        (1, 6, 7, [(1, 3, 1)]),
    ]


def test_a_request_preempted_while_it_decodes_is_computed_again_there() -> None:
    """Of 4 blocks each takes 2, until the first needs a third for its ninth token."""
    asks = [Ask(0, prompt=4, tokens=8), Ask(0, prompt=4, tokens=8)]
    (first, second), iterations = serve(asks, Dynamic(kv_reservation="demand"), n_blocks=4)
    assert (first.interruptions.preemptions, second.interruptions.preemptions) == (0, 1)
    again = [rows for number, *_, rows in iterations if number == 1 and rows[-1][1] == 0]
    assert again == [[(1, 0, second.interruptions.recomputed_tokens + 1)]]
    assert len(second.tokens) == 8


@examples(150)
@given(
    any_policy(),
    any_order(),
    loads(),
    st.sampled_from([ODD, EVEN]),
    st.integers(1, 2),
    st.integers(1, 2),
)
def test_jumping_comes_to_what_stepping_does(
    policy: Policy, order: Order, asks: list[Ask], costs: Costs, prefill: int, decode: int
) -> None:
    asks = [replace(ask, content=None, n=1) for ask in asks]
    limits = {"max_batch_size": 3, "n_blocks": 40, "token_budget": 9, "max_in_flight": 12}
    if order.preemptive and not isinstance(policy, Dynamic):
        order = Fcfs()
    (stepped, one_by_one), (jumped, at_once) = (
        serve(asks, policy, order, costs, jump, prefill, decode, **limits) for jump in (False, True)
    )
    assert at_once == one_by_one
    for a, b in zip(stepped, jumped):
        for name in ("state", "arrived_at", "admitted_at", "answered_at", "token_times"):
            assert getattr(a, name) == getattr(b, name), name
        assert a.interruptions == b.interruptions and type(a.error) is type(b.error)
        assert a.error or len(a.tokens) == a.num_tokens


def test_the_way_of_keys_and_values_lies_between_the_first_two_tokens() -> None:
    """Eight bytes a token, 5 ms for ten of them."""
    config = build("dynamic", {"model": "fake", "device": "cpu"}, {})
    layout = Layout(3, prefill_replicas=1, kv_gbps=80 * 8 / 5e6, slow={2: 2.0})
    request = Request(id=0, at=0.0, prompt_ids=[1] * 10, num_tokens=4)
    target = SimulatedServer("", config, FAKE, layout)
    result, [outcome] = measure(target, [request], {}, 1.0, Watch())
    [decoder] = result["server"]["replicas"]["requests"].keys() - {0}
    step = 1.06 * (2 if decoder == 2 else 1)
    assert outcome.answer and result["mean_ttft_ms"] == pytest.approx(1.16)
    assert [1e3 * gap for gap in outcome.answer.itl_s] == pytest.approx([5 + step, step, step])
    assert result["server"]["busy_s"] == pytest.approx((1.16 + 3 * step) / 1e3)
    assert described(layout) == (
        "1 prefill and 2 decode replicas, each kind behind the router power_of_two, 0.000128 "
        "Gbit/s for keys and values, replica 2 2 times slower"
    )
