"""Fair queueing by user: worked examples, and the bound that its paper proves."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.errors import Cancelled
from scheduling.inference import Inference, Iteration
from scheduling.ledger import Ledger
from scheduling.policies import Dynamic, Fair, Fcfs, Policy, Static
from scheduling.policies.orders import COMPLETION, PROMPT
from scheduling.scheduler import Scheduler
from tests.counts import examples
from tests.virtual import Ask, make_scheduler, run


def test_who_was_served_least_goes_first() -> None:
    """One row, an iteration a second. a asks for four requests of three tokens, then b for two: a's
    first moves a's counter to 1 + 2 · 3, b's first b's to as much, and they take turns.
    """
    asks = [*(Ask(0.0, tokens=3, user="a") for _ in range(4)), *(Ask(0.5, tokens=3, user="b"),) * 2]
    served = run(Dynamic(), asks, order=Fair(), max_batch_size=1)
    assert " ".join(served.batches) == "A A A E E E B B B F F F C C C D D D"
    weighted = run(Dynamic(), asks, order=Fair("b=3"), max_batch_size=1)
    assert " ".join(weighted.batches) == "A A A E E E F F F B B B C C C D D D"


def test_within_one_plan_each_pick_moves_its_users_counter() -> None:
    asks = [*(Ask(0.0, prompt=4, user="a"),) * 4, *(Ask(0.0, prompt=4, user="b"),) * 4]
    served = run(Dynamic(), asks, order=Fair(), max_batch_size=4)
    assert served.batches[0] == "AEBF"
    served = run(Static(), asks, order=Fair("a=3"), max_batch_size=4)
    assert served.batches[0] == "AEBC"


def test_being_away_saves_nothing_up() -> None:
    # b comes when a alone has been served for long: they take turns from then on
    asks = [*(Ask(0.0, tokens=2, user="a") for _ in range(8)), *(Ask(7.0, tokens=2, user="b"),) * 3]
    served = run(Dynamic(), asks, order=Fair(), max_batch_size=1)
    assert "".join(served.batches[8:18:2]) in ("IEJFK", "EIFJG")


def test_who_comes_back_when_nobody_waits_is_lifted_to_the_last_who_left() -> None:
    ledger = Ledger({})
    a, b, c = (Inference([0], 1, user=user) for user in "abc")
    ledger.arrives(a)
    ledger.charge("a", 10.0)
    ledger.leaves(a)
    ledger.charge("a", 5.0)  # it still runs
    ledger.arrives(b)
    assert ledger.counter("b") == 15.0
    ledger.charge("b", 10.0)
    ledger.arrives(c)
    assert ledger.counter("c") == 25.0, "to the least of those that wait"
    ledger.arrives(a)
    assert [user for *_, user in ledger.by_counter()] == ["b", "c", "a"]


def test_a_group_pays_for_all_its_members_and_completions_of_a_prompt_once_for_it() -> None:
    def counters(asks: list[Ask]) -> list[float]:
        scheduler = make_scheduler(Dynamic(), order=Fair(), max_batch_size=8)
        for ask in asks:
            scheduler.enqueue(ask.group(4), 0.0)
        scheduler.schedule(0.0)
        assert scheduler.lobby.ledger
        return [scheduler.lobby.ledger.counter(user) for user in ("a", "b")]

    assert counters([Ask(0.0, prompt=5, rows=3, user="a"), Ask(0.0, prompt=5, user="b")]) == [
        15 * PROMPT,
        5 * PROMPT,
    ]
    assert counters([Ask(0.0, prompt=5, n=3, content=1, user="a")]) == [5 * PROMPT, 0]


def test_cancelled_and_recomputed_tokens_are_not_charged() -> None:
    scheduler = make_scheduler(Dynamic(), order=Fair(), max_batch_size=1)
    first, second = Inference([0], 5, user="a"), Inference([0] * 9, 5, user="b")
    scheduler.enqueue([first], 0.0)
    scheduler.enqueue([second], 0.0)
    iteration, _ = scheduler.schedule(0.0)
    scheduler.fail([first, second], Cancelled("gone"), 0.5)
    scheduler.apply(iteration, [1], 1.0)
    ledger = scheduler.lobby.ledger
    assert ledger and (ledger.counter("a"), ledger.counter("b")) == (PROMPT, 0)
    assert not list(ledger.by_counter())
    # on a pool of three blocks somebody recomputes: nobody pays twice
    asks = [Ask(0.0, prompt=4, tokens=5, user="a"), Ask(0.0, prompt=4, tokens=5, user="b")]
    served = run(Dynamic("demand", watermark=0.0), asks, order=Fair(), n_blocks=3)
    assert sum(i.recomputed_tokens for [i] in served.groups) > 0
    ledger = served.scheduler.lobby.ledger
    assert ledger and ledger.counter("a") == ledger.counter("b") == 4 * PROMPT + 5 * COMPLETION


def test_counters_of_users_that_left_are_forgotten_once_they_mean_nothing() -> None:
    ledger = Ledger({})
    for i in range(20_000):
        inference = Inference([0], 1, user=f"user {i}")
        ledger.arrives(inference)
        ledger.leaves(inference)
        ledger.charge(inference.user, 3.0)
    assert len(ledger._counters) < 10_000
    back = Inference([0], 1, user="user 0")
    ledger.arrives(back)
    assert ledger.counter("user 0") == ledger.counter("user 19999")


@examples(60)
@given(
    users=st.lists(
        st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=4, max_size=8),
        min_size=2,
        max_size=4,
    ),
    rows=st.integers(1, 5),
    spare=st.integers(0, 20),
    budget=st.integers(3, 40),
    policy=st.sampled_from([Dynamic(), Dynamic("demand", watermark=0.0), Static()]),
)
def test_the_service_of_users_that_always_wait_differs_by_the_papers_bound_at_most(
    users: list[list[tuple[int, int]]], rows: int, spare: int, budget: int, policy: Policy
) -> None:
    """2 · max(w_p · longest prompt, w_q · tokens in the pool), over any stretch of time in which
    both wait (Sheng et al., OSDI 2024, theorem 4.4); each asks for all it wants at 0.
    """
    asks = [
        Ask(0.0, prompt=prompt, tokens=tokens, user=str(user))
        for user, wishes in enumerate(users)
        for prompt, tokens in wishes
    ]
    n_blocks = 6 * (rows if policy.request_level else 1) + spare
    limits = {"max_batch_size": rows, "token_budget": budget, "n_blocks": n_blocks}
    longest = max(ask.prompt for ask in asks)
    bound = 2 * max(PROMPT * longest, COMPLETION * n_blocks * 4)
    assert widest(policy, asks, order=Fair(), **limits) <= bound


def widest(policy: Policy, asks: list[Ask], **limits: Any) -> float:
    """The largest difference of service between two users, over any stretch in which both wait."""
    differences: dict[tuple[str | None, str | None], list[float]] = {}
    seen: dict[int, Inference] = {}

    def check(scheduler: Scheduler, iteration: Iteration) -> None:
        seen.update(scheduler.running)
        service: Counter[str | None] = Counter()
        for inference in seen.values():
            service[inference.user] += PROMPT * len(inference.prompt_ids)
            service[inference.user] += COMPLETION * len(inference.tokens)
        waits = {inference.user for inference in scheduler.waiting.values()}
        for one, other in combinations(sorted(waits, key=str), 2):
            differences.setdefault((one, other), []).append(service[one] - service[other])

    run(policy, asks, check, **limits)
    return max((max(each) - min(each) for each in differences.values()), default=0.0)


def test_without_fair_queueing_there_is_no_such_bound() -> None:
    asks = [Ask(0.0, prompt=2, tokens=4, user=user) for user in "a" * 40 + "b" * 40]
    limits = {"max_batch_size": 2, "n_blocks": 4}
    bound = 2 * max(PROMPT * 2, COMPLETION * 4 * 4)
    assert widest(Dynamic(), asks, **limits) > 4 * bound
    assert widest(Dynamic(), asks, order=Fair(), **limits) <= bound


def test_who_asks_for_much_does_not_keep_others_waiting() -> None:
    asks = [*(Ask(0.0, prompt=1, tokens=9, user="a"),) * 30, Ask(0.1, tokens=9, user="b")]
    waited = {}
    for name, order in (("fcfs", Fcfs()), ("fair", Fair())):
        served = run(Dynamic(), asks, order=order, max_batch_size=1)
        [b] = served.groups[-1]
        waited[name] = b.admitted_at
    assert waited == {"fcfs": 270.0, "fair": 9.0}


@pytest.mark.parametrize("name", [None, ""])
def test_all_who_name_nobody_are_one_user(name: str | None) -> None:
    asks = [*(Ask(0.0, tokens=2, user=name),) * 2, *(Ask(0.0, tokens=2, user="b"),) * 2]
    served = run(Dynamic(), asks, order=Fair(), max_batch_size=1)
    assert "".join(served.batches[::2]) in ("ACBD",)
