"""Reports of saved runs: their words, that they can be rebuilt, and need no network."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from client import drawing, runs
from client.machine import send_limit
from client.progress import Progress
from compare import calibrate
from compare.report import figures, report, sections, side_by_side, tables
from stats import ROW_KINDS
from tests.compare.test_pages import Page
from tests.counts import examples
from tests.programs import empty_figures, output, ran

MODES = ["static", "dynamic"]
DRAWN = [name for name in runs.FIGURES if name != "replicas"]  # of a run that has one all the time
REPORT = ["report.md", "report.html", "requests.csv", *(f"{name}.png" for name in DRAWN)]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two modes over two seeds, in virtual time."""
    out = tmp_path_factory.mktemp("runs") / "swept"
    words = f"--model fake --modes {','.join(MODES)} --sweep --seconds 0.5 --repeats 2 --out {out} "
    words += "--lengths choice:30,50 --max-batch-size 2 --numsamples 40 --arrival poisson:50"
    with empty_figures():
        shown = output("simulate", words)
    line = r"static at +[\d.]+ requests/s: .*; sustained"
    assert re.search(line, shown), "plain lines, for this is no terminal"
    # too few to say how they are dispersed
    assert "40 requests, " in shown and "index of dispersion" not in shown
    return out


def test_a_sweep_of_several_seeds_leaves_each_run_and_what_all_say_together(swept: Path) -> None:
    names = {path.name for path in swept.iterdir()}
    assert names == {"seed-0", "seed-1", "summary.json", *REPORT}
    for seed in (0, 1):
        own = json.loads((swept / f"seed-{seed}" / "summary.json").read_text())
        assert own["seed"] == seed and list(own["sweep"]) == MODES and not own["partial"]
        for points in own["sweep"].values():
            rates = [point["rate"] for point in points]
            assert rates == sorted(rates) and len(rates) >= 4
            assert points[-1]["saturated"] and not points[0]["saturated"]
    first, second = ((swept / f"seed-{seed}" / "trace.jsonl").read_text() for seed in (0, 1))
    assert first != second
    together = json.loads((swept / "summary.json").read_text())
    assert together["seeds"] == [0, 1]
    throughput = together["variants"]["static"]["output_throughput"]
    assert throughput["mean"] == pytest.approx(sum(throughput["values"]) / 2)
    assert throughput["half"] > 0
    by_length = together["variants"]["static"]["by_length"]
    assert list(by_length) == ["1", "2"] and by_length["2"]["p99_e2el_ms"]["half"] > 0
    [pair] = together["differences"]
    each = [together["variants"][mode]["output_throughput"]["values"] for mode in MODES]
    assert (pair["first"], pair["second"]) == ("static", "dynamic")
    assert pair["output_throughput"]["mean"] == pytest.approx(sum(b - a for a, b in zip(*each)) / 2)
    both, one = (report.drawings(runs.load(path)) for path in (swept, swept / "seed-0"))
    captions = [cast(Any, drawn["by_group"]).args[-1] for drawn in (both, one)]
    assert "80 requests in 2 seeds, " in captions[0] and "40 requests, " in captions[1]


@pytest.mark.usefixtures("undrawn")
def test_a_report_is_rebuilt_from_what_was_saved(swept: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(swept, copy)
    for name in (*REPORT, "summary.json"):
        (copy / name).unlink()
    report.write(runs.load(copy))
    for name in ("report.md", "report.html", "requests.csv", "summary.json"):
        assert (copy / name).read_text() == (swept / name).read_text(), name
    page = Page((swept / "report.html").read_text())
    # two of headlines, differences, latency by group, capacities, every rate of two seeds
    assert page.open == [] and page.tables == 7 and len(page.sources) == len(DRAWN)
    packed = gzip.compress((copy / "seed-1" / "static.json").read_bytes())
    (copy / "seed-1" / "static.json.gz").write_bytes(packed)
    (copy / "seed-1" / "static.json").unlink()
    output("compare.report", f"{copy}/seed-1")  # also of compressed results
    alone = (copy / "seed-1" / "report.md").read_text()
    assert "One seed: no interval is claimed" in alone
    assert " ± " not in alone and " − " not in alone.split("## ")[0].replace(" s − ", "")


@pytest.mark.usefixtures("undrawn")
def test_runs_are_compared_side_by_side(swept: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(swept / "seed-0", other)
    summary = json.loads((other / "summary.json").read_text())
    summary["commit"], summary["config"]["block_size"] = "0123456789", 8
    summary["variants"]["static"]["output_throughput"] *= 2
    (other / "summary.json").write_text(json.dumps(summary))
    out = tmp_path / "compared"
    shown = output("compare", f"--runs {swept}/seed-0 {other} --out {out}")
    assert "|" not in shown and "#" not in shown and "**" not in shown
    twice = r"static *%s *other \(simulated\) *%s *[\d,]+ \(× 2\.00\)"
    assert re.search(twice % ("", ""), shown)
    text = (out / "report.md").read_text()
    assert "# seed-0 (simulated) against other (simulated)" in text
    assert "| 0123456789 |" in text and "| block_size | 16 | 8 |" in text
    assert "replayed the same traces" in text
    assert "| max_batch_size |" not in text, "settings that are the same"
    assert "client can send" not in text and "kept its schedule" not in text, "nothing was sent"
    assert re.search(twice % (r"\|", r"\|"), text)
    names = {path.name for path in out.iterdir()}
    assert names == {"report.md", "report.html", "distributions.png"}
    side_by_side.compare_runs([runs.load(swept / "seed-0"), runs.load(swept / "seed-1")], out)
    assert "**The traces differ**" in (out / "report.md").read_text()
    side_by_side.compare_runs([runs.load(swept), runs.load(swept)], out)
    text = (out / "report.md").read_text()
    assert "(× 1.00, no difference shown)" in text and "capacity, requests/s" in text


ODD = '{"workload": {}, "seed": 0, "partial": false, "variants": {"a": {}}}'
UNREADABLE = "cannot read the run"


@pytest.mark.parametrize(
    ("summary", "sentence"),
    [(None, "holds no run"), ("{", UNREADABLE), ('{"workload": {}}', "another version"),
     (ODD, UNREADABLE), (ODD.replace('"a"', f'"{"/" * 101}"'), f"{'/' * 100!r}; rename it")],
)  # fmt: skip
def test_a_folder_of_no_run_is_refused(summary: str | None, sentence: str, tmp_path: Path) -> None:
    if summary:
        (tmp_path / "summary.json").write_text(summary)
    done = ran("compare.report", str(tmp_path))
    assert done.returncode == 1 and done.stderr.startswith("error: ") and sentence in done.stderr


def test_an_unfinished_seed_is_left_out_where_whole_ones_are(swept: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(swept, copy)
    summary = json.loads((copy / "seed-1" / "summary.json").read_text())
    summary |= {"partial": True, "stopped": "the disk is full"}
    (copy / "seed-1" / "summary.json").write_text(json.dumps(summary))
    whole = runs.load(copy)
    assert [summary["seed"] for summary in whole.summaries] == [0]
    missing = "**Partial**: interrupted before its end; seed 1 of 2 is missing or left out."
    assert missing in report.contents(whole)
    shutil.rmtree(copy / "seed-0")
    assert (rest := runs.load(copy)).partial
    assert "**Partial**: the disk is full; seed 0 of 2" in report.contents(rest)


def test_twelve_variants_and_runs_side_by_side_are_told_apart() -> None:
    found = drawing.styles(["static", "vllm", "dynamic", *map(str, range(9))])
    assert len(set(found.values())) == 12 and found["static"] == drawing.STYLES[1]
    values = {f"static, {run}": {"ttft": [1.0], "tpot": [1.0], "e2el": [1.0]} for run in "ab"}
    styles = {"static, a": ("static", "-"), "static, b": ("static", "--")}
    [legend] = figures.distributions(values, "", styles).legends
    assert [text.get_text() for text in legend.get_texts()] == ["static, a", "static, b"]


def test_figures_are_drawn_where_nothing_was_answered_or_all_is_equal(tmp_path: Path) -> None:
    rows: dict[str, Any] = {"bin_s": 1.0} | {kind: [0] for kind in ROW_KINDS}
    speculated = {"new": rows | {"live": [9], "rejected": [3]}, "old": rows | {"live": [6]}}
    del speculated["old"]["rejected"]  # as in runs of versions without draft tokens
    above = figures.occupancy(speculated, dict.fromkeys(speculated, True), 8, "")
    assert above.axes[0].get_ylim() == (0, 12)
    equal = {"ttft": [1.0], "tpot": [1.0, 1.0 + 2e-16, 1.0 - 2e-16], "e2el": [3.0, 3.0]}
    for figure in (
        drawing.latency_vs_tokens({"static": ([], [], None)}, ""),
        drawing.latency_vs_tokens(dict.fromkeys(("static", "dynamic"), ([], [], None)), ""),
        figures.distributions({"static": {"ttft": [], "tpot": [], "e2el": []}}, ""),
        figures.distributions({"static": equal}, ""),
        figures.latency_vs_throughput({"static": [[]]}, "", "p99_ttft_ms", "first token"),
        figures.goodput({"static": [[]]}, "e2el ≤ 1 ms", ""),
        figures.occupancy({"static": rows}, {"static": False}, 8, ""),
        figures.computed_rows({"static": dict.fromkeys(ROW_KINDS, 0)}, {"static": None}, ""),
    ):
        drawing.save(figure, tmp_path / "a.png", tmp_path / "b.svg")
        ET.parse(tmp_path / "b.svg")


@pytest.mark.parametrize(("mix", "said"), [
    (None, "ttft ≤ 9 ms"), ("0.3:a=ttft:200", "ttft ≤ 9 ms, their own limits"),
])  # fmt: skip
def test_a_sweep_names_the_limits_that_requests_have(mix: str | None, said: str) -> None:
    run: Any = SimpleNamespace(first={"goodput": {"ttft": 9.0}, "workload": {"slo_mix": mix}})
    assert sections.limits_of(run) == said


def test_a_name_that_is_wider_than_the_terminal_is_folded() -> None:
    console = Console(file=(shown := io.StringIO()), width=20)
    console.print(tables.Terminal([["variant", "tok/s"], ["x" * 30, "1"]]))
    assert shown.getvalue().count("x") == 30


def test_a_table_is_set_closer_before_it_is_parted() -> None:
    for width, row in (
        (24, "static   123  123  123"),
        (21, "static  123 123 123"),
        (20, "static "),
    ):
        console = Console(file=(shown := io.StringIO()), width=width)
        console.print(tables.Terminal([["variant", "p50", "p95", "p99"], ["static", *["123"] * 3]]))
        assert shown.getvalue().count("static") == 1 + (width == 20) and row in shown.getvalue()


WORDS = st.text("abc-", min_size=1, max_size=12)
NUMBERS = st.text("123,", min_size=1, max_size=16)


@examples(300)
@given(st.data(), st.integers(1, 12), st.integers(1, 2))
def test_no_name_and_no_number_breaks_in_a_terminal(data: Any, columns: int, left: int) -> None:
    """At 80 columns dynamic-with-sjf-aging was two lines, and with --runs `dynamic…`."""
    names = st.lists(st.text("xyz-", min_size=1, max_size=26), min_size=left, max_size=left)
    cells = st.lists(NUMBERS, min_size=columns, max_size=columns)
    headings = data.draw(st.lists(st.lists(WORDS, max_size=5), min_size=columns, max_size=columns))
    rows = [[*data.draw(names), *data.draw(cells)] for _ in range(3)]
    head = ["variant", "run"][:left] + [" ".join(words) for words in headings]
    console = Console(file=(shown := io.StringIO()), width=80)
    console.print(tables.Terminal([head, *rows], left))
    lines = [line.split() for line in shown.getvalue().splitlines()]
    assert max(map(len, shown.getvalue().splitlines())) <= 80
    for row in rows:
        found = [number for line in lines if line[:left] == row[:left] for number in line[left:]]
        assert {*row[left:]} <= {*found}
    assert {*itertools.chain(*headings)} <= {*itertools.chain(*lines)}


def test_a_terminal_shows_no_intervals_but_what_follows_them() -> None:
    console = Console(file=(shown := io.StringIO()), width=80)
    console.print(tables.Terminal([["variant", "tok/s"], ["a", "4,126 ± 376 (× 1.03)"]]))
    assert " 4,126 (× 1.03)" in shown.getvalue()


def test_the_client_is_calibrated_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "RATES", [50])
    monkeypatch.setattr(calibrate, "SECONDS", 0.1)
    assert send_limit() is None and "was not measured" in calibrate.sentence(send_limit())
    monkeypatch.setattr(calibrate, "in_time", lambda point: True)  # however busy this machine is
    with Progress(Console(file=io.StringIO())) as progress:
        found = calibrate.calibrate(progress)
    assert found["rate"] == 50 and found["answered"] > 0
    assert send_limit() == found
    assert f"up to {found['rate']} streaming requests" in calibrate.sentence(found)
    other = json.dumps({**found, "key": "another machine"})
    (tmp_path / "effective-batching" / "client.json").write_text(other)
    assert send_limit() is None
