"""The proposals of lab/proposals: the contract of policies, and an example that shows each rule."""

from __future__ import annotations

import importlib
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.policies import Dynamic, Fcfs, Order, Policy
from tests.contract import ASKS, LIMITS, serve_within_limits
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


def as_pair(made: Any, on_demand: bool) -> tuple[Policy, Order]:
    """Return a policy and an order, of which `made` is one."""
    if isinstance(made, Order):
        return (DEMAND[0] if on_demand else Dynamic()), made
    return replace(made, kv_reservation="demand" if on_demand else "whole"), Fcfs()


@EVERY
def test_any_workload_is_served_within_every_limit(kind: type[Any]) -> None:
    @examples(60)
    @given(made=any_of(kind), on_demand=st.booleans(), asks=ASKS, **LIMITS)
    def holds(made: Any, on_demand: bool, **more: Any) -> None:
        policy, order = as_pair(made, on_demand)
        serve_within_limits(policy, order, **more)

    holds()
    if issubclass(kind, Order):
        test_orders.test_orders_never_read_how_long_an_answer_may_be(kind)


# an iteration per second; A runs when the others come; LATE finds two blocks of WARM's prompt
WARM, COLD, LATE = Ask(0.0, 9, 3, content=1), Ask(0.1, 5), Ask(0.2, 9, content=1)
SESSIONS = [replace(WARM, user="u"), COLD, replace(LATE, user="u"), replace(LATE, user="u")]
CHUNKS = [Ask(0.0, tokens=5), Ask(0.5, 3), Ask(2.5, 5)]
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
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "asks", "limits", "batches"), EXAMPLES)
def test_a_proposal_serves_its_worked_example(
    name: str, settings: dict[str, Any], asks: list[Ask], limits: dict[str, Any], batches: str
) -> None:
    policy, order = as_pair(KINDS[name](**settings), on_demand=False)
    served = run(policy, asks, order=order, **({"max_batch_size": 1} | limits))
    assert " ".join(served.batches) == batches


@pytest.mark.parametrize("name", ["residual_sjf", "cache_affinity", "session_affinity"])
def test_none_starves_that_a_proposal_promises_not_to_starve(name: str) -> None:
    """Others are preferred, and come twice as fast as they are served."""
    others = [Ask(0.2 + i / 2, prompt=9, content=1, user="u") for i in range(100)]
    asks = [replace(WARM, user="u"), Ask(0.1, prompt=50), *others]
    [bound] = [each.name for each in fields(KINDS[name]) if each.name.endswith("max_wait_s")]
    served = run(Dynamic(), asks, order=KINDS[name](**{bound: 20.0}), max_batch_size=1)
    assert served.admitted_at[1] == 21.0
