"""Runs of other load generators: their own numbers, and how their measures differ."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from client import runs
from compare import foreign
from compare.report import side_by_side
from compare.servers import ROOT
from tests.programs import output, ran

FILES = ROOT / "results" / "load_generators"
PRINTED: dict[str, dict[str, tuple[str, int, int]]] = {  # a number's line, which such one, its cell
    "vllm": {
        "wall_clock_s": ("Benchmark duration", 0, 1),
        **{
            f"{each}_{name}_ms": (f"{word} {name.upper()}", 0, 1)
            for name in ("ttft", "tpot", "itl", "e2el")
            for each, word in (("mean", "Mean"), ("p50", "Median"), ("p99", "P99"))
        },
    },
    "aiperf": {
        "request_throughput": ("Request Throughput", 0, 2),
        **{f"{each}_ttft_ms": ("Time to First Token", 0, cell)
           for each, cell in (("mean", 2), ("p50", 7), ("p99", 5))},
        "mean_tpot_ms": ("Inter Token Latency", 0, 2), "p99_e2el_ms": ("Request Latency", 0, 5),
    },
    "guidellm": {
        name: ("constant@", which, cell) for name, which, cell in (
            ("wall_clock_s", 0, 4), ("mean_ttft_ms", 1, 5), ("mean_tpot_ms", 1, 11),
            ("mean_normalized_latency_ms", 1, 14), ("request_throughput", 2, 4),
            ("total_token_throughput", 2, 7),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("tool", PRINTED)
def test_the_numbers_are_those_that_the_tool_printed(tool: str) -> None:
    [result] = foreign.read(FILES / tool).results
    lines = (FILES / tool / "printed.txt").read_text().splitlines()
    for name, (start, which, cell) in PRINTED[tool].items():
        line = [line for line in lines if line.strip("|│ ").startswith(start)][which]
        number = re.split(r"[|│]|: ", line)[cell].split()[0].replace(",", "")
        assert f"{result.number(name):.{len(number.partition('.')[2])}f}" == number, name


@pytest.mark.usefixtures("undrawn")
def test_the_committed_page_is_what_the_files_say(tmp_path: Path) -> None:
    words = [str(FILES / name) for name in ("client/summary.json", "guidellm", "aiperf", "vllm")]
    shown = output("compare", f"--out {tmp_path} --runs", *words)
    assert "report.html" in shown and "mean_ttft_ms" in shown
    made, kept = (folder / "report.md" for folder in (tmp_path, FILES))
    renew = "./compare.sh --runs client guidellm aiperf vllm --out ., in results/load_generators"
    assert made.read_text().split("## Def")[0] == kept.read_text().split("## Def")[0], renew
    # names of the tools and what they define otherwise are on the docs' page, too
    page = (ROOT / "docs" / "measuring.md").read_text()
    for tool in foreign.TOOLS:
        assert all(f"`{tool.names.get(n, n)}`" in page for n in tool.differs if n != "percentiles")


@pytest.mark.usefixtures("undrawn")
def test_other_requests_and_files_without_them_are_not_paired(tmp_path: Path) -> None:
    file: dict[str, Any] = json.loads((FILES / "vllm" / "vllm.json").read_text())
    for name in ("start_times", "ttfts", "input_lens", "output_lens", "errors"):
        del file[name]  # as without --save-detailed
    (tmp_path / "short.json").write_text(json.dumps(file))
    paths = [tmp_path / "short.json", FILES / "vllm", ROOT / "results" / "demo"]
    text = side_by_side.beside(paths, tmp_path / "out")
    assert text.startswith("# 1: vllm bench serve against 2: vllm bench serve against nobatch ")
    assert side_by_side.UNPAIRED in text and "server's machine" in text
    assert re.search(r"`p99_ttft_ms` \|.* \| [\d.,]+ ± [\d.,]+ \|", text), "seeds have an interval"


def test_a_ratio_has_an_interval_only_of_several_stretches() -> None:
    """And what the first run does not have, has none."""
    nan = math.nan
    assert side_by_side._ratio([nan, nan], [1.0, 2.0]) == "–"
    assert side_by_side._ratio([0.0], [math.log(2)]) == "× 2.00"
    assert "× 2.0" in side_by_side._ratio([0.0, 0.1], [0.7, 0.8])


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_its_trace_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        output("simulate", f"--modes dynamic --numsamples 5 --out {tmp_path / name}")
    (tmp_path / "b" / "trace.jsonl").unlink()
    done = ran("compare", "--runs", str(tmp_path / "a"), str(tmp_path / "b"))
    assert done.returncode == 2 and "copy the whole folder" in done.stderr


@pytest.mark.parametrize(
    ("file", "old", "new", "sentence"),
    [("guidellm/benchmarks.json", '"version": 2', '"version": 3', r"version 3 .* with guidellm"),
     ("vllm/vllm.json", '"duration"', '"seconds"', r"'duration'.*one run a file"),
     ("vllm/vllm.json", "burstiness", "bursts", r"no run .* guidellm \(0\.8\.1\), aiperf"),
     ("vllm/vllm.json", "{", "", "cannot read")],
)  # fmt: skip
def test_unknown_files_fail(file: str, old: str, new: str, sentence: str, tmp_path: Path) -> None:
    (changed := tmp_path / "file.json").write_text((FILES / file).read_text().replace(old, new))
    with pytest.raises(runs.RunError, match=sentence):
        foreign.read(changed)


SUMMARY, RECORDS = "profile_export_aiperf.json", "profile_export.jsonl"


def aiperf(folder: Path, names: Sequence[str], change: Callable[[Any], Any]) -> Path:
    """Write a summary of aiperf and its records, each record changed; return the summary's path."""
    folder.mkdir(exist_ok=True)
    lines = (FILES / "aiperf" / RECORDS).read_text().splitlines()
    changed = [json.dumps(change(json.loads(line))) for line in lines]
    (folder / names[1]).write_text("\n".join(changed))
    return Path(shutil.copy(FILES / "aiperf" / SUMMARY, folder / names[0]))


def slower(record: Any) -> Any:
    for name in ("time_to_first_token", "request_latency"):
        record["metrics"][name]["value"] *= 2
    return record


def plain(record: Any) -> Any:
    return {**record, "metrics": {k: v for k, v in record["metrics"].items() if "first" not in k}}


def ttfts(run: foreign.Measured) -> list[float]:
    return [request["first_token_at"] - request["sent_at"] for request in run.requests]


def test_records_of_aiperf_have_the_name_of_their_summary(tmp_path: Path) -> None:
    """Beside a run with --profile-export-prefix another one's records were taken for its own."""
    usual = foreign.read(aiperf(tmp_path, (SUMMARY, RECORDS), lambda record: record))
    mine = foreign.read(aiperf(tmp_path, ("mine.json", "mine.jsonl"), slower))
    assert ttfts(mine) == pytest.approx([2 * each for each in ttfts(usual)], abs=1e-6)
    (tmp_path / "mine.jsonl").unlink()
    assert not foreign.read(tmp_path / "mine.json").requests


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("ending", "words"), [
    ({"was_cancelled": True}, "cancelled before its end"),
    ({"is_complete": False, "incomplete_reason": "Run *cancelled*."}, r"Run \*cancelled\*"),
    ({"was_cancelled": False, "is_complete": True}, ""),
])  # fmt: skip
def test_a_run_that_was_cancelled_is_said_to_be_partial(
    ending: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """It looked complete; so did one of ours beside another tool's."""
    path = aiperf(tmp_path, (SUMMARY, RECORDS), lambda record: record)
    path.write_text(json.dumps(json.loads(path.read_text()) | ending))
    shutil.copytree(FILES / "client", ours := tmp_path / "client")
    summary = json.loads((ours / "summary.json").read_text())
    for each in summary["variants"].values():
        each["partial"] = bool(words)
    summary |= {"partial": bool(words), "stopped": "Ctrl-C" if words else None}
    (ours / "summary.json").write_text(json.dumps(summary))
    text = side_by_side.beside([path, ours], tmp_path / "out")
    assert text.count("**Partial**") == (2 if words else 0)
    assert not words or f"\n\naiperf: **Partial**: {words}.\n" in text
    assert not words or "\n\nclient.py: **Partial**: Ctrl-C; demo has 40 requests." in text


@pytest.mark.usefixtures("undrawn")
def test_answers_that_were_not_streamed_are_read(tmp_path: Path) -> None:
    """Records without a time to the first token were those of another version."""
    path = aiperf(tmp_path / "plain", (SUMMARY, RECORDS), plain)
    summary = json.loads(path.read_text())
    for name in ("time_to_first_token", "inter_token_latency", "inter_chunk_latency"):
        del summary[name]
    path.write_text(json.dumps(summary))
    run = foreign.read(path)
    assert run.results[0].ttft.mean is None and len(run.requests) == 40
    text = side_by_side.beside([path, FILES / "aiperf"], tmp_path / "out")
    assert "| end-to-end latency | no difference shown (× 1.00 (1.00 to 1.00)) |" in text
    assert "| time to first token |" not in text


def odd(tool: str, folder: Path) -> Path:
    """A tool's file whose second record has no first token, and whose third one is none at all."""
    if tool == "aiperf":
        lines = [(FILES / tool / RECORDS).read_text().splitlines()]
        lines[0][1:3] = json.dumps(plain(json.loads(lines[0][1]))), lines[0][2][:50]
        (folder / RECORDS).write_text("\n".join(lines[0]))
        return Path(shutil.copy(FILES / tool / SUMMARY, folder))
    [source] = (FILES / tool).glob("*.json")
    file = json.loads(source.read_text())
    if tool == "vllm":
        file["ttfts"][1], file["start_times"][2] = 0.0, None
    else:
        records = file["benchmarks"][0]["requests"]["successful"]
        records[1]["info"]["timings"]["first_token_iteration"] = None
        records[2] = {}
    (folder / "odd.json").write_text(json.dumps(file))
    return folder / "odd.json"


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("tool", PRINTED)
def test_one_odd_record_loses_no_other(tool: str, tmp_path: Path) -> None:
    run, whole = foreign.read(path := odd(tool, tmp_path)), foreign.read(FILES / tool)
    times, expected = ttfts(run), ttfts(whole)
    del expected[2]
    assert math.isnan(times[1]) and times[:1] + times[2:] == expected[:1] + expected[2:]
    assert run.remarks == ["1 of 40 records cannot be read."]
    assert run.remarks[0] in side_by_side.beside([path, FILES / tool], tmp_path / "out")


@pytest.mark.usefixtures("undrawn")
def test_what_one_run_does_not_know_of_a_request_is_left_out_of_its_ratio(tmp_path: Path) -> None:
    """It made the ratio none at all."""
    lacking = iter([True] + [False] * 39)
    path = aiperf(
        tmp_path, (SUMMARY, RECORDS), lambda record: plain(record) if next(lacking) else record
    )
    text = side_by_side.beside([FILES / "aiperf", path], tmp_path / "out")
    assert "| time to first token | no difference shown (× 1.00 (1.00 to 1.00)) |" in text


def test_an_answer_of_vllms_without_a_time_failed_though_its_error_is_empty(tmp_path: Path) -> None:
    file = json.loads((FILES / "vllm" / "vllm.json").read_text())
    file["latencies"][3] = file["ttfts"][3] = 0.0
    (tmp_path / "it.json").write_text(json.dumps(file))
    assert len(foreign.read(tmp_path / "it.json").requests) == 39
    file["ttfts"].pop()  # then no one can say whose each is
    (tmp_path / "it.json").write_text(json.dumps(file))
    with pytest.raises(runs.RunError, match="is not read here"):
        foreign.read(tmp_path / "it.json")


@pytest.mark.usefixtures("undrawn")
def test_a_sweep_of_vllm_is_a_run_of_each_setting(tmp_path: Path) -> None:
    """Its folders were no run: summary.json in them is a list of its own."""
    file = json.loads((FILES / "vllm" / "vllm.json").read_text())
    for setting, seeds in ("SERVE--max_num_seqs=16", 1), ("SERVE--max_num_seqs=8-BENCH--n=2", 3):
        (folder := tmp_path / "sweep" / setting).mkdir(parents=True)
        for k in range(seeds):
            starts = [1000 * k + start for start in file["start_times"]]
            one = file | {"mean_ttft_ms": 5.0 + k, "start_times": starts}
            (folder / f"run={k}.json").write_text(json.dumps(one))
        (folder / "summary.json").write_text(json.dumps([{}] * seeds))
        (folder / "run=9.failure.json").write_text('{"error": "no server"}')
    shown = output("compare", f"--runs {tmp_path / 'sweep'} --out {tmp_path / 'out'}")
    assert shown.startswith("max_num_seqs=16 against max_num_seqs=8-n=2\n")
    text = (tmp_path / "out" / "report.md").read_text()
    assert re.search(r"`mean_ttft_ms` \| 5\.00 \| 6\.00 ± 2\.48 \|", text)
    assert "| requests | 40 answered, 0 failed | 120 answered, 0 failed |" in text
    [folder] = (tmp_path / "sweep").glob("*n=2")
    run = foreign.read(folder)
    assert len(run.results) == 3 and len(run.requests) == 40
    assert "| time to first token | no difference shown (× 1.00 (1.00 to 1.00)) |" in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [("guidellm vllm guidellm/benchmarks.json", "given twice"), ("vllm", "name another one"),
     ("vllm aiperf --repeats 5", "leave out --repeats")],
)  # fmt: skip
def test_runs_that_cannot_be_compared_are_refused(words: str, sentence: str) -> None:
    paths = [str(FILES / word) if word[0] in "gva" else word for word in words.split()]
    done = ran("compare", "--runs", *paths)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and sentence in done.stderr
