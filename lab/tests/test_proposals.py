"""The proposals of lab/proposals: the contract of policies, and an example that shows each rule."""

from __future__ import annotations

import importlib
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.policies import Dynamic, Fcfs, Order, Policy, Victim
from scheduling.policies.victims import NEWEST
from tests.contract import ASKS, LIMITS, Twice, serve_within_limits
from tests.counts import examples
from tests.scheduling import test_orders
from tests.scheduling.test_texts import DEMAND
from tests.servers import ROOT
from tests.virtual import Ask, any_of, run

KINDS: dict[str, type[Any]] = {}
for file in sorted((ROOT / "lab" / "proposals").glob("[a-z]*.py")):
    name = file.stem.title().replace("_", "")
    KINDS[file.stem] = getattr(importlib.import_module(f"lab.proposals.{file.stem}"), name)
EVERY = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def rules(made: Any, on_demand: bool) -> tuple[Policy, Order, Victim]:
    """Return a policy, an order and a victim, of which `made` is one."""
    if isinstance(made, Victim):
        return DEMAND[0], Fcfs(), made
    if isinstance(made, Order):
        return (DEMAND[0] if on_demand else Dynamic()), made, NEWEST
    return replace(made, kv_reservation="demand" if on_demand else "whole"), Fcfs(), NEWEST


@EVERY
def test_any_workload_is_served_within_every_limit(kind: type[Any]) -> None:
    @examples(60)
    @given(made=any_of(kind), on_demand=st.booleans(), asks=ASKS, **LIMITS)
    def holds(made: Any, on_demand: bool, **more: Any) -> None:
        policy, order, victim = rules(made, on_demand)
        serve_within_limits(policy, order, victim=Twice(victim), **more)

    holds()
    if issubclass(kind, Order):
        test_orders.test_orders_never_read_how_long_an_answer_may_be(kind)


# an iteration per second; A runs when the others come; LATE finds two blocks of WARM's prompt
WARM, COLD, LATE = Ask(0.0, 9, 3, content=1), Ask(0.1, 5), Ask(0.2, 9, content=1)
SESSIONS = [replace(WARM, user="u"), COLD, replace(LATE, user="u"), replace(LATE, user="u")]
CHUNKS = [Ask(0.0, tokens=5), Ask(0.5, 3), Ask(2.5, 5)]
THREE = [Ask(0.0, 4, 5), Ask(0.0, 8, 9), Ask(0.0, 8, 3)]
DEMANDED, FOUR = {"max_batch_size": 3, "n_blocks": 5}, {"max_batch_size": 4}
PAIRS = [*2 * [Ask(0.0, tokens=3)], *(Ask(0.1, tokens=n) for n in (2, 8, 4, 6))]
STREAM = [Ask(0.0, tokens=6), *(Ask(0.5 + k, 8, 1) for k in range(6))]
BEGUN = [Ask(0.0, tokens=4), Ask(0.5, 9, 1), Ask(0.6, 3, 1)]
ONCE = [Ask(0.0, n, 1) for n in (9, 3, 3)]
LANES = {"laps_short_tokens": 2, "laps_long_tokens": 9}
BY_PROMPT = [Ask(0.0, tokens=3), *(Ask(0.1, n) for n in (9, 5, 2, 2, 2))]
EXAMPLES: list[tuple[str, dict[str, Any], list[Ask], dict[str, Any], str]] = [
    ("weighted_sjf", {"sjf_length_median": 4},
     [Ask(0.0, tokens=3), Ask(0.1, 8), Ask(2.5)], {}, "A A A C B"),
    ("weighted_sjf", {"sjf_length_median": 4, "sjf_time_median_s": 1.0},
     [Ask(0.0, tokens=3), Ask(0.1, 8), Ask(2.5)], {}, "A A A B C"),
    ("residual_sjf", {}, [WARM, COLD, LATE], {}, "A A A C B"),
    ("residual_sjf", {"residual_max_wait_s": 2.5}, [WARM, COLD, LATE], {}, "A A A B C"),
    ("ewsjf", {"ewsjf_range": 4, "ewsjf_weight": 0.0},  # at 3 B has 2.9 / 3, at 4 D 1.1
     [Ask(0.0, tokens=3), Ask(0.1, 9), Ask(0.2), Ask(2.9)], {}, "A A A C B D"),
    ("cache_affinity", {"affinity_max_wait_s": 9.0}, [WARM, COLD, LATE], {}, "A A A C B"),
    ("cache_affinity", {}, [WARM, COLD, LATE], {}, "A A A B C"),
    ("session_affinity", {"session_max_wait_s": 9.0}, SESSIONS, {}, "A A A C D B"),
    ("session_affinity", {"session_max_wait_s": 3.5}, SESSIONS, {}, "A A A C B D"),
    ("sla_tiers", {}, [Ask(0.0, 3, priority=n) for n in (1, 1, 2)],
     {"max_batch_size": 3, "token_budget": 8}, "AC B"),
    ("sla_tiers", {}, [Ask(0.0, priority=n) for n in (3, 0, 2, 1)], {}, "D B C A"),
    ("slo_bias", {}, [Ask(0.0, tokens=3), Ask(0.1, 50), Ask(0.12)], {}, "A A A C B"),
    ("slo_bias", {"slo_bias": -10.0, "slo_short_tokens": 9},
     [Ask(0.0, tokens=3), Ask(0.1), Ask(1.0, 50)], {}, "A A A C B"),
    ("small_chunks", {"small_chunk_tokens": 8, "small_chunk_delay_ms": 1e6},
     CHUNKS, {"max_batch_size": 3}, "A A A ABC A"),
    ("small_chunks", {"small_chunk_tokens": 8, "small_chunk_delay_ms": 1e3},
     CHUNKS, {"max_batch_size": 3}, "A A AB A AC"),
    ("prefill_waves", {"wave_share": 0.5},  # A is paused for B and C, and they for A
     [Ask(0.0, tokens=5), *2 * [Ask(0.5, tokens=2)]], {"max_batch_size": 4}, "A BC AB AC A A"),
    ("prefill_interval", {"prefill_interval": 4},
     [Ask(0.0, tokens=6), Ask(0.5)], {"max_batch_size": 2}, "A A A A AB A"),
    ("pressure_budget", {"pressure_share": 0.2}, [Ask(0.0, tokens=4), Ask(0.5, 7), Ask(0.6)],
     {"max_batch_size": 2, "token_budget": 5}, "A AB AB AB BC"),
    # at 1 A needs a block: B would free 2 / 8 × 8 / 9, and C, the newest, 2 / 8 × 2 / 3
    ("cost_aware_victim", {}, THREE, DEMANDED, "ABC AC AC AB AB B B B B B B"),
    # B would free 2 / 5 × 8 / 9, and C 2 / 8 × 8 / 9
    ("cost_aware_victim", {}, [Ask(0.0, 4, 5), Ask(0.0, 5, 9), Ask(0.0, 8, 9)], DEMANDED,
     "ABC AC AC AC AC C C C C B B B B B B B B"),
    ("most_left_victim", {}, THREE, DEMANDED, "ABC AC AC AB AB B B B B B B"),  # of B 8, of C 2
    # at 1 D gives way, at 3 C to itself, since D did before
    ("least_preempted_victim", {}, [Ask(0.0, 4, 2), Ask(0.0, 4, 4), Ask(0.0, 2, 4), Ask(0.0, 4, 5)],
     {"max_batch_size": 4, "n_blocks": 5}, "ABCD ABC BCD BD DC D"),
    ("paired_lengths", {"pair_patience_s": 99.0}, PAIRS, {"max_batch_size": 2},
     "BA BA BA DC DC DE DE DE DE DF DF F F F F"),
    ("paired_lengths", {"pair_patience_s": 0.9}, PAIRS, {"max_batch_size": 2},  # C's is 1.45 s
     "BA BA BA CD CD DE DE DE DE DF DF F F F F"),
    ("decode_after_prompts", {"prompts_in_a_row": 0}, STREAM, FOUR, "A B C D E F G A A A A A"),
    ("decode_after_prompts", {"prompts_in_a_row": 2}, STREAM, FOUR, "A B A CD E A FG A A A"),
    ("decode_after_prompts", {"prompts_in_a_row": 1}, BEGUN,  # B's second chunk goes on
     FOUR | {"token_budget": 4}, "A A B B BC A A"),
    ("pause_new_prompts", {"prompt_pause": 0}, STREAM, FOUR, "A B C D E F G A A A A A"),
    ("pause_new_prompts", {"prompt_pause": 2}, STREAM, FOUR, "A A A BCD A A EFG A"),
    ("pause_new_prompts", {"prompt_pause": 2}, BEGUN,
     FOUR | {"token_budget": 4}, "A A A B B BC A"),
    ("prompts_at_once", {"prompts_at_once": 1}, ONCE, FOUR | {"token_budget": 6}, "A A B C"),
    ("prompts_at_once", {"prompts_at_once": 2}, ONCE, FOUR | {"token_budget": 6}, "AB AC A"),
    # none can join, so that A has the whole budget
    ("prompts_at_once", {"prompts_at_once": 2}, ONCE, {"max_batch_size": 1, "token_budget": 9},
     "A B C"),
    # at 3 B has 2.9 − log2(45²), C 2.8 − log2(6²)
    ("preflow", {}, [Ask(0.0, tokens=3), Ask(0.1, 9, 1), Ask(0.2, 3, 1)], {}, "A A A C B"),
    ("preflow", {"preflow_half_s": 0.01},
     [Ask(0.0, tokens=3), Ask(0.1, 9, 1), Ask(0.2, 3, 1)], {}, "A A A B C"),
    ("preflow", {}, [Ask(0.0, 12, 1), Ask(0.5, 2, 1)],  # a prompt that has begun waits
     {"max_batch_size": 2, "token_budget": 4}, "A B A A"),
    ("laps", LANES | {"laps_rate": 0.01}, BY_PROMPT, {}, "A A A D E F C B"),
    ("laps", LANES | {"laps_rate": 1.5}, BY_PROMPT, {}, "A A A D B E F C"),  # 1.5 × 7 at 4
    ("longest_job", {},  # B and F are the first of their jobs; then 3 tokens are more than 1
     [Ask(0.0, tokens=1, user="s"), Ask(0.1, tokens=3, user="l"), Ask(0.2, tokens=1, user="s"),
      Ask(0.3, tokens=1, user="s"), Ask(0.5, tokens=2, user="l"), Ask(0.6, tokens=1, user="n")],
     {}, "A B B B F E E C D"),
    ("fair_prefill", {}, [Ask(0.0, tokens=9), *4 * [Ask(0.1, 4, 1)]],  # 2 of 5 iterations
     {"max_batch_size": 2, "token_budget": 4}, "A A A B A C A A D A E A A"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "asks", "limits", "batches"), EXAMPLES)
def test_a_proposal_serves_its_worked_example(
    name: str, settings: dict[str, Any], asks: list[Ask], limits: dict[str, Any], batches: str
) -> None:
    policy, order, victim = rules(KINDS[name](**settings), on_demand=False)
    served = run(policy, asks, order=order, victim=victim, **({"max_batch_size": 1} | limits))
    assert " ".join(served.batches) == batches


@pytest.mark.parametrize("name", ["residual_sjf", "cache_affinity", "session_affinity"])
def test_none_starves_that_a_proposal_promises_not_to_starve(name: str) -> None:
    """Others are preferred, and come twice as fast as they are served."""
    others = [Ask(0.2 + i / 2, prompt=9, content=1, user="u") for i in range(100)]
    asks = [replace(WARM, user="u"), Ask(0.1, prompt=50), *others]
    [bound] = [each.name for each in fields(KINDS[name]) if each.name.endswith("max_wait_s")]
    served = run(Dynamic(), asks, order=KINDS[name](**{bound: 20.0}), max_batch_size=1)
    assert served.admitted_at[1] == 21.0
