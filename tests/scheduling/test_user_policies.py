"""A user's own policy or order: served, compared, held to the contract, harmless if it fails."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.calls import get, post
from scheduling.policies import Dynamic, Fcfs, Order, Policy
from tests.contract import ASKS, LIMITS, serve_within_limits
from tests.counts import examples
from tests.programs import output, ran
from tests.scheduling import test_orders
from tests.scheduling.test_texts import DEMAND
from tests.servers import ROOT, started
from tests.virtual import Ask, any_of, run

PAGE = (ROOT / "docs" / "your_policy.md").read_text()
MINE = "".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
IMPOSSIBLE = """
from scheduling.policies.base import Plan
from scheduling.policies.dynamic import Dynamic

class Impossible(Dynamic):
    def plan(self, view):
        plan = super().plan(view)
        return plan if view.processed < 4 else Plan(admit=plan.admit, run=plan.run * 2)
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The file that docs/your_policy.md writes."""
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def python(arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *shlex.split(arguments)]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )


def test_it_is_served_and_its_fields_are_flags(mine: Path) -> None:
    shown = python("-m server.launch mine.py:Bunches --help all", mine.parent).stdout
    assert "--bunch-size X" in shown and "mine.py:Bunches: rows in a batch at most" in shown
    refused = python("-m server.launch mine.py:Bunches --bunch-size 0", mine.parent)
    assert refused.returncode == 2 and "--bunch-size '0'" in refused.stderr
    with started("--bunch-size", "3", mode=f"{mine}:Bunches") as (url, _):
        assert get(url)["config"]["bunch_size"] == 3
        group = {"prompt": ["a", "b", "c"], "num_tokens": 4}
        assert len(post(f"{url}/inference", group)["completion"]) == 3
        assert get(f"{url}/stats")["batches_formed"] == {"bunch": 1}
        out = mine.parent / "out"
        words = f"--url {url} --numsamples 4 --arrival burst --quiet --out {out}"
        output("client.client", f"{words} --figure {mine.parent}/figure.png")
    # the client, which has not loaded the file, refused this server
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary["variants"]) == ["Bunches"] and summary["config"]["bunch_size"] == 3
    assert summary["config"]["model"] == "fake", "settings of every mode are shown, too"


def test_it_is_compared_and_the_report_names_the_files_hash(mine: Path) -> None:
    words = "-m simulate --variant bunches=mine.py:Bunches --numsamples 30 --out out "
    words += "--variant short='dynamic --order mine.py:ShortPromptsFirst --patience 0'"
    done = python(words, mine.parent)
    assert done.returncode == 0, done.stderr
    assert json.loads((mine.parent / "out" / "bunches.json").read_text())["largest_batch"] == 2
    refused = ran("simulate.saved_page", str(mine.parent / "out"))
    assert refused.returncode == 1
    assert "mine.py:Bunches is not loaded; set EB_MODE=mine.py:Bunches" in refused.stderr
    report = (mine.parent / "out" / "report.md").read_text()
    for name in ("Bunches", "ShortPromptsFirst"):
        assert re.search(rf"mine\.py:{name} of SHA-256 [0-9a-f]{{10}}", report)


@pytest.mark.nightly
def test_it_is_held_to_the_contract(mine: Path) -> None:
    done = python("-m tests.contract --policy mine.py", mine.parent)
    assert done.returncode == 0 and done.stdout in PAGE, done.stdout


def test_the_contract_says_what_is_violated_with_the_smallest_schedule(tmp_path: Path) -> None:
    (tmp_path / "faults.py").write_text(IMPOSSIBLE)
    done = python("-m tests.contract --policy faults.py:Impossible", tmp_path)
    assert done.returncode == 1 and done.stdout.count("  request ") == 1
    assert "is impossible: no inference has two rows\n" in done.stdout
    assert "the smallest schedule found: Impossible(" in done.stdout


@pytest.mark.parametrize(("word", "sentence"), [
    ("none.py:A", "there is no file "),
    ("mine.py:Missing", "named Missing; it has .*mine.py:ShortPromptsFirst, .*mine.py:Bunches"),
    ("raises.py:A", "ValueError: no luck \\(raises.py, line 1\\)"),
    ("bare.py:A", "write its field k as setting\\(default, 'what it means'\\)"),
    ("taken.py:A", "its field victim is a setting already; give it another name"),
])  # fmt: skip
def test_a_file_that_cannot_be_used_is_a_sentence(word: str, sentence: str, mine: Path) -> None:
    order = "from scheduling.policies.orders import Order, setting\nclass A(Order):\n    "
    for name, text in {
        "raises": "raise ValueError('no luck')",
        "bare": f"{order}k: int = 3",
        "taken": f"{order}victim: str = setting('x', 'y')",
    }.items():
        (mine.parent / f"{name}.py").write_text(text)
    refused = python(f"-m server.launch dynamic --order {word}", mine.parent)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert re.search(f"error: {word} cannot be used: .*{sentence}", refused.stderr)


# ---- the proposals of proposals/: the contract of policies, and an example that shows each rule

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


# an iteration a second; A runs when the others come; LATE finds two blocks of WARM's prompt
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
