"""A user's policy or order: served, compared, held to the contract, harmless if it fails."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from client.calls import get, post
from scheduling import user_policies
from scheduling.policies import Dynamic
from server.observers.recording import VERSION
from simulate.replay import ReplayError, replay
from tests.counts import nightly
from tests.programs import output, ran
from tests.scheduling.test_failing_policies import FAULTS
from tests.servers import ROOT, started

PAGE = (ROOT / "docs" / "your_policy.md").read_text()
MINE = "".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))


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


@pytest.mark.usefixtures("undrawn")
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
    words = (
        "-m tests.programs simulate --variant bunches=mine.py:Bunches --numsamples 30 --out out "
    )
    words += "--variant short='dynamic --order mine.py:ShortPromptsFirst --patience 0' "
    words += "--variant spared='dynamic --kv-reservation demand --victim mine.py:Spared'"
    done = python(words, mine.parent)
    assert done.returncode == 0, done.stderr
    assert json.loads((mine.parent / "out" / "bunches.json").read_text())["largest_batch"] == 2
    refused = ran("simulate.saved_page", str(mine.parent / "out"))
    assert refused.returncode == 1
    assert "mine.py:Bunches is not loaded; set EB_MODE=mine.py:Bunches" in refused.stderr
    report = (mine.parent / "out" / "report.md").read_text()
    for name in ("Bunches", "ShortPromptsFirst", "Spared"):
        assert re.search(rf"mine\.py:{name} of SHA-256 [0-9a-f]{{10}}", report)


def test_it_imports_files_beside_it_which_hide_none_of_ours(mine: Path) -> None:
    """They were found in the current folder alone, and before ours there; a server found none."""
    (mine.parent / "beside.py").write_text("ROWS = 2")
    (mine.parent / "stats.py").write_text("raise SystemExit('theirs')")
    mine.write_text(f"from beside import ROWS\n{MINE}")
    with started(mode=f"{mine}:Bunches") as (url, _):
        assert get(url)["mode"] == f"{mine}:Bunches"


def test_a_path_may_have_a_space_or_begin_at_home(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """./test.sh --policy "my dir/mine.py:Bunches" said that there was no dir/mine.py."""
    (folder := mine.parent / "my dir").mkdir()
    mine.rename(folder / "mine.py")
    monkeypatch.chdir(mine.parent)
    monkeypatch.setenv("HOME", str(folder))
    for table in ("SOURCES", "PROBLEMS"):
        monkeypatch.setattr(user_policies, table, {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    held = user_policies.words(["--policy", "my dir/mine.py:Bunches"], {})
    home = user_policies.words(["--variant", "x=~/mine.py:Bunches"], {"EB_ORDER": "fcfs"})
    assert (held, home) == (["my dir/mine.py:Bunches"], ["~/mine.py:Bunches"])
    for named in (held, home):
        user_policies.load(named, {}, modes := {"dynamic": Dynamic}, {}, {})
        assert named[0] in modes and user_policies.problem(named[0]) is None
    assert "must have no space" in str(user_policies.problem("my dir/other.py:Bunches"))


@pytest.mark.parametrize("of", ["mode", "order", "victim"])
def test_a_recording_of_a_file_that_is_not_loaded_says_how_to_load_it(of: str) -> None:
    fix = "line 1: gone.py:Rule is not loaded; set EB_MODE=gone.py:Rule in the environment"
    with pytest.raises(ReplayError, match=fix):
        replay([json.dumps({"recording": VERSION, "settings": {of: "gone.py:Rule"}})])


@pytest.mark.nightly
def test_it_is_held_to_the_contract(mine: Path) -> None:
    done = python("-m tests.contract --policy mine.py", mine.parent)
    assert done.returncode == 0 and done.stdout in PAGE, done.stdout


@pytest.mark.parametrize(("name", "sentence"), [
    ("Impossible", "is impossible: no inference has two rows\n"),
    nightly("Leaves", "faults.py:Leaves failed: SystemExit: 0 (faults.py, line"),
])  # fmt: skip
def test_the_contract_says_what_is_violated_with_the_smallest_schedule(
    name: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "faults.py").write_text(FAULTS)
    done = python(f"-m tests.contract --policy faults.py:{name}", tmp_path)
    assert done.returncode == 1 and done.stdout.count("  request ") == 1
    assert sentence in done.stdout
    assert f"the smallest schedule found: {name}(" in done.stdout


@pytest.mark.parametrize(("choice", "sentence"), [
    nightly("None", "chose None; it returns one of the rows"),
    ("rows[next(turns) % 2 - 1]", "asked twice about the same rows, it chooses two of them"),
])  # fmt: skip
def test_a_victim_is_one_of_the_rows_and_always_the_same(
    choice: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "taken.py").write_text(
        "import itertools\nfrom scheduling.policies.base import Victim\n"
        "turns = itertools.count()\nclass Any(Victim):\n    def choose(self, rows, view):\n"
        f"        return {choice}\n"
    )
    done = python("-m tests.contract --policy taken.py", tmp_path)
    assert done.returncode == 1 and sentence in done.stdout


@pytest.mark.parametrize(("word", "sentence"), [
    ("none.py:A", "there is no file "),
    ("mine.py:Missing", "named Missing; it has .*mine.py:ShortPromptsFirst, .*mine.py:Bunches"),
    ("raises.py:A", "ValueError: no luck \\(raises.py, line 1\\)"),
    ("leaves.py:A", "SystemExit: 0 \\(leaves.py, line 1\\)"),
    ("stops.py:A", "KeyboardInterrupt \\(stops.py, line 1\\)"),
    ("odd.py:A --odd 2", "ValueError: odd is even \\(odd.py, line 6\\)"),
    ("bare.py:A", "write its field k as setting\\(default, 'what it means'\\)"),
    ("taken.py:A", "its field victim is a setting already; give it another name"),
    ("'my dir/mine.py:A'", "no space, .* in its folder, as mine.py:A"),
])  # fmt: skip
def test_a_file_that_cannot_be_used_is_a_sentence(word: str, sentence: str, mine: Path) -> None:
    order = "from scheduling.policies.orders import Order, setting\nclass A(Order):\n    "
    for name, text in {
        "raises": "raise ValueError('no luck')",
        "leaves": "raise SystemExit(0)",
        "stops": "raise KeyboardInterrupt",
        "odd": f"{order}odd: int = setting(1, 'x')\n    def __post_init__(self):\n"
        "        if self.odd % 2 == 0:\n            raise ValueError('odd is even')",
        "bare": f"{order}k: int = 3",
        "taken": f"{order}victim: str = setting('x', 'y')",
    }.items():
        (mine.parent / f"{name}.py").write_text(text)
    refused = python(f"-m server.launch dynamic --order {word}", mine.parent)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    said = f"error: {word.split(' --')[0]} cannot be used: .*{sentence}"
    assert re.search(said, refused.stderr), refused.stderr


LEAVING = """
import os
from scheduling.history import Memory
from scheduling.policies.dynamic import Dynamic
class Leaves(Dynamic):
    def plan(self, view):
        raise SystemExit(0)
class Interrupts(Dynamic):
    def plan(self, view):
        raise KeyboardInterrupt
class Vanishes(Dynamic):
    def plan(self, view):
        os._exit(0)
class Counts(Memory):
    def add(self, done):
        raise SystemExit(0)
class Remembers(Dynamic):
    remembers = (Counts,)
"""


@pytest.mark.parametrize(("name", "jobs", "sentence"), [
    ("Leaves", 1, "leaving.py:Leaves failed: SystemExit: 0 (leaving.py, line 7)"),
    nightly("Remembers", 2, "leaving.py:Remembers failed: SystemExit: 0 (leaving.py, line 16)"),
    nightly("Interrupts", 2,
            "leaving.py:Interrupts failed: KeyboardInterrupt (leaving.py, line 10)"),
    ("Vanishes", 2, "a process of --jobs ended at once, by os._exit in leaving.py:Vanishes or for"),
])  # fmt: skip
def test_one_that_leaves_ends_no_comparison_in_silence(
    name: str, jobs: int, sentence: str, tmp_path: Path
) -> None:
    """It ended with exit code 0, without a word and without what another variant had done."""
    (tmp_path / "leaving.py").write_text(LEAVING)
    words = f"--modes static,leaving.py:{name} --numsamples 9 --arrival burst --jobs {jobs}"
    done = python(f"-m tests.programs simulate {words} --out out", tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"error: {sentence}" in done.stderr
    kept = (tmp_path / "out" / "static.json").exists()
    assert kept or name == "Vanishes", "beside which it may not have ended"
