"""Reports of saved runs: what they say, that they can be rebuilt, and that their page needs no
network.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from client.outcomes import Outcome
from client.progress import Progress, Replayed
from client.workloads import Workload
from compare import calibrate, runs
from compare.report import drawing, figures, report, side_by_side, tables
from compare.report.page import as_page
from stats import ROW_KINDS
from tests.conftest import undraw
from tests.programs import ran

MODES = ["static", "dynamic"]

DRAWN = [name for name in runs.FIGURES if name != "replicas"]  # of a run that has one all the time
REPORT = ["report.md", "report.html", *(f"{name}.png" for name in DRAWN)]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two modes over two seeds, in virtual time."""
    out = tmp_path_factory.mktemp("runs") / "swept"
    arguments = [
        "--model",
        "fake",
        "--modes",
        ",".join(MODES),
        "--sweep",
        "--seconds",
        "0.5",
        "--repeats",
        "2",
        "--lengths",
        "choice:30,50",
        "--max-batch-size",
        "2",
        "--numsamples",
        "40",
        "--arrival",
        "poisson:50",
        "--out",
        str(out),
    ]
    with pytest.MonkeyPatch.context() as patch:
        undraw(patch)
        done = ran("simulate", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"static at +[\d.]+ requests/s: .*; sustained", done.stdout), (
        "plain lines, for this is no terminal"
    )
    assert (
        "40 requests, " in done.stdout and "index of dispersion" not in done.stdout
    )  # too few to tell
    return out


def test_a_sweep_of_several_seeds_leaves_each_seeds_run_and_what_they_say_together(
    swept: Path,
) -> None:
    names = {path.name for path in swept.iterdir()}
    assert names == {"seed-0", "seed-1", "summary.json", *REPORT}
    for seed in (0, 1):
        mine = json.loads((swept / f"seed-{seed}" / "summary.json").read_text())
        assert mine["seed"] == seed and list(mine["sweep"]) == MODES and not mine["partial"]
        for points in mine["sweep"].values():
            rates = [point["rate"] for point in points]
            assert rates == sorted(rates) and len(rates) >= 4
            assert points[-1]["saturated"] and not points[0]["saturated"]
    assert (swept / "seed-0" / "trace.jsonl").read_text() != (
        swept / "seed-1" / "trace.jsonl"
    ).read_text()
    together = json.loads((swept / "summary.json").read_text())
    assert together["seeds"] == [0, 1]
    throughput = together["variants"]["static"]["output_throughput"]
    assert (
        throughput["mean"] == pytest.approx(sum(throughput["values"]) / 2)
        and throughput["half"] > 0
    )
    by_length = together["variants"]["static"]["by_length"]
    assert list(by_length) == ["1", "2"] and by_length["2"]["p99_e2el_ms"]["half"] > 0
    [pair] = together["differences"]
    each = [together["variants"][mode]["output_throughput"]["values"] for mode in MODES]
    assert (pair["first"], pair["second"]) == ("static", "dynamic")
    assert pair["output_throughput"]["mean"] == pytest.approx(sum(b - a for a, b in zip(*each)) / 2)


def test_the_report_shows_intervals_rates_and_figures(swept: Path) -> None:
    text = (swept / "report.md").read_text()
    assert "| dynamic − static |" in text and " ± " in text and "Means over 2 seeds" in text
    assert (
        "## From light load to beyond capacity" in text and "highest rate within the limits" in text
    )
    assert re.search(r"\| static \| 30 tokens \| \d+ \| [\d.]+ ± [\d.]+ \|", text)
    assert text.count("the queue only grows |") >= 4 and "Seed 1:" in text
    assert re.search(r"Little's law: .* differ by [+−]\d+\.\d% at most", text)
    for name in DRAWN:
        assert f"({name}.png)" in text


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.tables = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.sources += [
            value for name in ("src", "href", "srcset", "data") if (value := values.get(name))
        ]
        self.tables += tag == "table"
        if tag not in ("meta", "img", "br", "hr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_whole_file_that_needs_no_network(swept: Path) -> None:
    text = (swept / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert (
        page.open == [] and page.tables == 6
    )  # headlines, differences, who waits, capacities, every rate of two seeds
    assert len(page.sources) == len(DRAWN) and all(
        s.startswith("data:image/svg+xml;base64,") for s in page.sources
    )
    assert "<script" not in text and "@import" not in text and "url(" not in text
    for name in ("output_throughput", "schedule_lag_ms", "simulated", "settings: "):
        assert name in text


def test_what_comes_from_outside_cannot_break_the_page() -> None:
    page = as_page("# a <b> & c\n\n| mode |\n| --- |\n| <script>alert(1)</script> |\n", {})
    assert "<script>" not in page and "<title>a &lt;b&gt; &amp; c</title>" in page


@pytest.mark.usefixtures("undrawn")
def test_a_report_is_rebuilt_from_what_was_saved(swept: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(swept, copy)
    for name in (*REPORT, "summary.json"):
        (copy / name).unlink()
    report.write(runs.load(copy))
    for name in ("report.md", "report.html", "summary.json"):
        assert (copy / name).read_text() == (swept / name).read_text(), name
    alone = ran("compare.report", str(copy / "seed-1"))
    assert alone.returncode == 0 and "One seed: no interval is claimed" in (
        said := (copy / "seed-1" / "report.md").read_text()
    )
    assert " ± " not in said and " − " not in said.split("## ")[0].replace(" s − ", "")


@pytest.mark.usefixtures("undrawn")
def test_runs_are_compared_side_by_side(swept: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(swept / "seed-0", other)
    summary = json.loads((other / "summary.json").read_text())
    summary["commit"], summary["config"]["block_size"] = "0123456789", 8
    summary["variants"]["static"]["output_throughput"] *= 2
    (other / "summary.json").write_text(json.dumps(summary))
    out = tmp_path / "compared"
    done = ran("compare.report", str(swept / "seed-0"), str(other), "--out", str(out))
    assert done.returncode == 0, done.stderr
    text = (out / "report.md").read_text()
    assert (
        "# seed-0 (simulated) against other (simulated)" in text
        and "| 0123456789 |" in text
        and "| block_size | 16 | 8 |" in text
    )
    assert "replayed the same traces" in text and re.search(
        r"\| static \| other \(simulated\) \| [\d,]+ \(× 2\.00\) \|", text
    )
    assert {path.name for path in out.iterdir()} == {
        "report.md",
        "report.html",
        "distributions.png",
    }
    side_by_side.compare_runs([runs.load(swept / "seed-0"), runs.load(swept / "seed-1")], out)
    assert "**The traces differ**" in (out / "report.md").read_text()
    side_by_side.compare_runs([runs.load(swept), runs.load(swept)], out)
    text = (out / "report.md").read_text()
    assert "(× 1.00, no difference shown)" in text and "capacity, requests/s" in text


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: None, "holds no run"),
        (lambda folder: (folder / "summary.json").write_text("{"), "cannot read the run"),
        (
            lambda folder: (folder / "summary.json").write_text('{"workload": {}}'),
            "another version",
        ),
        (
            lambda folder: (folder / "summary.json").write_text(
                json.dumps({"workload": {}, "seed": 0, "partial": False, "variants": {"a": {}}})
            ),
            "cannot read the run",
        ),
    ],
)
def test_a_folder_that_is_no_run_is_refused_in_a_sentence(
    make: Any, said: str, tmp_path: Path
) -> None:
    make(tmp_path)
    done = ran("compare.report", str(tmp_path))
    assert (
        done.returncode == 1
        and done.stderr.startswith("error: ")
        and said in done.stderr
        and "Traceback" not in done.stderr
    )


def test_no_difference_is_shown_where_the_interval_spans_zero() -> None:
    def results(*throughputs: float) -> list[dict[str, float]]:
        return [
            {"output_throughput": value, "mean_e2el_ms": 1000.0 * i}
            for i, value in enumerate(throughputs)
        ]

    text = tables.differences_table(
        {"a": results(10, 20, 30), "b": results(13, 19, 31), "c": results(20, 30, 41)}, "a"
    )
    rows = {line.split(" |")[0].removeprefix("| "): line for line in text.splitlines()}
    assert "no difference shown (+1 ± 5)" in rows["b − a"] and "| +10 ± 1 |" in rows["c − a"]
    assert "no difference shown (+0.00 ± 0.00)" in rows["b − a"], "equal is no difference"


def test_an_unfinished_seed_is_left_out_where_whole_ones_are(swept: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(swept, copy)
    summary = json.loads((copy / "seed-1" / "summary.json").read_text())
    (copy / "seed-1" / "summary.json").write_text(
        json.dumps(summary | {"partial": True, "stopped": "the disk is full"})
    )
    found = runs.load(copy)
    assert [summary["seed"] for summary in found.summaries] == [0]
    assert (
        "**Partial**: interrupted before its end; seed 1 of 2 is missing or left out."
        in report.contents(found)
    )
    shutil.rmtree(copy / "seed-0")
    assert runs.load(
        copy
    ).partial and "**Partial**: the disk is full; seed 0 of 2" in report.contents(runs.load(copy))


def test_twelve_variants_are_told_apart_and_modes_look_the_same_everywhere() -> None:
    found = drawing.looks(["static", "vllm", "dynamic", *map(str, range(9))])
    assert len(set(found.values())) == 12 and found["static"] == drawing.looks(["static"])["static"]


def test_runs_side_by_side_are_told_apart_in_the_legend() -> None:
    values = {f"static, {run}": {"ttft": [1.0], "tpot": [1.0], "e2el": [1.0]} for run in "ab"}
    styles = {"static, a": ("static", "-"), "static, b": ("static", "--")}
    [legend] = figures.distributions(values, "", styles).legends
    assert [text.get_text() for text in legend.get_texts()] == ["static, a", "static, b"]


def test_figures_are_drawn_of_runs_in_which_nothing_was_answered_or_all_is_equal(
    tmp_path: Path,
) -> None:
    rows = {"bin_s": 1.0, **{kind: [0] for kind in ROW_KINDS}}
    equal = {"ttft": [1.0], "tpot": [1.0, 1.0 + 2e-16, 1.0 - 2e-16], "e2el": [3.0, 3.0]}
    for figure in (
        figures.latency_vs_tokens({"static": ([], [], None)}, ""),
        figures.distributions({"static": {"ttft": [], "tpot": [], "e2el": []}}, ""),
        figures.distributions({"static": equal}, ""),
        figures.latency_vs_throughput({"static": [[]]}, ""),
        figures.goodput({"static": [[]]}, "e2el ≤ 1 ms", ""),
        figures.occupancy({"static": rows}, {"static": False}, 8, ""),
        figures.computed_rows({"static": dict.fromkeys(ROW_KINDS, 0)}, {"static": None}, ""),
    ):
        drawing.save(figure, tmp_path / "a.png", tmp_path / "b.svg")
        ET.parse(tmp_path / "b.svg")


def test_progress_tells_rate_flight_failures_and_the_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    requests = Workload().requests(10, "constant:10")
    with (
        Progress(Console(force_terminal=False)) as progress,
        progress.replay("static", requests) as watch,
    ):
        for request in requests[:4]:
            watch.sent()
            if request.id < 3:
                watch.ended(Outcome(request, 0, 0, 0, error="500" if request.id == 1 else ""))
        line = str(watch)
    assert (
        line.startswith("static: 3/10 ended, ")
        and "1 in flight, 1 failed, " in line
        and line.endswith(" s left")
    )
    assert capsys.readouterr().out == "", "a quick replay says nothing in between"
    virtual = Replayed("static", Workload().requests(10, "constant:0.001"), None)
    virtual._started -= 10
    for request in requests[:4]:
        virtual.sent()
        virtual.ended(Outcome(request, 0, 0, 0))
    assert str(virtual).endswith(" 0 failed, 15 s left"), "hours of a trace may pass in seconds"
    said: list[str] = []
    slow = Replayed("static", requests, said.append)
    slow._printed -= 11  # ten seconds have passed
    slow.sent()
    slow.tick()
    slow.tick()
    assert said == ["static: 0/10 ended, 0.0 a second, 1 in flight, 0 failed"], (
        "also when nothing is answered"
    )


def test_progress_moves_in_a_terminal() -> None:
    console = Console(force_terminal=True, width=100, record=True)
    with (
        Progress(console) as progress,
        progress.replay("static", Workload().requests(3)) as watch,
    ):
        progress.table(tables.sweep_table({"static": []}))
        watch.sent()
        console.print(progress._render())
    assert "static: 0/3 ended" in (shown := console.export_text()) and "sustained" in shown


def test_the_client_is_calibrated_once_a_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "RATES", [50])
    monkeypatch.setattr(calibrate, "SECONDS", 0.1)
    assert calibrate.known() is None and "was not measured" in calibrate.sentence(calibrate.known())
    monkeypatch.setattr(
        calibrate, "in_time", lambda point: True
    )  # whatever this machine does just now
    with Progress(Console(file=io.StringIO())) as progress:
        found = calibrate.calibrate(progress)
    assert (
        found["rate"] == 50
        and found["answered"] > 0
        and found["points"][0]["failed"] == 0
        and calibrate.known() == found
    )
    assert f"up to {found['rate']} streaming requests" in calibrate.sentence(found)
    (tmp_path / "effective-batching" / "client.json").write_text(
        json.dumps(found | {"key": "another machine"})
    )
    assert calibrate.known() is None
