"""The runner of all studies, by a tiny made one: what is run and kept, tables, figure and page."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lab.studies import __main__ as program
from lab.studies import runner
from lab.studies.study import Against, Case, Panel, Study, Table, figure, tables
from tests.programs import output, ran

FAST = {"variant": "fast"}
RUNS: list[tuple[Any, ...]] = []  # load, variant, seed


def cases(n: int, scale: float = 1.0) -> list[dict[str, Any]]:
    pairs = product((0.5, 1.0), ("fast", "slow"))
    return [{"load": load, "variant": variant, "scale": scale} for load, variant in pairs]


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    """Seeds differ much more than variants do, which pairing takes out."""
    RUNS.append((case["load"], case["variant"], seed))
    slower = {"fast": 0.0, "slow": 1 + 0.1 * (seed % 2)}[case["variant"]] * case["load"]
    s = case["scale"] * (10.0 * (seed + 1) + slower)
    return {"s": s, "word": case["variant"], "none": None}


STUDY = Study(
    name="made", title="A made study", question="Is slow slower?",
    workload="{n} requests, {seeds} seeds, scale {scale:g}", cases=cases, run=run,
    measures={"s": ("latency, s", "{:.1f}"), "word": ("word", ""), "none": ("nothing", "{}")},
    text=lambda cases: f"{len(cases)} cases.",
    tables=[Table(("load", "variant"), (), [Against(FAST, ["s"], ["s"])], title="All")],
    figure="Latency over load",
    panels=[
        Panel("lines", "s", "s", "load", "load"),
        Panel("ratios", "s ÷ fast's", "s", "load", "load", base=FAST, log=True),
        Panel("bars", "s", "s", "variant", line="load"),
        Panel("not there", "s", "s", "load", where={"variant": "neither"}),
    ],
    requests=7, seeds=3, options={"scale": (1.0, "of the latency")},
)  # fmt: skip
MEASURED = [case | {"seeds": [run(case, 7, seed) for seed in range(3)]} for case in cases(7)]


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The study by its name, without figures and the machine's description, which take time."""
    monkeypatch.setattr(program, "NAMES", ("made",))
    monkeypatch.setattr(program, "load", lambda name: STUDY)
    monkeypatch.setattr(runner, "code", lambda study: "this code")
    monkeypatch.setattr(runner, "draw", lambda *of: None)
    monkeypatch.setattr("client.machine.hardware", dict)
    RUNS.clear()


def command(folder: Path, words: str = "") -> Any:
    """The numbers that a command writes."""
    alone = "--processes 1" * ("--from" not in words)
    output("lab.studies", f"made {alone} --out {folder} {words}")
    return json.loads((folder / "made.json").read_text())


def test_a_study_is_written_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "draw", figure)
    kept = command(tmp_path / "one", "--scale 2")
    assert (kept["requests"], kept["seeds"], kept["scale"]) == (7, 3, 2.0)
    assert [case["variant"] for case in kept["cases"]] == ["fast", "slow"] * 2
    assert [seed["s"] for seed in kept["cases"][0]["seeds"]] == [20.0, 40.0, 60.0]
    page = (tmp_path / "one" / "made.md").read_text()
    head = "# A made study\n\nIs slow slower?\n\n7 requests, 3 seeds, scale 2. Made by `python -m"
    assert page.startswith(head)
    assert f"commit {kept['commit']}, {kept['date']}" in page and "\n\n4 cases.\n\n## All" in page
    assert page.endswith("![Latency over load](made.png)\n")
    assert (tmp_path / "one" / "made.png").exists()
    RUNS.clear()
    assert command(tmp_path / "two", f"--from {tmp_path / 'one'}") == kept and not RUNS
    assert (tmp_path / "two" / "made.md").read_text() == page
    part = f"--from {tmp_path / 'one'} --only variant=slow"
    assert command(tmp_path / "three", part)["cases"] == kept["cases"][1::2]


@pytest.mark.parametrize(("words", "sentence"), [
    ("made --from {folder}", "another program made its made.json; use that of the commit"),
    ("made --only load=2", "--only leaves no case; the first of all has load=0.5, variant=fast, "),
    ("made --only variant=slow", "with what --only leaves out; add --only variant=fast"),
    ("made --from {folder} --seeds=2", "--from measures nothing anew; leave out --seeds"),
    ("made --requests 2", "unrecognized arguments: --requests 2"),  # its runs need no number
    ("made --processes 2", "unrecognized arguments: --processes 2"),  # of servers, one at a time
    ("mad", "invalid choice: 'mad' (choose from 'made'"),
])  # fmt: skip
def test_bad_input_ends_with_a_sentence(
    words: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = replace(STUDY, requests=0, servers=True, bases=("variant=fast",))
    monkeypatch.setattr(program, "load", lambda name: study)
    (tmp_path / "made.json").write_text('{"cases": [{"seeds": 3}]}')  # from before studies
    done = ran("lab.studies", *words.format(folder=tmp_path).split())
    assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1


def test_all_cases_of_a_seed_are_run_before_the_next_seed(tmp_path: Path) -> None:
    command(tmp_path, "--only variant=slow --only load=0.5 --only load=1.0")
    assert [(load, "slow", seed) for seed in range(3) for load in (0.5, 1.0)] == RUNS


def test_a_stopped_study_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(case: Case, n: int, seed: int) -> dict[str, Any]:
        if len(RUNS) == 5:
            raise KeyboardInterrupt
        return run(case, n, seed)

    monkeypatch.setattr(program, "load", lambda name: replace(STUDY, run=stop))
    first = command(tmp_path)
    assert first["seeds"] == 1, "the second seed has been run by one case of four"
    monkeypatch.setattr(program, "load", lambda name: STUDY)
    whole = command(tmp_path)
    assert len(RUNS) == 12 == len(set(RUNS))
    assert whole["cases"][0]["seeds"][:1] == first["cases"][0]["seeds"]
    command(tmp_path)
    assert len(RUNS) == 12, "nothing is left to run"
    monkeypatch.setattr(runner, "code", lambda study: "other code")
    done = ran("lab.studies", "made", "--out", str(tmp_path), "--minutes", "-1", "--processes", "1")
    assert done.returncode == 1 and "goes on" in done.stderr and len(RUNS) == 12


def test_code_is_what_numbers_depend_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "CODE", ["rules"])
    for name in ("lab/studies/made.py", "rules/one.py", "rules/notes.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    digests = [runner.code(STUDY)]
    for name in ("rules/notes.md", "rules/one.py"):
        (tmp_path / name).write_text("2")
        digests.append(runner.code(STUDY))
    assert digests[0] == digests[1] != digests[2]


def test_runs_are_the_same_side_by_side_and_servers_get_what_is_kept(tmp_path: Path) -> None:
    def measured(study: Study, name: str, processes: int = 1) -> Any:
        kept = runner.FinishedRuns(tmp_path / name, "")
        return runner.measured(study, cases(7), 7, 2, kept, processes)

    assert measured(STUDY, "alone") == measured(STUDY, "pool", processes=2)

    def after(case: Case, n: int, seed: int, kept: runner.FinishedRuns) -> dict[str, Any]:
        return {"first": (cases(7)[0], n, 0) in kept}

    runs = measured(replace(STUDY, run=after, servers=True), "servers")
    assert [case["seeds"][0]["first"] for case in runs] == [False, True, True, True]


def test_a_table_has_means_and_differences_paired_by_seed() -> None:
    heading, _, fast, slow, *_ = tables(STUDY, MEASURED).split("\n\n")[2].splitlines()
    columns = (
        "load | variant | latency, s | word | nothing | latency − fast's, s | latency ÷ fast's"
    )
    assert heading == f"| {columns} |"
    assert fast == "| 0.5 | fast | 20.0 ± 24.8 | fast | – | – | – |"
    assert slow == "| 0.5 | slow | 20.5 ± 24.8 | slow | – | +0.5 ± 0.1 | 1.03 ± 0.04 |"
    same = [case | {"seeds": MEASURED[0]["seeds"]} for case in cases(7)]
    assert "| 20.0 ± 24.8 | fast | – | none shown | 1.00 ± 0.00 |" in tables(STUDY, same)
    constant = [case | {"seeds": MEASURED[0]["seeds"][:1] * 3} for case in cases(7)]
    assert "| 10.0 | fast |" in tables(STUDY, constant), "a closed form has no spread to show"


def test_a_figure_has_lines_over_numbers_bars_over_names_and_no_empty_panel() -> None:
    found = figure(STUDY, MEASURED, "caption")
    axes: list[Any] = list(found.axes) if found else []
    assert [each.get_title(loc="left") for each in axes] == ["lines", "ratios", "bars"]
    lines, ratios, bars = axes
    drawn = [[*map(float, line.lines[0].get_ydata())] for line in lines.containers]
    assert drawn == [[20.0, 20.0], pytest.approx([20.517, 21.033], abs=0.001)]
    drawn = [[*map(float, line.lines[0].get_ydata())] for line in ratios.containers]
    assert drawn == [[1.0, 1.0], pytest.approx([1.031, 1.063], abs=0.001)]
    assert ratios.get_yscale() == "log"
    assert [len(bar.patches) for bar in bars.containers if hasattr(bar, "patches")] == [2, 2]
