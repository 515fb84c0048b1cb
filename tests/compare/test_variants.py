"""A comparison of variants: modes with settings of their own, under names, against a baseline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compare import runs
from compare.options import parse
from compare.report import report
from compare.variants import Variant
from config import ConfigError
from tests.programs import ran

BASE = ["--variant", "base=dynamic"]


def test_a_variants_own_settings_win_over_those_of_all() -> None:
    given = [
        "--variant",
        "small=dynamic --token-budget 32",
        "--variant",
        "slow=windowed --max-batch-delay-ms 50",
    ]
    options = parse([*BASE, *given, "--model", "fake", "--token-budget", "64", "--compact-batches"])
    assert (
        options.names == ["base", "small", "slow"]
        and options.baseline == "base" == options.reference
    )
    assert [options.config(name).token_budget for name in options.names] == [64, 32, 64]
    assert (
        options.config("slow").max_batch_delay_ms == 50 and options.config("slow").compact_batches
    )
    assert options.variants["small"] == Variant("dynamic", {"token_budget": "32"})


def test_auto_arrivals_go_by_a_plain_dynamic_and_else_by_the_baseline() -> None:
    assert (
        parse([]).reference == "dynamic"
        and parse(["--modes", "static,dynamic"]).reference == "dynamic"
    )
    assert parse(["--modes", "static,windowed", "--baseline", "windowed"]).reference == "windowed"
    tuned = ["--variant", "a=dynamic --token-budget 32", "--variant", "b=dynamic"]
    assert parse(tuned).reference == "b" and parse(tuned[:2]).reference == "a"
    assert (
        parse(["--modes", "static", "--also", "vllm=http://h", "--baseline", "vllm"]).reference
        == "static"
    )


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([*BASE, "--modes", "static"], "--modes and --variant both say what is compared"),
        (["--variant", "dynamic"], "give NAME='MODE --setting …'"),
        (["--variant", "a="], "give NAME='MODE --setting …'"),
        (["--variant", "a b=dynamic"], "give NAME='MODE --setting …'"),
        (
            ["--variant", "a=dynamo"],
            r"--variant 'a=dynamo': unknown mode 'dynamo' \(did you mean dynamic\?\)",
        ),
        (
            ["--variant", "a=dynamic --batch-size-target 4"],
            "--batch-size-target has no meaning in mode dynamic",
        ),
        (["--variant", "a=dynamic --nope 4"], "unknown flag --nope"),
        (["--variant", "a=dynamic 'x"], "No closing quotation"),
        (["--variant", "a=dynamic --port 1"], "every variant gets a free port"),
        (["--variant", "a=dynamic --seed 1"], "unknown flag --seed"),
        ([*BASE, "--seed", "-1"], "--seed must be 0 or more"),
        (["--variant", "static=dynamic"], "static is taken"),
        ([*BASE, *BASE], "base is taken"),
        ([*BASE, "--also", "base=http://h"], "base is taken"),
        ([*BASE, "--baseline", "other"], "--baseline 'other' is not compared; name one of base"),
        (
            [word for i in range(13) for word in ("--variant", f"v{i}=dynamic")],
            "13 are compared, and at most 12",
        ),
    ],
)
def test_a_bad_variant_is_refused_before_any_server_starts(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(argv)


@pytest.mark.usefixtures("undrawn")
def test_variants_of_a_mode_stand_side_by_side(tmp_path: Path) -> None:
    done = ran(
        "simulate",
        "--model",
        "fake",
        "--numsamples",
        "30",
        "--lengths",
        "choice:3,9",
        "--variant",
        "wide=dynamic --max-batch-size 8",
        "--variant",
        "narrow=dynamic --max-batch-size 2",
        "--variant",
        "static=static",
        "--baseline",
        "narrow",
        "--repeats",
        "2",
        "--arrival",
        "burst",
        "--out",
        str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    first = tmp_path / "seed-0"
    assert {path.stem for path in first.glob("*.json")} == {"wide", "narrow", "static", "summary"}
    told = json.loads((first / "narrow.json").read_text())
    assert (told["variant"], told["config"]["mode"], told["config"]["max_batch_size"]) == (
        "narrow",
        "dynamic",
        2,
    )
    assert (
        told["largest_batch"] == 2 < json.loads((first / "wide.json").read_text())["largest_batch"]
    )
    summary = json.loads((first / "summary.json").read_text())
    assert list(summary["variants"]) == ["wide", "narrow", "static"]
    report = (tmp_path / "report.md").read_text()
    assert (
        "| wide − narrow |" in report
        and "| static − narrow |" in report
        and "| static − wide |" not in report
    )
    assert (
        "- narrow: dynamic, max_batch_size 2" in report
        and "max_batch_size" not in report.split("settings: ")[1].split("\n")[0]
    )


FOUND = "prompt tokens found cached"


@pytest.mark.usefixtures("undrawn")
def test_what_a_prefix_cache_found_stands_in_the_report_where_there_is_one(tmp_path: Path) -> None:
    asked = ["--model", "fake", "--prefixes", "4:64:1", "--numsamples", "30", "--arrival"]
    asked += ["poisson:200", "--lengths", "fixed:4"]
    plain = ["--variant", "plain=dynamic"]
    cached = ["--variant", "cached=dynamic --prefix-caching"]
    done = ran("simulate", *asked, *plain, *cached, "--out", str(tmp_path / "both"))
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "both" / "summary.json").read_text())["variants"]
    found, computed = saved["cached"]["cached_tokens"], saved["plain"]["cached_tokens"]
    assert computed == 0 < found and found % 16 == 0
    text = (tmp_path / "both" / "report.md").read_text()
    assert f"| {FOUND} | {FOUND}, % |" in text
    share = f"{100 * saved['cached']['cached_fraction']:.0f}"
    for name, cells in (("plain", "| 0 | 0 |"), ("cached", f"| {found:,} | {share} |")):
        rows = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
        assert any(cells in row for row in rows), rows
    assert "plain: dynamic, prefix_caching False" in text, "and which is which"
    done = ran("simulate", *asked, *plain, "--out", str(tmp_path / "one"))
    assert done.returncode == 0, done.stderr
    assert FOUND not in (tmp_path / "one" / "report.md").read_text().split("## Definitions")[0]
    older = tmp_path / "both" / "summary.json"  # of a version that knew no prefix cache
    summary = json.loads(older.read_text())
    for told in summary["variants"].values():
        del told["cached_tokens"], told["cached_fraction"]
    older.write_text(json.dumps(summary))
    text = report.contents(runs.load(tmp_path / "both"))
    assert FOUND not in text.split("## Definitions")[0]
