"""Results over earlier ones: refused with a sentence, unless --overwrite says that it is meant."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from shlex import split
from unittest import mock

import pytest

from compare.options import new_folder
from tests.programs import output, ran
from tests.stub import stub

TOOLS = "results/load_generators"  # from the root, where programs run
SIMULATE = "--numsamples 3 --modes dynamic --out"
FIND = "--find replicas=1 --arrival poisson:3 --numsamples 30 --slo ttft:9e3 --repeats 2 --out"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(module: str, words: str, folder: Path, there: str) -> None:
    """Try a program that would write over a file; nothing may change."""
    before = contents(folder)
    done = ran(module, *split(words))
    assert done.returncode in (1, 2), done.stdout + done.stderr
    sentence = "is there already; name another, or add --overwrite"
    assert re.search(f"{re.escape(there)}.* {sentence}", done.stderr)
    assert contents(folder) == before


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("module", "words", "written"),
    [
        ("simulate", SIMULATE, "summary.json"),
        ("simulate", FIND, "find.json"),
        ("compare", f"--runs {TOOLS}/vllm {TOOLS}/aiperf --out", "report.md"),
    ],
)
def test_an_earlier_result_is_kept(module: str, words: str, written: str, tmp_path: Path) -> None:
    output(module, f"{words} {tmp_path}")
    refused(module, f"{words} {tmp_path}", tmp_path, f"{tmp_path}/{written}")
    output(module, f"{words} {tmp_path} --overwrite")


@pytest.mark.usefixtures("undrawn")
def test_a_folder_has_one_result(tmp_path: Path) -> None:
    """A run and --find left each other's files where they were."""
    output("simulate", f"{FIND} {tmp_path}")
    output("simulate", f"{SIMULATE} {tmp_path / 'verified'}")  # as with --verify
    (tmp_path / "verified" / "mine").touch()
    refused("simulate", f"{SIMULATE} {tmp_path}", tmp_path, str(tmp_path))
    output("simulate", f"{SIMULATE} {tmp_path} --overwrite")
    assert not [*tmp_path.glob("find.*")]
    assert [*(tmp_path / "verified").iterdir()] == [tmp_path / "verified" / "mine"]
    refused("simulate", f"{FIND} {tmp_path}", tmp_path, str(tmp_path))
    output("simulate", f"{FIND} {tmp_path} --overwrite")
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.usefixtures("undrawn")
def test_runs_beside_each_other_replace_an_earlier_result_and_none_of_them(tmp_path: Path) -> None:
    """`--runs` left an earlier run's files, and wrote its report into one of the runs."""
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        output("simulate", f"{SIMULATE} {folder}")
    before = contents(one)
    words = f"--runs {one} {TOOLS}/vllm --overwrite --out"
    done = ran("compare", *split(f"{words} {one}"))
    assert done.returncode == 2 and f"--out would replace {one}; name another" in done.stderr
    assert contents(one) == before
    output("compare", f"{words} {two}")
    assert not (two / "summary.json").exists() and (two / "report.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_nobody_s_file_is_lost_for_one_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text("mine")
    words = f"--numsamples 3 --variant package=dynamic --out {tmp_path}"
    refused("simulate", words, tmp_path, f"{tmp_path}/package.json")
    seeds = tmp_path / "seeds"
    output("simulate", f"{SIMULATE} {seeds} --repeats 2")  # has no summary.json of its own
    refused("simulate", f"{SIMULATE} {seeds}", seeds, str(seeds / "seed-"))


@pytest.mark.usefixtures("undrawn")
def test_a_load_writes_over_nothing(tmp_path: Path) -> None:
    """`client.py --out` over an earlier run deleted it."""
    run, figure = tmp_path / "run", tmp_path / "figure.png"
    with stub() as server:
        load = f"--url {server.url} --api openai --numsamples 2 --arrival burst --quiet"
        output("client.client", f"{load} --out {run} --figure {figure}")
        sent = len(server.bodies)
        for words, there in (
            (f"--out {run}", run / "summary.json"),
            (f"--figure {figure}", figure),
        ):
            refused("client.client", f"{load} {words}", tmp_path, str(there))
        assert len(server.bodies) == sent, "nothing was sent"
        output("client.client", f"{load} --out {run} --figure {figure} --overwrite")


@pytest.mark.usefixtures("undrawn")
def test_a_page_of_rows_is_made_anew_in_its_run_and_writes_over_no_other(tmp_path: Path) -> None:
    run, page = tmp_path / "run", tmp_path / "rows.html"
    output("simulate", f"{SIMULATE} {run}")
    for words in (run, f"{run} --out {page}", run):
        output("simulate.saved_page", str(words))
    refused("simulate.saved_page", f"{run} --out {page}", tmp_path, str(page))
    output("simulate.saved_page", f"{run} --out {page} --overwrite")


def test_runs_that_begin_in_one_second_have_a_folder_each() -> None:
    """Of two ./simulate.sh at once one failed, and the other's folder had files of both."""
    with mock.patch("compare.options.datetime") as clock:
        clock.now.side_effect = [datetime(2026, 11, 27, 23, 4, 4, at) for at in (1000, 2000)]
        assert new_folder() != new_folder()


def test_a_checkout_that_cannot_be_written_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --out it was a traceback, PermissionError of runs/."""
    (root := tmp_path / "file").touch()
    monkeypatch.setattr("compare.options.ROOT", root)
    done = ran("simulate", "--numsamples", "3")
    sentence = f"error: {root} is no folder with write access; name another with --out FOLDER\n"
    assert (done.returncode, done.stderr) == (2, sentence)
