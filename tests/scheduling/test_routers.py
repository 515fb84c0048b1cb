"""Routers: what each goes by, that of equals none is preferred, and what old knowledge does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.prefix_cache import block_keys
from scheduling.routers import (
    ROUTERS,
    Gateway,
    PrefixAffinity,
    ReplicaLoad,
    ReportedLoad,
    RoutedRequest,
    router,
)
from tests.counts import examples

REPLICAS = st.lists(
    st.builds(ReplicaLoad, st.integers(0, 9), st.integers(0, 30), st.integers(0, 900)), min_size=1,
    max_size=8, unique_by=lambda replica: replica.id,
)  # fmt: skip
REQUESTS = st.builds(
    RoutedRequest, st.integers(1, 40), st.integers(1, 40),
    st.lists(st.integers(0, 1), max_size=24).map(lambda ids: block_keys(ids, 4)),
    st.none() | st.sampled_from(["ann", "bob"]),
)  # fmt: skip
Events = Sequence[tuple[RoutedRequest, list[ReplicaLoad]]]
EVENTS = st.lists(st.tuples(REQUESTS, REPLICAS), min_size=1, max_size=20)
PLAIN = RoutedRequest(10, 10)


def idle(n: int) -> list[ReplicaLoad]:
    return [ReplicaLoad(id) for id in range(n)]


def prompt(*ids: int) -> RoutedRequest:
    """A prompt with so many full blocks, of which each id names one."""
    tokens = [id for id in ids for _ in range(4)]
    return RoutedRequest(len(tokens), 10, block_keys(tokens, 4))


@pytest.mark.parametrize("name", ROUTERS)
@examples(100)
@given(events=EVENTS, seed=st.integers(0, 99))
def test_a_router_chooses_the_same_again_with_a_seed(name: str, events: Events, seed: int) -> None:
    one, same = router(name, seed), router(name, seed)
    for request, replicas in events:
        chosen = one.choose(request, replicas)
        assert chosen in {replica.id for replica in replicas}
        assert chosen == same.choose(request, replicas)


@pytest.mark.parametrize("load", ["requests", "tokens"])
@examples(100)
@given(events=EVENTS)
def test_the_least_loaded_is_chosen(load: str, events: Events) -> None:
    chooser = router(f"least_{load}")
    for request, replicas in events:
        loads = {replica.id: getattr(replica, load) for replica in replicas}
        assert loads[chooser.choose(request, replicas)] == min(loads.values())


@pytest.mark.parametrize("name", sorted(ROUTERS.keys() - {"session"}))
def test_of_equals_none_is_preferred(name: str) -> None:
    chooser, replicas = router(name, 1), idle(4)
    requests = {id: prompt(id) if name == "prefix" else PLAIN for id in range(4000)}
    chosen = Counter(chooser.choose(requests[i], replicas) for i in range(4000))
    most = 1000 if name not in ("random", "power_of_two") else 1120  # 4 standard deviations
    assert chosen.keys() == {0, 1, 2, 3} and max(chosen.values()) <= most


def test_round_robin_goes_on_when_replicas_come_and_go() -> None:
    chooser, replicas = router("round_robin", 3), idle(4)
    start = chooser.choose(PLAIN, replicas)

    def following(n: int, up: list[ReplicaLoad]) -> list[int]:
        return [(chooser.choose(PLAIN, up) - start) % 4 for _ in range(n)]

    assert following(4, replicas) == [1, 2, 3, 0]
    without = [replica for replica in replicas if replica.id != (start + 1) % 4]
    assert following(3, without) == [2, 3, 0] and following(1, replicas) == [1]


def test_power_of_two_never_chooses_the_most_loaded_of_all() -> None:
    chooser = router("power_of_two", 2)
    replicas = [ReplicaLoad(0, 5), ReplicaLoad(1, 3), ReplicaLoad(2, 4)]
    chosen = Counter(chooser.choose(PLAIN, replicas) for _ in range(900))
    assert chosen.keys() == {1, 2} and chosen[1] == pytest.approx(600, abs=60), "two of three pairs"
    assert router("power_of_two").choose(PLAIN, [ReplicaLoad(7)]) == 7


SESSIONS = [f"user {i}" for i in range(3000)]


@pytest.mark.parametrize("gone", range(6))
def test_few_sessions_move_when_a_replica_goes_or_comes(gone: int) -> None:
    chooser, replicas = router("session"), idle(6)

    def places(up: Sequence[ReplicaLoad]) -> dict[str, int]:
        return {user: chooser.choose(RoutedRequest(1, 1, session=user), up) for user in SESSIONS}

    before = places(replicas)
    after = places([replica for replica in replicas if replica.id != gone])
    moved = {user for user in SESSIONS if before[user] != after[user]}
    assert moved == {user for user in SESSIONS if before[user] == gone}, "its own, and no others"
    assert len(moved) == pytest.approx(500, abs=100), "a sixth"
    assert len(set(Counter(after[user] for user in moved))) == 5, "they go to all others"
    assert places(replicas) == before, "and come back with it"


def test_a_session_stays_whatever_the_load_and_others_go_to_the_shortest_queue() -> None:
    chooser, replicas, ann = router("session"), idle(4), RoutedRequest(1, 1, session="ann")
    home = chooser.choose(ann, replicas)
    replicas[home].requests = 99
    assert router("session", 5).choose(ann, replicas) == home != chooser.choose(PLAIN, replicas)


def test_equal_prefixes_go_to_one_replica_and_unlike_ones_to_all() -> None:
    chooser, replicas = router("prefix"), idle(4)
    homes = {first: chooser.choose(prompt(first, 7), replicas) for first in range(4)}
    assert set(homes.values()) == {0, 1, 2, 3}
    for first, home in homes.items():
        replicas[home].requests = 10  # the margin over the others
        assert chooser.choose(prompt(first, 7, 50), replicas) == home
        replicas[home].requests = 0


def test_a_prefix_goes_to_the_longest_match_and_of_equal_matches_to_the_least_loaded() -> None:
    chooser = PrefixAffinity(margin=2)
    first, second, third = ReplicaLoad(0), ReplicaLoad(1), ReplicaLoad(2)
    assert chooser.choose(prompt(1, 2), [first]) == 0
    assert chooser.choose(prompt(1, 2, 3, 4), [first, second, third]) == 0
    first.requests = 3
    elsewhere = chooser.choose(prompt(1, 2, 9), [first, second, third])
    assert elsewhere != 0, "over the margin, the least loaded"
    longest = chooser.choose(prompt(1, 2, 3), [first, second, third])
    assert longest == elsewhere, "then the longest of the others"
    first.requests = 2
    assert chooser.choose(prompt(1, 2, 3, 4), [first, second, third]) == 0, "longest within it"
    assert chooser.choose(prompt(1, 2, 8), [first, second, third]) == elsewhere, "less loaded"
    long = prompt(1, *range(100, 130))
    chosen = [chooser.choose(long, [first, ReplicaLoad(5, 1), ReplicaLoad(6)]) for _ in range(2)]
    assert chosen == [6, 6], "one block of 31 is no reason; then all of it is there"


def test_a_router_forgets_replicas_that_are_gone_and_not_those_that_are_left_out() -> None:
    chooser, keys = PrefixAffinity(), prompt(1, 2, 3).keys[1:]
    chooser.choose(prompt(1, 2, 3), [ReplicaLoad(0)])
    chooser.choose(PLAIN, [ReplicaLoad(1)])
    assert chooser.matched(0, keys) == 3, "not offered is not gone"
    chooser.forget(0)
    assert chooser.matched(0, keys) == 0, "another life, an empty cache"


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=30),
    remembered=st.integers(1, 12),
)
def test_beginnings_of_prompts_are_remembered(prompts: list[list[int]], remembered: int) -> None:
    chooser, sent = PrefixAffinity(remembered=remembered), set()
    for ids in prompts:
        chooser.choose(prompt(*ids), [ReplicaLoad(0)])
        sent |= {tuple(ids[:n]) for n in range(1, len(ids) + 1)}
    known = {ids for ids in sent if chooser.matched(0, prompt(*ids).keys[1:]) == len(ids)}
    assert all(ids[:n] in known for ids in known for n in range(1, len(ids)))
    assert len(known) == min(remembered, len(sent))


def test_a_gateway_asks_again_when_its_report_is_old_and_knows_at_once_who_is_up() -> None:
    busy, other = ReplicaLoad(0, 5, 50), ReplicaLoad(1, 1, 500)
    gateway = Gateway(router("least_requests"), max_age=10)
    assert gateway.choose(PLAIN, [busy, other], 0) == 1
    busy.requests = 0
    assert [gateway.choose(PLAIN, [busy, other], now) for now in (1, 9)] == [1, 1]
    assert gateway.choose(PLAIN, [busy, other], 10) == 0
    assert gateway.choose(PLAIN, [other], 11) == 1, "the other is down"
    assert gateway.choose(PLAIN, [busy, other, ReplicaLoad(2, 7)], 12) == 2, "taken for idle"
    assert (busy.requests, other.requests) == (0, 1), "what is true is its caller's"


def test_what_was_sent_since_a_report_was_made_is_added_to_it() -> None:
    """1,000 tokens were sent; an older report came, and the load was taken for 0."""
    replica = ReportedLoad(3)
    replica.report(0.1, 2, 70)
    replica.sent(1.0, 1000)
    replica.report(0.9, 0, 0)
    assert replica.known == ReplicaLoad(3, 1, 1000)
    replica.sent(1.1, 10)
    replica.report(1.0, 1, 600)
    assert replica.known == ReplicaLoad(3, 2, 610), "what was sent by then is in it"
    replica.report(0.95, 9, 9000)
    assert replica.known == ReplicaLoad(3, 2, 610), "it came late: a newer one is known"
    replica.report(1.2, 0, 0)
    assert replica.known == ReplicaLoad(3)


@pytest.mark.parametrize(("max_age", "counts_own", "chosen"), [
    (10, True, [0, 0, 1, 0]),  # 0 + 16, + 16, and 30 are fewer than 32; then the next report
    (10, False, [0, 0, 0, 0]),  # all between two reports go to one replica
    (0, False, [0, 0, 0, 1]),  # the load is looked at each time
])  # fmt: skip
def test_a_gateway_counts_all_tokens_of_what_it_sent(
    max_age: float, counts_own: bool, chosen: list[int]
) -> None:
    gateway = Gateway(router("least_tokens"), max_age, counts_own)
    replicas = [ReplicaLoad(0, tokens=0), ReplicaLoad(1, tokens=30)]
    assert [gateway.choose(RoutedRequest(8, 8), replicas, 0) for _ in range(3)] == chosen[:3]
    replicas[0].tokens = 0 if max_age else 31
    assert gateway.choose(RoutedRequest(8, 8), replicas, 10) == chosen[3]
