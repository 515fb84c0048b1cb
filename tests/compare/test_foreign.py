"""Runs of other load generators: their own numbers, and how their measures differ."""

from __future__ import annotations

import json
import math
import re
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
        assert f"{result[name]:.{len(number.partition('.')[2])}f}" == number, name


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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [("guidellm vllm guidellm/benchmarks.json", "given twice"), ("vllm", "name another one"),
     ("vllm aiperf --repeats 5", "leave out --repeats")],
)  # fmt: skip
def test_runs_that_cannot_be_compared_are_refused(words: str, sentence: str) -> None:
    paths = [str(FILES / word) if word[0] in "gva" else word for word in words.split()]
    done = ran("compare", "--runs", *paths)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and sentence in done.stderr
