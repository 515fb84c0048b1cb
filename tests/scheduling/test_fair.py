"""Fair queueing by user: worked examples, and the bounds within which users are served alike."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from scheduling.errors import Cancelled
from scheduling.inference import Inference, Iteration
from scheduling.ledger import COMPLETION, MANY, PROMPT, Ledger
from scheduling.policies import VICTIMS, Dynamic, Fair, Policy, Static
from scheduling.scheduler import Scheduler
from tests.counts import examples
from tests.virtual import Ask, begun, make_scheduler, run


def test_who_was_served_least_goes_first() -> None:
    """a's first request moves a's counter to 1 + 2 · 3, b's first b's, and they take turns; within
    one plan each pick moves its user's counter.
    """
    asks = [*[Ask(0.0, tokens=3, user="a")] * 4, *[Ask(0.5, tokens=3, user="b")] * 2]
    for weights, batches in ("", "AAAEEEBBBFFFCCCDDD"), ("b=3", "AAAEEEFFFBBBCCCDDD"):
        served = run(Dynamic(), asks, order=Fair(weights), max_batch_size=1)
        assert "".join(served.batches) == batches
    for nobody in (None, ""):  # one user
        asks = [*[Ask(0.0, user=nobody)] * 2, *[Ask(0.0, user="b")] * 2]
        assert run(Dynamic(), asks, order=Fair(), max_batch_size=1).batches == [*"ACBD"]
    asks = [*[Ask(0.0, prompt=4, user="a")] * 4, *[Ask(0.0, prompt=4, user="b")] * 4]
    for policy, weights, batch in (Dynamic(), "", "AEBF"), (Static(), "a=3", "AEBC"):
        assert run(policy, asks, order=Fair(weights), max_batch_size=4).batches[0] == batch


def test_a_group_pays_for_all_its_members_and_completions_of_a_prompt_once_for_it() -> None:
    def counters(asks: list[Ask]) -> list[float]:
        scheduler = make_scheduler(Dynamic(), order=Fair(), max_batch_size=8)
        for ask in asks:
            scheduler.enqueue(ask.group(4), 0.0)
        scheduler.schedule(0.0)
        assert scheduler.ledger
        return [scheduler.ledger.counter(user) for user in ("a", "b")]

    asks = [Ask(0.0, prompt=5, rows=3, user="a"), Ask(0.0, prompt=5, user="b")]
    assert counters(asks) == [15 * PROMPT, 5 * PROMPT]
    assert counters([Ask(0.0, prompt=5, n=3, content=1, user="a")]) == [5 * PROMPT, 0]


def test_cancelled_and_recomputed_tokens_are_not_charged() -> None:
    first, second = Inference([0], 5, user="a"), Inference([0] * 9, 5, user="b")
    scheduler = begun(Dynamic(), first, steps=0, order=Fair(), max_batch_size=1)
    scheduler.enqueue([second], 0.0)
    iteration, _ = scheduler.schedule(0.0)
    scheduler.fail([first, second], Cancelled("gone"), 0.5)
    scheduler.apply(iteration, [1], 1.0)
    ledger = scheduler.ledger
    assert ledger and (ledger.counter("a"), ledger.counter("b")) == (PROMPT, 0)
    assert not list(ledger.by_counter())
    # on a pool of three blocks a request is recomputed: no user pays twice
    asks = [Ask(0.0, prompt=4, tokens=5, user="a"), Ask(0.0, prompt=4, tokens=5, user="b")]
    served = run(Dynamic("demand", watermark=0.0), asks, order=Fair(), n_blocks=3)
    assert sum(i.interruptions.recomputed_tokens for i in served.inferences) > 0
    ledger = served.scheduler.ledger
    assert ledger and ledger.counter("a") == ledger.counter("b") == 4 * PROMPT + 5 * COMPLETION


def test_counters_of_users_that_left_are_forgotten_once_they_mean_nothing() -> None:
    """A user that came as they were forgotten was forgotten with them, and went before all."""
    ledger, kept = Ledger({}), list[int]()
    for i in range(20_000):
        inference = Inference([0], 1, user=f"user {i}")
        ledger.wait(inference, 0.0)
        kept.append(len(ledger._counters))
        assert ledger.counter(inference.user) == 3.0 * i, "like the user before"
        ledger.leave(inference)
        ledger.charge(inference.user, 3.0)
    assert kept[: MANY + 1] == [*range(1, MANY + 1), 2] and max(kept) == MANY
    back = Inference([0], 1, user="user 0")
    ledger.wait(back, 0.0)
    assert ledger.counter("user 0") == ledger.counter("user 19999")


# a user: requests as (when it comes, prompt, tokens, prompts in it), and how often it asks for all
WISHES = st.tuples(
    st.sampled_from([0, 0, 2, 9, 30]), st.integers(1, 12), st.integers(1, 12),
    st.sampled_from([1, 1, 1, 3]),
)  # fmt: skip
USER = st.tuples(st.lists(WISHES, min_size=1, max_size=6), st.integers(1, 6))
USERS = st.lists(USER, min_size=2, max_size=4)
DEMAND = [Dynamic("demand", victim, watermark=0.0) for victim in VICTIMS]


@examples(60)
@given(
    users=USERS, rows=st.integers(3, 5), spare=st.integers(0, 20), budget=st.integers(5, 40),
    policy=st.sampled_from([Dynamic(), Static(), *DEMAND]),
)  # fmt: skip
def test_the_service_of_users_that_wait_differs_by_the_bound_at_most(
    users: list[tuple[list[tuple[int, int, int, int]], int]], rows: int, spare: int, budget: int,
    policy: Policy,
) -> None:  # fmt: skip
    """By the paper's bound where whole lives are reserved, by ours where rows may grow."""
    asks = [
        Ask(float(at), prompt=prompt, tokens=tokens, rows=prompts, user=str(user))
        for user, (wishes, times) in enumerate(users)
        for at, prompt, tokens, prompts in wishes * times
    ]
    asks.sort(key=lambda ask: ask.at)
    n_blocks = 6 * (rows if policy.request_level else 1) + spare
    limits = {"max_batch_size": rows, "token_budget": budget, "n_blocks": n_blocks}
    on_demand = isinstance(policy, Dynamic) and policy.kv_reservation == "demand"
    bound = of_rows(asks, rows) if on_demand else of_the_paper(asks, n_blocks)
    assert widest(policy, asks, order=Fair(), **limits) <= bound


def of_the_paper(asks: list[Ask], n_blocks: int) -> float:
    """2 · max(w_p · longest prompt, w_q · tokens in the pool): OSDI 2024, theorem 4.4."""
    return 2 * max(PROMPT * longest(asks), COMPLETION * n_blocks * 4)


def of_rows(asks: list[Ask], rows: int) -> float:
    """2 · (w_p · longest prompt + w_q · rows · longest completion): rows take what others free."""
    return 2 * (PROMPT * longest(asks) + COMPLETION * rows * max(ask.tokens for ask in asks))


def longest(asks: list[Ask]) -> int:
    return max(ask.prompt * ask.rows for ask in asks)


def test_on_demand_rows_outgrow_the_pool_and_with_it_the_papers_bound() -> None:
    """a's rows take what others of a free, since b's prompt needs the whole pool."""
    asks = [Ask(0.0, tokens=n, user="a") for n in [14, 15, 13, 5] * 4]
    asks += [Ask(0.0, prompt=15, user="b")] * 14
    limits: dict[str, Any] = {"order": Fair(), "max_batch_size": 5, "n_blocks": 4}
    assert widest(Dynamic(), asks, **limits) <= of_the_paper(asks, 4)
    difference = widest(Dynamic("demand", watermark=0.0), asks, **limits)
    assert of_the_paper(asks, 4) < difference <= of_rows(asks, 5)


def test_a_preempted_request_has_saved_nothing_up() -> None:
    """u, preempted, was owed all that j had got meanwhile: 553, where 252 is stated."""
    asks = [Ask(0.0, prompt=60, tokens=3, user="j")] * 60
    asks += [Ask(3.0, tokens=11, user="u")]
    asks += [Ask(14.0, tokens=11, user="u")] * 40
    policy = Dynamic("demand", watermark=0.0)
    limits = {"max_batch_size": 3, "n_blocks": 34, "token_budget": 400}
    assert widest(policy, asks, order=Fair(), **limits) <= of_rows(asks, 3)


def widest(policy: Policy, asks: list[Ask], **limits: Any) -> float:
    """The largest difference of service between two users, over any stretch in which both wait."""
    extremes: dict[tuple[str | None, ...], tuple[float, float]] = {}  # of this stretch
    seen: dict[int, Inference] = {}
    most = 0.0

    def check(scheduler: Scheduler, iteration: Iteration) -> None:
        nonlocal most
        seen.update(scheduler.running)
        service: Counter[str | None] = Counter()
        for inference in seen.values():
            service[inference.user] += PROMPT * len(inference.prompt_ids)
            service[inference.user] += COMPLETION * len(inference.tokens)
        waits = {inference.user for inference in scheduler.waiting.values()}
        for pair in [pair for pair in extremes if not waits.issuperset(pair)]:
            del extremes[pair]
        for pair in combinations(sorted(waits, key=str), 2):
            difference = service[pair[0]] - service[pair[1]]
            least, largest = extremes.get(pair, (difference, difference))
            extremes[pair] = min(least, difference), max(largest, difference)
            most = max(most, extremes[pair][1] - extremes[pair][0])

    run(policy, asks, check, **limits)
    return most
