"""Every result can be made again: it names a commit of this repository, and a command."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from lab.again import ENDING, beside, made
from tests.servers import ROOT

# of other tools, whose commands results/README.md has
OF_OTHERS = ("aiperf/profile_export_aiperf", "guidellm/benchmarks", "vllm/vllm")
FILES = [
    file
    for file in (ROOT / "results").rglob("*")
    if file.name.endswith((".md", ".json", ".json.gz")) and "seed-" not in str(file)
    if file.parent.name != "client" or file.stem == "summary"  # a run's variants
]
NAMES = {ENDING.sub("", str(file.relative_to(ROOT))) for file in FILES} - {
    "results/README",
    "results/load_generators/report",
    *(f"results/load_generators/{name}" for name in OF_OTHERS),
}
RESULTS = sorted({name.removesuffix("/summary").removesuffix("/report") for name in NAMES})


@pytest.mark.skipif(
    not (ROOT / ".git").exists() or (ROOT / ".git" / "shallow").exists(),
    reason="the whole history is not here",
)
def test_every_result_names_a_command_and_a_commit_of_the_history() -> None:
    listed = ["git", "rev-list", "HEAD"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    history = done.stdout.split()
    commits = {name: made(name).commit for name in RESULTS}
    assert not {
        name: commit
        for name, commit in commits.items()
        if not any(full.startswith(commit) for full in history)
    }


def test_a_folder_of_several_results_names_them() -> None:
    with pytest.raises(LookupError, match=r"has 2 results; name one of \['memory', 'prefixes'\]"):
        made("results/memory")


def test_a_folder_without_numbers_is_known_by_its_page() -> None:
    assert made("results/demo-model") == made("results/demo-model/evaluation")


def test_numbers_stand_beside_each_other_those_of_seeds_as_means(tmp_path: Path) -> None:
    for name, seeds in (("old", (1.0, 3.0)), ("new", (2.0, 4.0))):
        result = {"n": 7, "date": name, "cases": [{"seeds": [{"s": s} for s in seeds]}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    equal, changed = beside(tmp_path / "old.json", tmp_path / "new.json")
    assert equal == "1 of 2 numbers are equal"
    assert changed.split() == ["2", "3", "1.500", "/cases/0/seeds/*/s"]
