"""Prefix caching: what is found, what is forgotten, what is never written; in virtual time, on the
engine and over HTTP.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.calls import post
from client.load import Watch
from client.traces import Request
from client.wire import wire
from compare.measure import Target, measure
from model import GPT2
from scheduling.errors import Cancelled, GenerationFailed
from scheduling.inference import Inference
from scheduling.policies import Dynamic, Fcfs, NoBatching, Order, Policy, Prefix, Static
from scheduling.prefix_cache import PrefixCache, block_keys
from scheduling.sampling import Sampling
from simulate import drive
from tests.counts import examples, nightly_but
from tests.oracle import N_VOCAB, Oracle, engine, model, serve  # noqa: F401
from tests.oracle import POLICIES as ENGINE_POLICIES
from tests.servers import fake_text, metric, server
from tests.virtual import Ask, make_scheduler, run, step

DEMAND = Dynamic(kv_reservation="demand", watermark=0.0)
POLICIES = [*ENGINE_POLICIES, DEMAND]

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
    return Inference([*ids], tokens, keys=block_keys(ids, block_size, salt))


IDS = st.lists(st.integers(0, 1), min_size=1, max_size=24)


@examples(200)
@given(asks=st.lists(st.tuples(IDS, st.integers(1, 9), st.sampled_from(["", "x"])), max_size=12))
def test_what_is_found_is_what_was_computed_before_under_the_same_salt(
    asks: list[tuple[list[int], int, str]],
) -> None:
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


def test_a_prompt_of_whole_blocks_computes_its_last_one() -> None:
    served = run(Dynamic(), [Ask(at, prompt=8, content=1) for at in (0.0, 1.0)])
    assert [member.cached_tokens for member in served.inferences] == [0, 4]


def test_of_what_is_kept_the_longest_unused_goes_first_and_ends_before_beginnings() -> None:
    pool = PrefixCache(5, 4)
    old, new = pool.allocate(3), pool.allocate(2)
    for block in (*old, *new):
        pool.cache(block, bytes([block]))
    pool.free(old)
    pool.free(new)
    assert pool.free_blocks == 5
    for n, left in ((1, {0, 1, 3, 4}), (1, {0, 3, 4}), (1, {3, 4}), (1, {3})):
        pool.allocate(n)
        assert {block for block in range(5) if pool.find([bytes([block])])} == left


def test_who_is_found_again_is_used_again() -> None:
    pool = PrefixCache(2, 4)
    for block in pool.allocate(2):
        pool.cache(block, bytes([block]))
        pool.free([block])
    pool.share(pool.find([bytes([0])]))
    assert (pool.free_blocks, pool.references) == (1, [1, 0])
    pool.free([0])
    pool.allocate(1)  # block 1 is unused for longer now
    assert pool.find([bytes([0])]) == [0] and pool.find([bytes([1])]) == []


def test_blank_blocks_are_taken_before_anything_is_forgotten() -> None:
    pool = PrefixCache(4, 4)
    [block] = pool.allocate(1)
    pool.cache(block, b"key")
    pool.free([block])
    assert pool.allocate(3) == [1, 2, 3] and pool.find([b"key"]) == [0]


def test_an_iteration_that_fails_leaves_nothing_to_be_found() -> None:
    scheduler = make_scheduler(Dynamic())
    scheduler.enqueue([first := asked([1] * 8)], 0.0)
    scheduler.schedule(0.0)
    scheduler.fail([first], GenerationFailed("broken"), 1.0)
    scheduler.enqueue([second := asked([1] * 8)], 1.0)
    step(scheduler, 1.0)
    assert second.cached_tokens == 0 and scheduler.pool.free_blocks == 100


def test_who_leaves_while_another_shares_its_blocks_takes_nothing_from_it() -> None:
    scheduler = make_scheduler(Dynamic())
    first, second = asked([1] * 9, 9), asked([1] * 9, 9)
    scheduler.enqueue([first], 0.0)
    step(scheduler, 0.0)
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
    scheduler = make_scheduler(Dynamic())
    first, second, third = (asked([1] * 9, 9) for _ in range(3))
    scheduler.enqueue([first], 0.0)
    step(scheduler, 0.0)
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


SHARED = random.Random(7)
PREFIXES = [[SHARED.randrange(N_VOCAB) for _ in range(n)] for n in (33, 16, 0)]


def conversations(block_size: int, sampling: Sampling) -> list[Inference]:
    """Prompts that begin alike, two of them wholly alike."""
    rng = random.Random(11)
    prompts = [[*prefix, *(rng.randrange(N_VOCAB) for _ in range(n))] for prefix in PREFIXES
               for n in (1, 5, 12)]  # fmt: skip
    prompts.append(prompts[1])
    return [
        Inference(ids, 2 + 5 * i % 14, replace(sampling, seed=i), keys=block_keys(ids, block_size))
        for i, ids in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    "path", nightly_but(["kernels"], ["plain", "kernels", "kernels and onednn"])
)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_texts_are_those_without_caching(
    model: GPT2,  # noqa: F811
    policy: Policy,
    path: str,
) -> None:
    """In float32, greedy and drawn, on pools that evict and pools that do not."""
    for sampling in (Sampling(), Sampling(0.8, 40, 0.9)):
        expected = serve(NoBatching(), Oracle(model, N_VOCAB), conversations(4, sampling))
        found_at_all = 0
        for block_size, spare in itertools.product((4, 16), (1, 60)):
            asks = conversations(block_size, sampling)
            n_blocks = spare + max(-(-ask.total_tokens // block_size) for ask in asks)
            order: Order = Prefix() if spare == 1 else Fcfs()
            kernels = engine(model, n_blocks, block_size, path)
            limits = {"n_blocks": n_blocks, "block_size": block_size}
            assert serve(policy, kernels, asks, order=order, **limits) == expected, limits
            found_at_all += sum(ask.cached_tokens for ask in asks)
        assert found_at_all > 100


def prompts(n: int, seed: int = 1) -> list[Request]:
    """Of 16 tokens in common with every third, and 20 of its own."""
    rng = random.Random(seed)
    common = [[rng.randrange(97, 123) for _ in range(48)] for _ in range(3)]
    return [
        Request(id=i, at=0.05 * i, num_tokens=8 + i % 9, seed=i,
                prompt_ids=[*common[i % 3], *(rng.randrange(97, 123) for _ in range(20))])
        for i in range(n)
    ]  # fmt: skip


@pytest.mark.parametrize("stream", nightly_but([True], [False, True]))
def test_live_the_texts_are_the_same_and_all_counts_agree(tmp_path: Path, stream: bool) -> None:
    """The client's usage, /stats, /metrics and the request log tell the same story."""
    requests = prompts(24)
    common = {"model": "fake", "max_batch_size": 8, "max_model_len": 400}
    expected = [fake_text(request) for request in requests]
    log = tmp_path / "log.jsonl"
    with server("dynamic", common | {"prefix_caching": True, "request_log": str(log)}) as url:
        target = Target("cached", url, wire("inference", stream=stream))
        result, outcomes = measure(target, requests, {}, 60.0, Watch())
        queries = metric(url, "vllm:prefix_cache_queries_total")
        hits = metric(url, "vllm:prefix_cache_hits_total")
        assert metric(url, "vllm:kv_cache_usage_perc") == 0, "what is kept is free"
        again = [ask(url, requests[0])["usage"] for _ in range(2)]
        post(f"{url}/reset_prefix_cache")
        forgotten = ask(url, requests[0])["usage"]
    assert [outcome.text for outcome in outcomes] == expected
    lines = [json.loads(line) for line in log.read_text().splitlines()][:24]
    assert queries == 24 * 68 == sum(line["prompt_tokens"] for line in lines)
    assert hits == result["server"]["cached_tokens"] == sum(line["cached_tokens"] for line in lines)
    assert hits >= 48 * 15, "most of those that came later"
    assert metric_of(again) == [64, 64] and metric_of([forgotten]) == [0]
    assert result["server"]["total_input_tokens"] == 24 * 68 == result["total_input_tokens"]


def ask(url: str, request: Request, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = post(f"{url}/inference", request.body() | more)
    return found


def metric_of(usages: Sequence[dict[str, Any]]) -> list[int]:
    return [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]


def test_another_salt_finds_nothing_and_openais_routes_share_with_ours() -> None:
    [request] = prompts(1)
    completion = {"prompt": request.prompt_ids, "max_tokens": 2}
    with server("static", {"model": "fake", "prefix_caching": True}) as url:
        ours = [ask(url, request, **salt)["usage"] for salt in salts("a", "b", "a", None)]
        theirs = [
            post(f"{url}/v1/completions", completion | salt)["usage"]
            for salt in salts(None, "b", "c")
        ]
    assert metric_of(ours) == [0, 0, 64, 0] and metric_of(theirs) == [64, 64, 0]


def salts(*names: str | None) -> list[dict[str, str]]:
    return [{"cache_salt": name} if name else {} for name in names]


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


def test_who_has_the_longest_cached_prefix_goes_first() -> None:
    assert served_by(Fcfs(), Dynamic())[0] == "A B C D"
    order, inferences = served_by(Prefix(), Dynamic())
    assert order == "A C B D"
    assert [i.cached_tokens for i in inferences] == [0, 0, 32, 32]
    assert served_by(Prefix(prefix_window=1), Dynamic())[0] == "A B C D"


def test_of_those_that_would_compute_the_same_one_goes_and_the_others_wait_for_its_blocks() -> None:
    """With rows and a budget for all B goes and D waits for its blocks; not if they are a batch, or
    without hold-back.
    """
    limits = {"max_batch_size": 4, "token_budget": 100}
    order, inferences = served_by(Prefix(), Dynamic(), **limits)
    assert order == "A BC D"
    assert [i.cached_tokens for i in inferences] == [0, 0, 32, 32]
    order, inferences = served_by(Fcfs(), Dynamic(), **limits)
    assert order == "A BCD"
    assert [i.cached_tokens for i in inferences] == [0, 0, 32, 0]
    assert served_by(Prefix(), Static(), **limits)[0] == "A BCD"


def test_who_is_held_back_goes_when_the_first_has_left() -> None:
    scheduler = make_scheduler(Dynamic(), order=Prefix(), token_budget=8)
    first, second = alike(1, 3), alike(1, 4)
    scheduler.enqueue([first], 0.0)
    scheduler.enqueue([second], 0.0)
    for now in range(2):
        iteration, _ = step(scheduler, float(now))
        assert [row.inference for row in iteration.rows] == [first]
    scheduler.fail([first], Cancelled("gone"), 2.0)
    iteration, _ = step(scheduler, 2.0)
    assert [(row.inference, row.start) for row in iteration.rows] == [(second, 16)]


def test_completions_of_one_prompt_do_not_hold_each_other_back() -> None:
    served = run(Dynamic(), [Ask(0.0, prompt=41, tokens=2, content=1, n=2)], order=Prefix())
    assert served.admitted_at == [0.0, 0.0]


def test_a_request_is_never_split_by_its_window() -> None:
    """Two prompts each, a window of two: B's second prompt follows its first before A."""
    scheduler = make_scheduler(Static(), order=Prefix(prefix_window=2), token_budget=100)
    warm = asked([2] * 9)
    scheduler.enqueue([warm], 0.0)
    step(scheduler, 0.0)
    a, b = [asked([1] * 9) for _ in range(2)], [asked([2] * 9) for _ in range(2)]
    scheduler.enqueue(a, 1.0)
    scheduler.enqueue(b, 2.0)
    drive(scheduler, [], lambda _: 1.0)
    assert [i.batch for i in (*b, *a)] == [1, 1, 2, 2]
