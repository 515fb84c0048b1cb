"""A comparison of variants: modes with settings of their own, under names, against a baseline."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from compare.options import Options, parse
from compare.variants import Variant
from tests.programs import ran


def parsed(words: str) -> Options:
    return parse(shlex.split(words))


def test_a_variants_own_settings_win_over_those_of_all() -> None:
    options = parsed(
        "--variant base=dynamic --variant small='dynamic --token-budget 32' --variant "
        "slow='windowed --max-batch-delay-ms 50' --model fake --token-budget 64 --compact-batches"
    )
    assert options.names == ["base", "small", "slow"]
    assert options.baseline == "base" == options.reference
    assert [options.config(name).token_budget for name in options.names] == [64, 32, 64]
    slow = options.config("slow")
    assert slow.max_batch_delay_ms == 50 and slow.compact_batches
    assert options.variants["small"] == Variant("dynamic", {"token_budget": "32"})


@pytest.mark.parametrize(
    ("words", "reference"),
    [
        ("", "dynamic"),
        ("--modes static,dynamic", "dynamic"),
        ("--modes static,windowed --baseline windowed", "windowed"),
        ("--variant a='dynamic --token-budget 32' --variant b=dynamic", "b"),
        ("--variant a='dynamic --token-budget 32'", "a"),
        ("--modes static --also vllm=http://h --baseline vllm", "static"),
    ],
)
def test_auto_arrivals_go_by_a_plain_dynamic_and_else_by_the_baseline(
    words: str, reference: str
) -> None:
    assert parsed(words).reference == reference


@pytest.mark.usefixtures("undrawn")
def test_variants_of_a_mode_stand_side_by_side(tmp_path: Path) -> None:
    words = "--model fake --numsamples 30 --lengths choice:3,9 --repeats 2 --arrival burst "
    words += "--variant wide='dynamic --max-batch-size 8' --variant static=static "
    words += "--variant narrow='dynamic --max-batch-size 2' --baseline narrow"
    done = ran("simulate", *shlex.split(words), "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    first = tmp_path / "seed-0"
    names = ["wide", "static", "narrow"]
    assert {path.stem for path in first.glob("*.json")} == {*names, "summary"}
    wide, _, narrow = (json.loads((first / f"{name}.json").read_text()) for name in names)
    assert narrow["variant"] == "narrow" and narrow["config"]["mode"] == "dynamic"
    assert narrow["config"]["max_batch_size"] == narrow["largest_batch"] == 2
    assert wide["largest_batch"] > 2
    assert list(json.loads((first / "summary.json").read_text())["variants"]) == names
    report = (tmp_path / "report.md").read_text()
    assert "| wide − narrow |" in report and "| static − narrow |" in report
    assert "| static − wide |" not in report
    assert "- narrow: dynamic, max_batch_size 2" in report
    assert "max_batch_size" not in report.split("settings: ")[1].split("\n")[0]
