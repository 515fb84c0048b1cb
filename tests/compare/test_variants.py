"""A comparison of variants: modes with settings of their own, under names, against a baseline."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from compare.options import Options, parse
from compare.variants import Variant
from config import ConfigError
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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "--variant base=dynamic --modes static",
            "--modes and --variant both say what is compared",
        ),
        ("--variant dynamic", "give NAME='MODE --setting …'"),
        ("--variant a=", "give NAME='MODE --setting …'"),
        ("--variant 'a b=dynamic'", "give NAME='MODE --setting …'"),
        (
            "--variant a=dynamo",
            r"--variant 'a=dynamo': unknown mode 'dynamo' \(did you mean dynamic\?\)",
        ),
        (
            "--variant a='dynamic --batch-size-target 4'",
            "--batch-size-target has no meaning in mode dynamic",
        ),
        ("--variant a='dynamic --nope 4'", "unknown flag --nope"),
        ("""--variant "a=dynamic 'x" """, "No closing quotation"),
        ("--variant a='dynamic --port 1'", "every variant gets a free port"),
        ("--variant a='dynamic --seed 1'", "unknown flag --seed"),
        ("--variant static=dynamic", "static is taken"),
        ("--variant base=dynamic --variant base=dynamic", "base is taken"),
        ("--variant base=dynamic --also base=http://h", "base is taken"),
        (
            "--variant base=dynamic --baseline other",
            "--baseline 'other' is not compared; name one of base",
        ),
        (
            " ".join(f"--variant v{i}=dynamic" for i in range(13)),
            "13 are compared, and at most 12",
        ),
    ],
)
def test_a_bad_variant_is_refused_before_any_server_starts(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parsed(words)


@pytest.mark.usefixtures("undrawn")
def test_variants_of_a_mode_stand_side_by_side(tmp_path: Path) -> None:
    done = ran(
        "simulate",
        *shlex.split(
            "--model fake --numsamples 30 --lengths choice:3,9 --variant "
            "wide='dynamic --max-batch-size 8' --variant narrow='dynamic --max-batch-size 2' "
            "--variant static=static --baseline narrow --repeats 2 --arrival burst "
            f"--out {tmp_path}"
        ),
    )
    assert done.returncode == 0, done.stderr
    first = tmp_path / "seed-0"
    names = ["wide", "narrow", "static"]
    assert {path.stem for path in first.glob("*.json")} == {*names, "summary"}
    wide, narrow = (json.loads((first / f"{name}.json").read_text()) for name in names[:2])
    assert narrow["variant"] == "narrow" and narrow["config"]["mode"] == "dynamic"
    assert narrow["config"]["max_batch_size"] == narrow["largest_batch"] == 2
    assert wide["largest_batch"] > 2
    assert list(json.loads((first / "summary.json").read_text())["variants"]) == names
    report = (tmp_path / "report.md").read_text()
    assert "| wide − narrow |" in report and "| static − narrow |" in report
    assert "| static − wide |" not in report
    assert "- narrow: dynamic, max_batch_size 2" in report
    assert "max_batch_size" not in report.split("settings: ")[1].split("\n")[0]


FOUND = "prompt tokens found cached"


@pytest.mark.usefixtures("undrawn")
def test_what_a_prefix_cache_found_stands_in_the_report_where_there_is_one(tmp_path: Path) -> None:
    words = "--model fake --prefixes 4:64:1 --numsamples 30 --arrival poisson:200 --lengths fixed:4"
    plain, both = f"{words} --variant plain=dynamic", tmp_path / "both"
    cached = f"{plain} --variant cached='dynamic --prefix-caching' --out {both}"
    done = ran("simulate", *shlex.split(cached))
    assert done.returncode == 0, done.stderr
    saved = json.loads((both / "summary.json").read_text())["variants"]
    found = saved["cached"]["cached_tokens"]
    assert saved["plain"]["cached_tokens"] == 0 < found and found % 16 == 0
    text = (both / "report.md").read_text()
    assert f"| {FOUND} | {FOUND}, % |" in text
    share = f"{100 * saved['cached']['cached_fraction']:.0f}"
    assert re.search(r"\| plain \|.*\| 0 \| 0 \|", text)
    assert re.search(rf"\| cached \|.*\| {found:,} \| {share} \|", text)
    assert "plain: dynamic, prefix_caching False" in text, "and which is which"
    done = ran("simulate", *plain.split(), "--out", str(tmp_path / "one"))
    assert done.returncode == 0, done.stderr
    assert FOUND not in (tmp_path / "one" / "report.md").read_text().split("## Definitions")[0]
