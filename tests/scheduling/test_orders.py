"""Order of the waiting requests: worked examples, bounds, and what an order may know."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.workloads import Workload
from scheduling.inference import Inference
from scheduling.ledger import Ledger
from scheduling.policies import (
    ORDERS,
    Dynamic,
    Hrrn,
    Limits,
    MultiBin,
    NoBatching,
    Order,
    Policy,
    Priority,
    Sjf,
    Srpt,
    Static,
    View,
    Windowed,
)
from scheduling.policies.lengths import Bins, LengthPrediction, Predictor, predictor
from scheduling.policies.victims import NEWEST
from scheduling.prefix_cache import PrefixCache
from scheduling.queue import Queue
from scheduling.sampling import Sampling
from tests.counts import examples
from tests.virtual import Ask, begun, every_policy, make_scheduler, run

# A worked example: one row, an iteration per second; A runs when the others come.
#
#     request   arrives   prompt   tokens   priority
#     A         0.0       1        3        2
#     B         0.1       1        4        3
#     C         0.2       1        1        2
#     D         0.3       1        2        1
EXAMPLE = [
    Ask(0.0, tokens=3, priority=2), Ask(0.1, tokens=4, priority=3), Ask(0.2, tokens=1, priority=2),
    Ask(0.3, tokens=2, priority=1),
]  # fmt: skip


@pytest.mark.parametrize(("order", "batches"), [
    (ORDERS["fcfs"](), "A A A B B B B C D D"),
    (Priority(), "A A A D D C B B B B"),
    (Sjf(), "A A A C D D B B B B"),
    (Sjf(aging=30.0), "A A A B B B B C D D"),  # a tenth of a second is worth three tokens
    (Sjf(max_wait_s=2.9), "A A A B B B B C D D"),  # at 3 B has waited for 2.9 s, C for 2.8
    (Sjf(max_wait_s=2.95), "A A A C B B B B D D"),  # at 3 none has, at 4 B
], ids=["fcfs", "priority", "sjf", "sjf aged", "sjf bounded", "sjf bounded later"])  # fmt: skip
def test_an_order_serves_the_worked_example(order: Order, batches: str) -> None:
    for policy in (NoBatching(), Dynamic()):
        served = run(policy, EXAMPLE, order=order, max_batch_size=1)
        assert " ".join(served.batches) == batches


@pytest.mark.parametrize(
    ("order", "mean"),
    [(Sjf(), 33.5), (Srpt(), 33.5), (Sjf(prefill_weight=0.0), 64), (Srpt(prefill_weight=0.0), 64)],
)
def test_a_long_prompt_is_work_too(order: Order, mean: float) -> None:
    """A prompt of 1,000 takes 63 iterations, 16 tokens each; it went before one that takes two."""
    asks = [Ask(0.0, prompt=1000, tokens=1), Ask(0.0, prompt=1, tokens=2)]
    limits: dict[str, Any] = {"max_batch_size": 1, "token_budget": 16, "n_blocks": 300}
    served = run(Dynamic(), asks, order=order, **limits)
    assert statistics.mean(at or 0.0 for at in served.answered_at) == mean


def test_a_batch_that_a_delay_started_has_the_oldest_in_it_whatever_the_order() -> None:
    """Three blocks hold one of them; by the order the shorter one goes first."""
    policy = Windowed(max_batch_delay_ms=500, batch_size_target=9)
    asks = [Ask(0.0, tokens=9), Ask(0.1)]
    served = run(policy, asks, order=Sjf(), max_batch_size=9, n_blocks=3)
    assert served.admitted_at == [0.5, 9.5]


def test_the_highest_response_ratio_goes_next() -> None:
    """While A runs 4 tokens are processed after B came and 2 after C did; B has 8 of its own to
    compute and C has 2: 4 / 8 < 2 / 2. Beyond the oldest 128 the order is that of arrival.
    """
    asks = [Ask(0.0, tokens=8), Ask(3.5, prompt=8), Ask(5.5, prompt=2)]
    served = run(Dynamic(), asks, order=Hrrn(), max_batch_size=1)
    assert "".join(served.batches) == "AAAAAAAACB"
    many = [Ask(0.0), *(Ask(0.5, prompt=9) for _ in range(130)), Ask(0.6)]
    admitted = run(Dynamic(), many, order=Hrrn(), max_batch_size=1).admitted_at
    assert admitted[-1] == (admitted[3] or 0.0) + 1, "it is looked at once 128 are left"


BOUNDED = st.sampled_from([Priority(), Sjf(), Sjf(aging=1.0), Hrrn()])


@examples(100)
@given(
    order=BOUNDED,
    policy=st.sampled_from([NoBatching(), Static(), Dynamic(), Dynamic("demand")]),
    asks=st.lists(
        st.builds(Ask, at=st.integers(0, 20).map(float), prompt=st.integers(1, 6),
                  tokens=st.integers(1, 6), priority=st.integers(1, 3)),
        min_size=5, max_size=30,
    ).map(lambda asks: sorted(asks, key=lambda ask: ask.at)),
    most_s=st.sampled_from([1.0, 4.0, 9.5]),
)  # fmt: skip
def test_a_longest_wait_is_kept(order: Any, policy: Policy, asks: list[Ask], most_s: float) -> None:
    order = replace(order, max_wait_s=most_s)
    inferences = run(policy, asks, order=order).inferences
    for waits, other in permutations(inferences, 2):
        if other.arrived_at > waits.arrived_at:
            admitted_at = other.admitted_at or 0.0
            assert not waits.arrived_at + most_s <= admitted_at < (waits.admitted_at or 0.0)


@pytest.mark.parametrize("victim", ["newest", "least_computed", "most_computed"])
@pytest.mark.parametrize("order", [Priority(max_wait_s=10.0), Sjf(max_wait_s=10.0)])
def test_a_request_that_waited_long_gives_no_blocks_to_later(order: Order, victim: Any) -> None:
    """It was first to be admitted and to be preempted, and never kept its blocks."""
    asks = [Ask(0.0, prompt=8, tokens=24, priority=3)]
    asks += [Ask(0.5 + 2 * i, prompt=4, tokens=8, priority=1) for i in range(200)]
    policy = Dynamic("demand", victim)
    served = run(policy, asks, order=order, max_batch_size=4, n_blocks=9)
    answered_at, *others = (at or 0.0 for at in served.answered_at)
    assert 0 < answered_at < 40.0
    assert all(at > answered_at for ask, at in zip(asks[1:], others) if ask.at > 10.0)


def test_with_bins_too_who_has_waited_long_enough_goes_before_later_ones() -> None:
    """Short ones keep their bin full for 300 s; the long one alone in its own went last."""
    asks = [Ask(0.0, tokens=4) for _ in range(8)] + [Ask(0.1, tokens=20)]
    asks += [Ask(0.2 + i / 2, tokens=4) for i in range(100)]
    policy = MultiBin(bins=2, batch_size_target=2, max_batch_delay_ms=1000.0)

    # after the eight that came earlier, or last where nothing is promised
    for most_s, admitted_at in ((5.0, 16.0), (None, 216.0)):
        served = run(policy, asks, order=Sjf(max_wait_s=most_s), max_batch_size=2)
        assert [i.standing.bin for i in served.inferences[8:]] == [1] + 100 * [0]
        assert served.admitted_at[8] == admitted_at


def test_a_full_bin_goes_first() -> None:
    policy = MultiBin(bins=2, batch_size_target=2, max_batch_delay_ms=3000.0)
    scheduler = make_scheduler(policy)
    for predicted in (5, 50, 50, 5, 5):
        scheduler.enqueue([Inference([0], predicted)], 0.0)
    assert [i.standing.bin for i in scheduler.in_flight()] == [0, 1, 1, 0, 0]
    iteration, _ = scheduler.schedule(0.0)
    assert [row.inference.num_tokens for row in iteration.rows] == [5, 5]
    assert iteration.reason == "target"
    scheduler = begun(policy, Inference([0], 5), steps=0)
    assert scheduler.schedule(1.0)[1] == 3.0
    iteration, _ = scheduler.schedule(3.0)
    assert iteration.reason == "delay" and len(iteration.rows) == 1


class Secret(Inference):
    """An order that reads how long an answer may be is caught."""

    @property
    def num_tokens(self) -> int:
        raise AssertionError("an order read how long an answer may be")

    @num_tokens.setter
    def num_tokens(self, value: int) -> None: ...


@pytest.mark.parametrize("order", ORDERS.values())
def test_orders_never_read_how_long_an_answer_may_be(order: type[Order]) -> None:
    made, queue, ledger, pool = order(), Queue(), Ledger({}), PrefixCache(9, 4)
    for i in range(6):
        inference = Secret([0] * (i + 1), 0, user="ab"[i % 2], priority=1 + i % 3)
        inference.id = inference.group = i
        inference.standing.predicted_tokens = 6 - i
        made.check([inference])
        made.arrive([inference], 0)
        inference.standing.key = made.turn(inference)
        ledger.wait(inference, 0.0)
        queue.add(inference, made.by_user)
    memories: dict[type[Any], Any] = {kind: kind() for kind in made.remembers}
    limits, find = Limits(2, 99, 4), pool.finder()
    rest: dict[str, Any] = {"ledger": ledger, "memories": memories}
    view = View(9.0, [queue], [], pool, find, limits, made, NEWEST, **rest)
    assert len(list(view.waiting)) == 6
    for inference in queue.by_arrival.values():
        made.computed(inference, 3, 9.0)
        made.promote(inference, 9.0)


def test_predictions_differ_from_the_truth_as_they_say() -> None:
    def asked(seed: int, tokens: int = 100, prompt: int = 1) -> Inference:
        return Inference([0] * prompt, tokens, Sampling(seed=seed))

    assert predictor("exact").predict(asked(3)) == 100
    noisy = [predictor("noisy:0.7").predict(asked(seed, 10_000)) for seed in range(2000)]
    assert noisy == [predictor("noisy:0.7").predict(asked(seed, 10_000)) for seed in range(2000)]
    logs = [math.log(length / 10_000) for length in noisy]
    assert statistics.mean(logs) == pytest.approx(0, abs=0.05)
    assert statistics.stdev(logs) == pytest.approx(0.7, rel=0.05)
    assert predictor("noisy:0").predict(asked(3)) == 100
    constant = predictor("constant")
    assert constant.predict(asked(1, 3)) == constant.predict(asked(2, 900))
    # with a sigma of 400 some were no number, and their requests a 500
    assert all(predictor("noisy:10").predict(asked(seed)) for seed in range(2000))
    for wrong in ("nosy", "noisy", "noisy:", "noisy:-1", "noisy:400", "noisy:inf", "noisy:nan"):
        with pytest.raises(ValueError, match="must be exact, noisy:SIGMA"):
            predictor(wrong)


def test_traces_of_two_seeds_are_mispredicted_otherwise_and_one_always_alike() -> None:
    """The errors of all seeds were equal, so that `--repeats` repeated them."""

    def errors(seed: int) -> list[int]:
        noisy = predictor("noisy:0.7")
        requests = Workload("fixed:1000", seed=seed).requests(300)
        return [noisy.predict(Inference([0], 1000, Sampling(seed=r.seed or 0))) for r in requests]

    assert errors(0) == errors(0) and errors(1) == errors(1)
    assert abs(statistics.correlation(errors(0), errors(1))) < 0.2
    far = Workload(seed=10**18).requests(2)
    assert all(0 <= (request.seed or 0) < 2**63 for request in far), "which a server takes"


def test_a_line_is_fitted_on_what_was_answered_and_not_on_what_was_asked() -> None:
    line = predictor("prompt")
    before = line.predict(Inference([0] * 5, 9))
    assert before == line.predict(Inference([0], 900)), "nothing is known yet"
    for prompt in (1, 2, 3, 4):
        answered = Inference([0] * prompt, 999)  # its stop came sooner
        answered.tokens = [0] * (10 * prompt + 5)
        line.learn(answered)
    assert line.predict(Inference([0] * 6, 1)) == 65
    served = run(Dynamic(), [Ask(0.0, 2, 3), Ask(9.0, 2, 9)], length_predictor="prompt")
    assert served.inferences[1].standing.predicted_tokens == 3, "what the first one came to"


@given(st.lists(st.integers(1, 1024), min_size=200, max_size=3000), st.sampled_from([2, 4, 8]))
@examples(20)
def test_bins_are_ranges_of_lengths_that_are_equally_frequent(lengths: list[int], n: int) -> None:
    bins = Bins(n)
    placed = [bins.place(length) for length in lengths]
    assert set(placed) <= set(range(n)) and list(bins.edges) == sorted(bins.edges)
    latest = sorted(lengths[-1024:])
    for i, edge in enumerate(bins.edges, start=1):
        below = sum(length < edge for length in latest)
        upto = sum(length <= edge for length in latest)
        assert below <= len(latest) * i / n <= upto


def test_groups_go_by_their_longest_prediction_and_stay_together() -> None:
    class OfPrompt(Predictor):
        def predict(self, inference: Inference) -> int:
            return len(inference.prompt_ids)

    scheduler = make_scheduler(Dynamic(), order=Sjf(), max_batch_size=1)
    [lengths] = [each for each in scheduler.extensions if isinstance(each, LengthPrediction)]
    lengths.predictor = OfPrompt()
    for each in (scheduler, make_scheduler(Dynamic(), order=Sjf(), max_batch_size=1)):
        each.enqueue([Inference([0] * 2, 1), Inference([0] * 9, 1)], 0.0)
        each.enqueue([Inference([0] * 5, 1)], 0.0)
        assert [i.id for i in each.queue.queues[0].by_key.values()] == [2, 0, 1], "or prompt"


class LastComeFirstServed(Order):
    """An order that puts the last completion of a prompt before the first, as a user's own may."""

    in_order = False

    def key(self, inference: Inference) -> int:
        return -inference.id


@pytest.mark.parametrize("policy", every_policy(), ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("max_batch_size", [1, 3])
def test_a_completion_does_not_await_one_that_comes_later_in_the_order(
    policy: Policy, max_batch_size: int
) -> None:
    """It was admitted, waited for the first completion to compute their prompt, and had its row."""
    rows = 1 if policy.request_level else max_batch_size
    asks = [Ask(0.0, 9, 3, content=1, n=n) for n in (2, 3) if n <= rows or not policy.request_level]
    served = run(policy, asks, order=LastComeFirstServed(), max_batch_size=max_batch_size)
    assert all(len(inference.tokens) == 3 for inference in served.inferences)
