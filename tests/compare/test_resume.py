"""A run that was stopped goes on: what is there stays, what is missing is measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from client import runs
from client.load import Interrupted
from compare.measuring import Measured, Measuring
from simulate.server import SimulatedServer
from tests.programs import output, ran
from tests.servers import ROOT

WORDS = "--modes static,dynamic --numsamples 30 --lengths choice:3,9 --repeats 2 --jobs 1"
ALL = [(0, "static"), (0, "dynamic"), (1, "dynamic"), (1, "static")]
pytestmark = pytest.mark.usefixtures("undrawn")


def measuring(n: int) -> Any:
    """A patch by which Ctrl-C comes during the n-th measurement; its mock has all calls."""
    really, calls = Measuring.measured, []

    def measured(self: Measuring, seed: int, name: str) -> Measured:
        calls.append((seed, name))
        if len(calls) < n:
            return really(self, seed, name)
        with mock.patch.object(SimulatedServer, "replay", side_effect=Interrupted([])):
            return really(self, seed, name)

    return mock.patch.object(Measuring, "measured", autospec=True, side_effect=measured)


def stopped(n: int, words: str, *more: str) -> list[tuple[int, str]]:
    """Run simulate.sh with Ctrl-C during the n-th measurement; return those that began."""
    with measuring(n) as patched:
        done = ran("simulate", *words.split(), *more)
    assert done.returncode == 130 and "--resume" in done.stderr, done.stderr
    return [call.args[1:] for call in patched.call_args_list]


def numbers(run: Path) -> list[Any]:
    """Every request and headline of a run, of all seeds."""
    loaded = runs.load(run)
    assert not loaded.partial
    return [loaded.results, [summary["variants"] for summary in loaded.summaries]]


def test_a_run_that_was_stopped_twice_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    output("simulate", f"{WORDS} --out {whole}")
    assert stopped(2, WORDS, "--out", str(run)) == ALL[:2]
    rate = json.loads((run / "seed-0" / "summary.json").read_text())["workload"]["arrival"]
    assert stopped(3, f"--resume {run}") == ALL[1:], "the one that was partial is measured anew"
    (run / "seed-0" / "dynamic.json").write_text("{")  # as of a machine that failed
    with measuring(99) as patched:
        shown = output("simulate", f"--resume {run}")
    assert [call.args[1:] for call in patched.call_args_list] == [ALL[1], ALL[3]]
    assert "missing: 2 of 4 measurements" in shown
    assert "capacity of" not in shown, "the rate is the one that was measured first"
    assert json.loads((run / "seed-1" / "summary.json").read_text())["workload"]["arrival"] == rate
    assert numbers(run) == numbers(whole)
    saved = [(run / f"seed-{seed}" / "summary.json").stat().st_mtime_ns for seed in range(2)]
    assert "missing: 0 of 4 measurements" in output("simulate", f"--resume {run}")
    again = [(run / f"seed-{seed}" / "summary.json").stat().st_mtime_ns for seed in range(2)]
    assert saved == again, "nothing that is there is written anew"


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "half"
    stopped(4, WORDS, "--out", str(run))
    return run


def edited(key: str, value: Any) -> Any:
    def edit(run: Path) -> None:
        path = run / "seed-0" / "summary.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    return edit


def with_another_trace(run: Path) -> None:
    path = run / "seed-1" / "trace.jsonl"
    path.write_text(path.read_text().replace('"num_tokens":3', '"num_tokens":4'))


@pytest.mark.parametrize(("words", "edit", "sentence"), [
    ("--max-batch-size 4", None, "with the run's own flags; leave out --max-batch-size"),
    ("", edited("commit", "0123456789"), "was measured with commit 0123456789, and here it is"),
    ("", edited("command", "client/client.py --numsamples 3"), "is a run of client/client.py"),
    ("", with_another_trace, "seed-1/trace.jsonl is not what the run's flags replay now"),
    ("", edited("command", "./simulate.sh --api-key …"), "had a key, which is never saved"),
    ("", shutil.rmtree, "holds no run"),
])  # fmt: skip
def test_a_run_does_not_go_on_with_other_settings(
    words: str, edit: Any, sentence: str, half: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(half, run)
    if edit:
        edit(run)
    done = ran("simulate", *words.split(), "--resume", str(run))
    assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1


def test_costs_of_one_name_must_be_the_same(tmp_path: Path) -> None:
    """A file of one's own may be measured again between the two."""
    (costs := tmp_path / "own.json").write_bytes((ROOT / "results/costs/demo.json").read_bytes())
    stopped(2, f"{WORDS} --costs {costs} --out {tmp_path / 'run'}")
    file = json.loads(costs.read_text())
    costs.write_text(json.dumps(file | {"gap": 2 * file["gap"]}))
    done = ran("simulate", "--resume", str(tmp_path / "run"))
    assert done.returncode == 2 and "costs-sha256" in done.stderr
    costs.write_text(json.dumps(file))
    output("simulate", f"--resume {tmp_path / 'run'}")


def test_a_server_that_ended_before_it_was_asked_is_measured_again(
    half: Path, tmp_path: Path
) -> None:
    shutil.copytree(half, run := tmp_path / "run")
    [path] = [*(run / "seed-0").glob("static.json")]
    result = json.loads(path.read_text())
    del result["server"], result["config"]
    path.write_text(json.dumps(result))
    output("simulate", f"--resume {run}")
    assert json.loads(path.read_text())["config"]


def test_variables_count_as_settings(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EB_MAX_BATCH_SIZE", "16")
    done = ran("simulate", "--resume", str(half))
    assert done.returncode == 2
    assert "was measured with max-batch-size 32, and here it is 16" in done.stderr
