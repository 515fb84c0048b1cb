"""A policy or an order in a user's own file: served, compared, held to the contract, and harmless
when it fails.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from batching import BatchingManager
from client.calls import get, post
from generate.fake import FakeGenerator
from scheduling.errors import EngineFailed
from scheduling.inference import Inference
from scheduling.policies import Dynamic, Order, own
from tests.servers import PATIENCE_S, ROOT, started
from tests.virtual import make_scheduler

PAGE = (ROOT / "docs" / "your_policy.md").read_text()
MINE = "".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
FAULTS = """
from scheduling.policies.base import Plan
from scheduling.policies.dynamic import Dynamic
from scheduling.policies.orders import Order

class Raises(Dynamic):
    def plan(self, view):
        return 1 / 0 if view.processed > 4 else super().plan(view)

class Loops(Dynamic):
    def plan(self, view):
        while view.processed > 4:
            pass
        return super().plan(view)

class NoPlan(Dynamic):
    def plan(self, view):
        return super().plan(view) if view.processed < 4 else None

class Impossible(Dynamic):
    def plan(self, view):
        plan = super().plan(view)
        return plan if view.processed < 4 else Plan(run=plan.run * 2)

class NoKey(Order):
    def key(self, inference):
        return inference.prompt_ids[5]

class LongKey(Order):
    def key(self, inference):
        while len(inference.prompt_ids) < 6:
            pass
        return 0
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
    shown = python(f"{ROOT}/launch.py mine.py:Bunches --help", mine.parent).stdout
    assert "--bunch-size X" in shown and "mine.py:Bunches: rows in a batch at most" in shown
    refused = python(f"{ROOT}/launch.py mine.py:Bunches --bunch-size 0", mine.parent)
    assert refused.returncode == 2 and "--bunch-size '0'" in refused.stderr
    with started("--bunch-size", "3", mode=f"{mine}:Bunches") as (url, _):
        assert get(url)["config"]["bunch_size"] == 3
        group = {"prompt": ["a", "b", "c"], "num_tokens": 4}
        assert len(post(f"{url}/inference", group)["completion"]) == 3
        assert get(f"{url}/stats")["batches_formed"] == {"bunch": 1}


def test_it_is_compared_and_the_report_names_the_files_hash(mine: Path) -> None:
    done = python(
        "-m simulate --variant bunches=mine.py:Bunches --numsamples 30 --out out "
        "--variant short='dynamic --order mine.py:ShortPromptsFirst --patience 0'",
        mine.parent,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((mine.parent / "out" / "bunches.json").read_text())["largest_batch"] == 2
    report = (mine.parent / "out" / "report.md").read_text()
    for name in ("Bunches", "ShortPromptsFirst"):
        assert re.search(rf"mine\.py:{name} of SHA-256 [0-9a-f]{{10}}", report)


@pytest.mark.nightly
def test_it_is_held_to_the_contract(mine: Path) -> None:
    done = python("-m tests.contract --policy mine.py", mine.parent)
    assert done.returncode == 0 and done.stdout in PAGE, done.stdout


def test_the_contract_says_what_is_violated_with_the_smallest_schedule(tmp_path: Path) -> None:
    (tmp_path / "faults.py").write_text(FAULTS)
    done = python("-m tests.contract --policy faults.py:Impossible", tmp_path)
    assert done.returncode == 1
    assert "is impossible: no inference has two rows\n" in done.stdout
    assert "the smallest schedule found: Impossible(" in done.stdout
    assert done.stdout.count("  request ") == 1


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("none.py:A", "there is no file "),
        ("mine.py:Missing", "named Missing; it has .*mine.py:ShortPromptsFirst, .*mine.py:Bunches"),
        ("raises.py:A", "ValueError: no luck \\(raises.py, line 1\\)"),
        ("bare.py:A", "write its field k as setting\\(default, 'what it means'\\)"),
        ("taken.py:A", "its field victim is a setting already; give it another name"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_sentence(word: str, sentence: str, mine: Path) -> None:
    order = "from scheduling.policies.orders import Order, setting\nclass A(Order):\n    "
    for name, text in {
        "raises": "raise ValueError('no luck')",
        "bare": f"{order}k: int = 3",
        "taken": f"{order}victim: str = setting('x', 'y')",
    }.items():
        (mine.parent / f"{name}.py").write_text(text)
    refused = python(f"{ROOT}/launch.py dynamic --order {word}", mine.parent)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert re.search(f"error: {word} cannot be used: .*{sentence}", refused.stderr)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Raises", r"Raises failed: ZeroDivisionError: division by zero \(faults.py, line 8\)"),
        ("Loops", r"Loops failed: TooSlow: it took longer than 1 s"),
        ("LongKey", r"LongKey failed: TooSlow: it took longer than 1 s"),
        ("NoPlan", r"NoPlan failed: TypeError: plan returned None, which is no Plan"),
        ("Impossible", r"Impossible failed: ValueError: .* no inference has two rows"),
        ("NoKey", r"NoKey failed: IndexError: list index out of range"),
    ],
)
def test_one_that_fails_hurts_no_request_in_flight(
    name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(own.HANDED_ON, "{}")
    path = tmp_path / "faults.py"
    path.write_text(FAULTS)
    tables: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    own.load([f"{path}:{name}"], *tables)
    [kind] = [*tables[0].values(), *tables[1].values()]
    is_order = issubclass(kind, Order)
    scheduler = make_scheduler(Dynamic(), order=kind()) if is_order else make_scheduler(kind())
    ended = threading.Event()
    manager = BatchingManager(scheduler, FakeGenerator)
    manager.on_failure(lambda error: ended.set())
    first = [Inference([1] * 6, 4), Inference([2] * 7, 6)]
    later = Inference([3], 2)
    manager.enqueue(first)
    for inference in first:
        assert inference.done.wait(PATIENCE_S) and inference.error is None
        assert len(inference.tokens) == inference.num_tokens
    with pytest.raises(EngineFailed, match=sentence):
        manager.enqueue([later])
    assert ended.wait(PATIENCE_S)
    assert name in (manager.not_ready_because() or "")
    manager.close()
    del own.SOURCES[kind]
