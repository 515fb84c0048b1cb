"""Prefix caching: what is found, forgotten and never written, in virtual time and over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.errors import Cancelled, GenerationFailed
from scheduling.inference import CachedPrefix, Inference, State
from scheduling.policies import Dynamic, Fcfs, Mlfq, NoBatching, Order, Policy, Prefix, Static
from scheduling.prefix_cache import PrefixCache, block_keys
from simulate import drive
from tests.counts import examples
from tests.servers import ClientOf
from tests.virtual import Ask, begun, make_scheduler, run, step

DEMAND = Dynamic(kv_reservation="demand", watermark=0.0)

# A worked example: blocks of four tokens, eight prompt tokens an iteration.
#
#     request   arrives   prompt   tokens
#     A         0         12       2
#     B         0.5       12       2         the same prompt
#
#     prompt tokens computed, d for a decode
#     t        0  1    2    3
#     off      8  4 4  d 8  d            B begins with what A left of the budget
#     caching  8  4 4  d d               at 1 B finds A's first two blocks, and ends sooner
EXAMPLE = [Ask(0.0, prompt=12, tokens=2, content=1), Ask(0.5, prompt=12, tokens=2, content=1)]


def test_the_worked_example() -> None:
    alone = [Ask(ask.at, prompt=12, tokens=2) for ask in EXAMPLE]
    assert run(Dynamic(), alone, token_budget=8).chunks == [[8], [4, 4], [1, 8], [1]]
    served = run(Dynamic(), EXAMPLE, token_budget=8)
    assert served.chunks == [[8], [4, 4], [1, 1]]
    assert [member.cached_tokens for member in served.inferences] == [0, 8]
    now = served.scheduler.snapshot()
    assert (now.prefix_queries, now.prefix_hits, now.prompt_tokens) == (24, 8, 24)


def asked(ids: Sequence[int], tokens: int = 1, salt: str = "", block_size: int = 4) -> Inference:
    prefix = CachedPrefix(block_keys(ids, block_size, salt))
    return Inference([*ids], tokens, prefix=prefix)


IDS = st.lists(st.integers(0, 1), min_size=1, max_size=24)


@examples(200)
@given(asks=st.lists(st.tuples(IDS, st.integers(1, 9), st.sampled_from(["", "x"])), max_size=12))
def test_what_is_found_was_computed_under_its_salt(asks: list[tuple[list[int], int, str]]) -> None:
    """One after another, on a pool that holds everything: an oracle knows each full block by all
    that was computed up to its end, completions too; the last prompt token is always computed.
    """
    scheduler = make_scheduler(NoBatching(), n_blocks=1000)
    computed: set[tuple[Any, ...]] = set()
    for ids, tokens, salt in asks:
        inference = asked(ids, tokens, salt)
        scheduler.enqueue([inference], 0.0)
        while scheduler.has_work:
            step(scheduler)
        known = [(salt, *ids[:end]) in computed for end in range(4, len(ids), 4)]
        assert inference.cached_tokens == 4 * [*known, False].index(False)
        whole = [*ids, *inference.tokens[:-1]]
        computed |= {(salt, *whole[:end]) for end in range(4, len(whole) + 1, 4)}


def test_blank_blocks_are_taken_first_then_the_longest_unused_ends_before_beginnings() -> None:
    pool = PrefixCache(6, 4)
    old, new = pool.allocate(3), pool.allocate(2)
    for block in (*old, *new):
        pool.cache(block, bytes([block]))
    pool.free(old)
    pool.free(new)
    pool.share(pool.find([bytes([0])]))  # found, so that it is used again
    assert (pool.free_blocks, pool.references[:2]) == (5, [1, 0])
    pool.free([0])
    assert pool.free_blocks == 6
    for left in ({0, 1, 2, 3, 4}, {0, 1, 3, 4}, {0, 3, 4}, {0, 3}, {0}, set[int]()):
        pool.allocate(1)
        assert {block for block in range(5) if pool.find([bytes([block])])} == left


def test_an_iteration_that_fails_leaves_nothing_to_be_found() -> None:
    scheduler = begun(Dynamic(), first := asked([1] * 8), steps=0)
    scheduler.schedule(0.0)
    scheduler.fail([first], GenerationFailed("broken"), 1.0)
    scheduler.enqueue([second := asked([1] * 8)], 1.0)
    step(scheduler, 1.0)
    assert second.cached_tokens == 0 and scheduler.pool.free_blocks == 100


def test_who_leaves_while_another_shares_its_blocks_takes_nothing_from_it() -> None:
    first, second = asked([1] * 9, 9), asked([1] * 9, 9)
    scheduler = begun(Dynamic(), first)
    scheduler.enqueue([second], 1.0)
    iteration, _ = scheduler.schedule(1.0)
    shared = iteration.rows[1].blocks[:2]
    assert shared == first.blocks[:2] and second.cached_tokens == 8
    scheduler.fail([first], Cancelled("gone"), 1.5)
    scheduler.apply(iteration, [7, 7], 2.0)
    assert [scheduler.pool.references[block] for block in shared] == [1, 1]
    taken = scheduler.pool.allocate(scheduler.pool.free_blocks)
    assert not set(taken) & set(second.blocks)


def test_a_preempted_request_finds_what_it_had_computed_unless_it_was_needed() -> None:
    """The worked example of test_demand.py; with six tokens A needs the third block, too."""
    for tokens, recomputed in ((5, 0), (6, 4)):
        asks = [Ask(0.0, 4, tokens, content=1), Ask(0.0, 4, 5, content=2)]
        served = run(DEMAND, asks, n_blocks=3)
        b = served.inferences[1]
        assert (b.interruptions.preemptions, b.cached_tokens) == (1, 0)
        assert b.interruptions.recomputed_tokens == recomputed


def test_forgetting_leaves_what_is_shared_as_it_is() -> None:
    first, second, third = (asked([1] * 9, 9) for _ in range(3))
    scheduler = begun(Dynamic(), first)
    scheduler.enqueue([second], 1.0)
    step(scheduler, 1.0)
    scheduler.forget_prefixes()
    scheduler.enqueue([third], 2.0)
    drive(scheduler, [], lambda _: 1.0)
    assert [i.cached_tokens for i in (first, second, third)] == [0, 8, 0]
    assert [len(i.tokens) for i in (first, second, third)] == [9, 9, 9]
    assert scheduler.pool.free_blocks == 100


def test_what_is_shared_is_not_paid_for_twice() -> None:
    """Whole lives of 10 and 6 blocks, 4 of them in common: together 24 blocks, and not 52."""
    asks = [Ask(0.0, prompt=20, tokens=20, content=1)]
    asks += [Ask(1.0, prompt=20, tokens=3, content=1)] * 7
    for policy in (Dynamic(), DEMAND):
        served = run(policy, asks, max_batch_size=8, n_blocks=24)
        assert max(iteration.running for _, iteration in served.iterations) == 8
        assert sum(member.interruptions.preemptions for member in served.inferences) == 0


def test_another_salt_finds_nothing_and_openais_routes_share_with_ours(client_of: ClientOf) -> None:
    client, prompt = client_of("static", prefix_caching=True), [*range(68)]

    def cached(salt: str | None, path: str = "/inference") -> int:
        body: dict[str, Any] = {"prompt_ids": prompt, "num_tokens": 2}
        if path != "/inference":
            body = {"prompt": prompt, "max_tokens": 2}
        answer = client.post(path, json=body | ({"cache_salt": salt} if salt else {})).get_json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(salt) for salt in ("a", "b", "a", None)] == [0, 0, 64, 0]
    assert [cached(salt, "/v1/completions") for salt in (None, "b", "c")] == [64, 64, 0]
    client.post("/reset_prefix_cache", json={})
    assert cached("a") == 0


# A worked example of `--order prefix`: one row, blocks of four tokens, prompts of 36 of which all
# but the last four are in common by letter, two kinds; 40 tokens an iteration.
#
#     request   arrives   kind
#     A         0         1
#     B         1         2
#     C         1.5       1        its first 32 tokens are cached: it goes before B
#     D         1.6       2
def alike(kind: int, own: int) -> Inference:
    return asked([kind] * 32 + [own] * 4)


def served_by(order: Order, policy: Policy, **limits: Any) -> tuple[str, list[Inference]]:
    """In which order A to D are admitted, those of one iteration together."""
    limits = {"max_batch_size": 1, "token_budget": 40} | limits
    scheduler = make_scheduler(policy, order=order, **limits)
    at = (0.0, 1.0, 1.5, 1.6)
    inferences = [alike(1, 3), alike(2, 4), alike(1, 5), alike(2, 6)]
    drive(scheduler, [(t, [i]) for t, i in zip(at, inferences)], lambda _: 2.0)
    names = dict(zip("ABCD", inferences))
    times = sorted({i.admitted_at for i in inferences if i.admitted_at is not None})
    batches = [[n for n, i in names.items() if i.admitted_at == t] for t in times]
    return " ".join("".join(batch) for batch in batches), inferences


class OldestAlone(Prefix):
    window = 1


class OldestTwo(Prefix):
    window = 2


def test_who_has_the_longest_cached_prefix_goes_first() -> None:
    assert served_by(Fcfs(), Dynamic())[0] == "A B C D"
    order, inferences = served_by(Prefix(), Dynamic())
    assert order == "A C B D"
    assert [i.cached_tokens for i in inferences] == [0, 0, 32, 32]
    assert served_by(OldestAlone(), Dynamic())[0] == "A B C D"


def test_of_those_that_would_compute_the_same_one_goes_and_the_others_wait_for_its_blocks() -> None:
    """B goes and D waits for its blocks; not in a batch, or without hold-back."""
    limits = {"max_batch_size": 4, "token_budget": 100}
    order, inferences = served_by(Prefix(), Dynamic(), **limits)
    assert order == "A BC D"
    assert [i.cached_tokens for i in inferences] == [0, 0, 32, 32]
    order, inferences = served_by(Fcfs(), Dynamic(), **limits)
    assert order == "A BCD"
    assert [i.cached_tokens for i in inferences] == [0, 0, 32, 0]
    assert served_by(Prefix(), Static(), **limits)[0] == "A BCD"


@pytest.mark.parametrize("late", [0, 1])
def test_who_is_held_back_goes_when_the_first_has_left(late: int) -> None:
    scheduler = make_scheduler(Dynamic(), order=Prefix(), token_budget=3)
    first, second = alike(1, 3), alike(1, 4)
    scheduler.enqueue([first], 0.0)
    for now in range(2):
        if now == late:  # the first one runs already
            scheduler.enqueue([second], now)
        iteration, _ = step(scheduler, float(now))
        assert [row.inference for row in iteration.rows] == [first]
        assert second.state is State.WAITING
    scheduler.fail([first], Cancelled("gone"), 2.0)
    iteration, _ = step(scheduler, 2.0)
    assert [(row.inference, row.start) for row in iteration.rows] == [(second, 4)]


def test_completions_of_one_prompt_do_not_hold_each_other_back() -> None:
    served = run(Dynamic(), [Ask(0.0, prompt=41, tokens=2, content=1, n=2)], order=Prefix())
    assert served.admitted_at == [0.0, 0.0]


def test_a_request_is_never_split_by_its_window() -> None:
    """Two prompts each, a window of two: B's second prompt follows its first before A."""
    scheduler = begun(Static(), asked([2] * 9), order=OldestTwo())
    a, b = [asked([1] * 9) for _ in range(2)], [asked([2] * 9) for _ in range(2)]
    scheduler.enqueue(a, 1.0)
    scheduler.enqueue(b, 2.0)
    drive(scheduler, [], lambda _: 1.0)
    assert [i.standing.batch for i in (*b, *a)] == [1, 1, 2, 2]


# ---- several completions of a prompt share its KV blocks, in every mode


# A worked example: blocks of four tokens, eight prompt tokens an iteration, a prompt of 10 with
# three completions of two tokens. The followers wait until the first has computed the two full
# blocks, and compute two tokens each.
#
#     t       0  1      2
#     first   8  2      d
#     others     2 2    d d
def test_the_worked_example_of_n() -> None:
    asks = [Ask(0.0, prompt=10, tokens=2, content=1, n=3)]
    for policy in (Dynamic(), Static(), Dynamic(kv_reservation="demand")):
        served = run(policy, asks, max_batch_size=3, token_budget=8)
        assert served.chunks == [[8], [2, 2, 2], [1, 1, 1]], policy
        used = [iteration.blocks_used for _, iteration in served.iterations]
        assert used[1:] == [5, 5], "two in common, and one each"
        assert served.scheduler.snapshot().prompt_tokens == 10, "a prompt counts once"
    alone = run(NoBatching(), asks, token_budget=8).chunks
    assert alone == [[8], [2], [1], [2], [1], [2], [1]], "one after another they share, too"
    ample = run(Dynamic(), asks, max_batch_size=3, token_budget=99)
    assert ample.chunks == [[10], [1, 2, 2], [1, 1]], "they wait, though the budget would do"
    single = [Ask(0.0, prompt=10, tokens=1, content=1, n=3)]
    served = run(Dynamic(), single, max_batch_size=3, token_budget=8)
    assert served.chunks == [[8], [2, 2, 2]], "and when the first is done with its prompt"


def test_followers_go_on_without_a_first_that_has_left() -> None:
    for policy in (Dynamic(), Static()):
        first, *others = Ask(0.0, prompt=10, tokens=2, content=1, n=3).group(4)
        scheduler = begun(policy, first, *others, steps=0, max_batch_size=3, token_budget=8)
        iteration, _ = scheduler.schedule(0.0)
        scheduler.fail([first], Cancelled("gone"), 0.5)
        scheduler.apply(iteration, [], 1.0)
        for now in range(1, 9):
            step(scheduler, float(now))
        assert [other.state for other in others] == [State.FINISHED] * 2
        assert others[0].cached_tokens == 0, "nobody has what the first had computed"
        assert scheduler.pool.free_blocks == scheduler.pool.n_blocks


def test_followers_do_not_wait_for_a_first_that_gave_way() -> None:
    """It may itself wait for the blocks that they have, and then neither would go on."""
    first, other = Ask(0.0, prompt=10, tokens=20, content=1, n=2).group(4)
    scheduler = begun(DEMAND, first, other, steps=14, n_blocks=20, token_budget=4)
    scheduler._preempt(other, 14.0)
    scheduler.forget_prefixes()
    step(scheduler, 14.0)
    assert other.computed == 4, "it has recomputed a part"
    scheduler._preempt(first, 15.0)
    scheduler.pool.allocate(scheduler.pool.free_blocks - 3)
    iteration, _ = scheduler.schedule(15.0)
    assert [row.inference for row in iteration.rows] == [other]


MOST = Dynamic("demand", victim="most_computed", watermark=0.2, budget_counts="all")


@pytest.mark.parametrize(("policy", "order", "asks", "limits"), [
    # they waited for a first one that waited for their blocks, and nothing ran
    (MOST, Fcfs(), [Ask(0.0, 4, 8, content=1), Ask(1.0, 13, 10, content=2, n=4)], (4, 8, 10, 4)),
    (MOST, Fcfs(), [Ask(0.0, 10, 6, content=1, n=3), Ask(1.0, 11, 13, content=1, n=3)],
     (6, 6, 6, 4)),
    # the second completion was promoted before the first, and took its blocks
    (Dynamic("demand", prefill="first"), Mlfq(0.1, 2), [Ask(0.0, 25, 4, n=2)], (8, 1, 2, 16)),
])  # fmt: skip
def test_none_waits_for_ever_for_completions(
    policy: Policy, order: Order, asks: list[Ask], limits: tuple[int, ...]
) -> None:
    names = "max_batch_size", "token_budget", "n_blocks", "block_size"
    named: dict[str, Any] = dict(zip(names, limits))
    served = run(policy, asks, order=order, **named)
    assert all(member.state is State.FINISHED for member in served.inferences)


def test_a_completion_that_shares_nothing_does_not_wait_for_its_leader() -> None:
    """As where a prompt is scored: each computes it whole."""
    leader = Inference([1] * 9, 2)
    scheduler = begun(Dynamic(), leader, Inference([1] * 9, 2, leader=leader), steps=0)
    iteration, _ = scheduler.schedule(0.0)
    assert [row.n_tokens for row in iteration.rows] == [9, 9]
