"""python -m simulate.saved_page: rows of runs, simulated or recorded, of vLLM, and their pages."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client.runs import RunError
from simulate.saved_page import beside
from simulate.vllm.history import history as history_of
from tests.programs import empty_figures, output, ran
from tests.server.live.shown import computed, counted, iterations, rows_of
from tests.servers import ROOT

SMALL = "--modes static,dynamic --numsamples 30 --arrival poisson:60"


@pytest.fixture(scope="module", autouse=True)
def undrawn_figures() -> Iterator[None]:
    with empty_figures():
        yield


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("simulated")
    output("simulate", f"{SMALL} --max-batch-size 8 --out {out}")
    return out


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the recordings of its servers beside it."""
    out = tmp_path_factory.mktemp("measured")
    words = f"{SMALL} --model fake --skip-calibration --out {out} --record {out}/calls.jsonl"
    output("compare", words)
    return out


def histories(page: Path) -> list[dict[str, Any]]:
    [data] = re.findall(r'id="runs">(.*?)</script>', page.read_text(), re.DOTALL)
    return list(json.loads(data))


def rows_in(folder: Path, name: str) -> dict[str, int]:
    """Return a server's rows by the run's results."""
    return counted(json.loads((folder / f"{name}.json").read_text())["server"])


def test_a_simulated_run_is_shown_as_it_was_served(simulated: Path, tmp_path: Path) -> None:
    done = ran("simulate.saved_page", str(simulated))
    assert done.stdout == f"{simulated / 'live.html'}\n", done.stderr
    static, dynamic = histories(simulated / "live.html")
    assert [static["about"]["name"], dynamic["about"]["name"]] == ["static", "dynamic"]
    assert static["about"]["simulated"] == "simulated, costs fake"
    assert computed(rows_of(static)) == rows_in(simulated, "static")
    assert rows_in(simulated, "static")["idle"] > 0
    assert computed(rows_of(dynamic)) == rows_in(simulated, "dynamic")
    assert len(static["ended"]) == len(dynamic["ended"]) == 30
    arrivals = [sorted(request[1] for request in each["requests"]) for each in (static, dynamic)]
    assert arrivals[0] == pytest.approx(arrivals[1]), "one clock, which begins with the trace"
    link = "[Every row, iteration by iteration](live.html)"
    assert link in (simulated / "report.md").read_text()
    assert '<a href="live.html">' in (simulated / "report.html").read_text()
    out = tmp_path / "new" / "folder" / "x.html"  # a folder that is not there yet
    done = ran("simulate.saved_page", str(simulated), "--out", str(out))
    assert done.stdout == f"{out}\n" and len(histories(out)) == 2 and not done.stderr


def test_a_run_with_a_setting_that_is_unknown_names_it(simulated: Path, tmp_path: Path) -> None:
    """Its rows would be those of other settings, without a word; its report opens."""
    shutil.copytree(simulated, tmp_path, dirs_exist_ok=True)
    result = json.loads((path := tmp_path / "dynamic.json").read_text())
    result["config"]["kv_cache_gb"] = 4.0
    path.write_text(json.dumps(result))
    done = ran("simulate.saved_page", str(tmp_path))
    said = f"error: dynamic of {tmp_path} has the setting kv_cache_gb, which this version does not"
    assert done.returncode == 1 and done.stderr == f"{said} know (did you mean kv_cache?)\n"
    output("compare.report", str(tmp_path))


def test_a_recorded_run_is_shown_as_it_was_served(measured: Path) -> None:
    """The warm-up is shown too, which is before the run of /stats."""
    output("simulate.saved_page", str(measured))
    shown = histories(measured / "live.html")
    assert [each["about"]["model"] for each in shown] == ["fake", "fake"]
    for history, name in zip(shown, ("static", "dynamic")):
        saved = json.loads((measured / f"{name}.json").read_text())["server"]
        rows = computed(rows_of(history))
        assert rows["idle"] == saved["idle_rows"] and rows["live"] > 0
        assert len(history["ended"]) >= 30 and history["iterations"][0][0] >= 0
    alone = ran("simulate.saved_page", str(measured / "calls.jsonl"), "--of", "dynamic")
    assert alone.stdout == f"{measured / 'calls.html'}\n"
    [only] = histories(measured / "calls.html")
    assert only["iterations"] == shown[1]["iterations"]


def test_of_several_seeds_the_first_is_shown_and_the_page_says_so(tmp_path: Path) -> None:
    output("simulate", f"{SMALL} --repeats 2 --seed 3 --out {tmp_path}")
    done = ran("simulate.saved_page", str(tmp_path))
    assert done.stderr == f"{tmp_path}: shown is seed 3, the first of 2\n"
    static, _ = histories(tmp_path / "live.html")
    assert static["about"]["note"].startswith("seed 3, the first of 2, commit ")
    assert computed(rows_of(static)) == rows_in(tmp_path / "seed-3", "static")
    assert computed(rows_of(static)) != rows_in(tmp_path / "seed-4", "static")


def test_of_measured_seeds_the_first_has_its_recordings(measured: Path, tmp_path: Path) -> None:
    """Measured there and back: static, dynamic, dynamic, static; an earlier run may be before."""
    lines = (measured / "calls.jsonl").read_text()
    half = lines.index('{"recording"', 1)
    static, dynamic = lines[:half], lines[half:]
    recorded = tmp_path / "calls.jsonl"
    recorded.write_text(dynamic + static + dynamic + dynamic + static)
    summary = json.loads((measured / "summary.json").read_text())
    for seed in (0, 1):
        (folder := tmp_path / f"seed-{seed}").mkdir()
        asked = summary["asked"] | {"seeds": [0, 1]}
        (folder / "summary.json").write_text(json.dumps(summary | {"seed": seed, "asked": asked}))
        for name in ("static", "dynamic"):
            result = json.loads((measured / f"{name}.json").read_text())
            result["config"]["record"] = str(recorded)
            (folder / f"{name}.json").write_text(json.dumps(result))
    done = ran("simulate.saved_page", str(tmp_path), "--out", str(tmp_path / "both.html"))
    assert done.returncode == 0 and "shown is seed 0, the first of 2" in done.stderr, done.stderr
    shown = histories(tmp_path / "both.html")
    assert [each["about"]["mode"] for each in shown] == ["static", "dynamic"]
    assert shown[0]["about"]["note"] == "recorded: calls.jsonl, seed 0, the first of 2"
    recorded.write_text(static + dynamic + dynamic + static + static)
    assert (
        "does not end with the recordings of static, dyn"
        in ran("simulate.saved_page", str(tmp_path)).stderr
    )
    (tmp_path / "seed-1" / "summary.json").unlink()  # as if it had been interrupted
    done = ran("simulate.saved_page", str(tmp_path))
    assert done.returncode == 1 and "was interrupted" in done.stderr


@pytest.mark.parametrize(("change", "arguments", "sentence"), [
    ({}, ["--of", "static,nobody"], "there is no 'nobody'; name one or two of static, dynamic"),
    ({"simulated": None}, [], "measure again with --record"),
    ({"simulated": {"costs": "fake", "layout": "2 replicas"}}, [], "has several replicas"),
    ({"simulated": {"costs": "gone", "layout": ""}}, [], "there are no costs 'gone'"),
])  # fmt: skip
def test_a_run_that_cannot_be_shown_is_refused(
    change: dict[str, Any], arguments: list[str], sentence: str, simulated: Path, tmp_path: Path
) -> None:
    for path in simulated.glob("*.json*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    summary = json.loads((tmp_path / "summary.json").read_text()) | change
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    done = ran("simulate.saved_page", str(tmp_path), *arguments)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and sentence in done.stderr
    assert not (tmp_path / "live.html").exists()


def test_what_cannot_be_shown_is_a_sentence(simulated: Path, tmp_path: Path) -> None:
    (notes := tmp_path / "notes.txt").write_text("hello\n")
    for words, said in (
        (("--timeline", str(simulated)), "unknown flag --timeline"),
        ((str(notes),), "line 1"),
        ((str(simulated), "--out", str(tmp_path)), f"{tmp_path} cannot be written: Is a directory"),
    ):
        done = ran("simulate.saved_page", *words)
        assert done.returncode == 1 and done.stderr.startswith("error: ") and said in done.stderr


RECORDING = ROOT / "results" / "live" / "vllm.jsonl"
HEAD = RECORDING.read_text().split("\n")[0] + "\n"


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(history_of(path)))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "vllm.log"


def test_a_recording_is_shown_as_vllm_computed_it() -> None:
    shown = read(RECORDING)
    steps = [json.loads(line) for line in RECORDING.read_text().splitlines()][1:]
    computed, made, recomputed = Counter[int](), Counter[int](), 0
    for step, iteration in zip(steps, iterations(shown), strict=True):
        cells = {cell.id: cell for cell in iteration.cells.values() if cell.kind != "s"}
        assert {id_: (c.start, c.n) for id_, c in cells.items()} == {
            id_: (start, n) for id_, start, n, _ in step["rows"]
        }
        assert (iteration.waiting, iteration.blocks_used) == (step["waiting"], step["blocks_used"])
        recomputed += sum(cell.kind == "r" for cell in cells.values())
        for id_, _, n, tokens in step["rows"]:
            computed[id_] += n
            made[id_] += tokens
    assert recomputed and any(step["preempted"] for step in steps)
    asked = {id_: (prompt, tokens) for id_, _, prompt, tokens, *_ in shown["requests"]}
    assert {id_: tokens for id_, _, _, _, tokens in shown["ended"]} == made
    assert made == {id_: tokens for id_, (_, tokens) in asked.items()} and len(made) == 30
    assert all(n > 0 for n in computed.values())
    assert min(arrived_at for _, arrived_at, *_ in shown["requests"]) == 0


def test_vllms_first_request_arrives_with_that_of_the_server_beside_it() -> None:
    ours = {name: json.dumps({"requests": [[0, 2.5], [1, 0.25]]}) for name in ("a", "dynamic")}
    texts = beside(ours, None, RECORDING)
    assert list(texts) == ["dynamic", "vllm"]
    assert min(at for _, at, *_ in json.loads(texts["vllm"])["requests"]) == 0.25
    with pytest.raises(RunError, match="name one with --of"):
        beside(ours, ["a", "dynamic"], RECORDING)


@pytest.mark.parametrize(("text", "sentence"), [
    ("hello\n", "is no recording of vLLM, whose log in text is none; record it with simulate/"),
    ('{"vllm":"0.40","format":3}\n', "reads formats 1 and 2"),
    (HEAD, "has no iterations yet; send vLLM some requests first"),
    (HEAD.replace("format", "for"), "its first line has another form ("),
    (HEAD + "{\n" + HEAD, "line 2 is no iteration ("),
])  # fmt: skip
def test_a_log_that_cannot_be_shown_is_refused(text: str, sentence: str, log: Path) -> None:
    log.write_text(text)
    with pytest.raises(RunError) as refused:
        history_of(log)
    assert str(refused.value).startswith(str(log)) and sentence in str(refused.value)
