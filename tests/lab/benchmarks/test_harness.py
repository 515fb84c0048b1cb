"""What all benchmarks share: options, settings with an effect, sentences, and pages."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from lab.benchmarks import agreement, burst, costs, engine, gpu, harness
from lab.benchmarks.faults import __main__ as faults
from lab.benchmarks.faults import connections, processes
from lab.benchmarks.faults.tools import Fault, Finding
from lab.studies import http
from tests.lab.benchmarks.conftest import Run
from tests.programs import output


@pytest.mark.parametrize(("benchmark", "arguments", "sentence"), [
    (burst, "--model demo --n 65", "--n must be from 1 to 64"),
    (burst, "--model demo --modes orca", "unknown mode 'orca'"),
    (burst, "--model fake", "leave out --model fake"),
    (burst, "--tokenizer bytes", "unknown flag --tokenizer"),
    (burst, "--batch-size-target 3", "--batch-size-target has no meaning in mode dynamic"),
    (engine, "--model demo --rows 1,x", "no list of positive numbers"),
    (engine, "--model demo --contexts 2000", "at most 1024 tokens"),
    (engine, "--model demo --rows 64 --kv-cache 0.02GB", "raise --kv-cache"),
    (engine, "--model demo --rows 64 --max-batch-size 32", "raise --max-batch-size, 32"),
    (engine, "--order fcfs", "unknown flag --order"),
    (engine, "--prefix-caching", "unknown flag --prefix-caching"),
    (engine, "--max-waiting 3", "unknown flag --max-waiting"),
    (engine, "--ahead", "unknown flag --ahead"),  # plans are made by no thread
    (agreement, "--model demo --n 33 --max-batch-size 32", "at most --max-batch-size"),
    (agreement, "--loop-interval-ms 3", "unknown flag --loop-interval-ms"),
    (gpu, "", "device cuda: no GPU is usable here; use --device cpu"),
    (gpu, "--port 1", "unknown flag --port"),
    (costs, "--model fake --name fake", "give another --name"),
    (costs, "--model fake --order sjf", "unknown flag --order"),
    (costs, "--model fake --ahead", "unknown flag --ahead"),  # hides the gaps that are fitted
    (faults, "--only nothing", "no fault has these words in its name"),
])  # fmt: skip
def test_bad_input_ends_with_a_sentence(
    benchmark: ModuleType, arguments: str, sentence: str, refusal_of: Callable[..., str]
) -> None:
    """A setting that would have no effect is refused, so that none is recorded."""
    assert sentence in refusal_of(benchmark, arguments)


@pytest.mark.nightly
def test_effects_are_recorded(small: str, result_of: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EB_PORT", "9")  # the environment may be shared
    two = result_of(burst, small, "--n 1 --modes dynamic,windowed")["config"]
    one = result_of(burst, small, "--n 1")["config"]
    assert not {"mode", *harness.NO_HTTP} & set(two)
    windows = "batch_size_target batch_size_limit max_batch_delay_ms preferred_batch_sizes"
    assert set(two) - set(one) == {"compact_batches", *windows.split()}


@pytest.mark.nightly
def test_answers_and_streams_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SECONDS", 0.3)
    output("lab.studies", f"http --clients 2 --tokens 4 --seeds 1 --out {tmp_path}")
    cases = json.loads((tmp_path / "http.json").read_text())["cases"]
    assert len(cases) == 7
    for case in cases:
        name, [measured] = case["traffic"], case["seeds"]
        tokens = 1 if "of 1" in name else 4
        assert measured["tokens_per_s"] == pytest.approx(tokens * measured["requests_per_s"])
        assert (measured["chunks_per_s"] > 0) == ("streams" in name)
        assert (measured["cpu_us_per_chunk"] > 0) == ("streams" in name)
        assert measured["p99_ms"] >= measured["p50_ms"] > 0 < measured["cpu_ms_per_request"]
        clients = int(name.split()[0])
        # each asks again once it has an answer, and half of the answers took the median at most
        assert measured["requests_per_s"] < 2 * clients / (measured["p50_ms"] / 1e3)


# ---- faults in their short form: each promise is kept on a real server

USUAL = (  # what happens to every server in time, and what no other test does to one
    "half of 500 streams are cut",
    "50 requests in one packet",
    "SIGTERM under load",
    "Ctrl-C under load",
    "kill -9 of the worker under load",
    "the engine fails in every 20th iteration",
    "the engine fails in every iteration",
)
FAULTS = [  # a fleet's are in test_ray.py
    pytest.param(fault, id=fault.name, marks=() if fault.name in USUAL else pytest.mark.nightly)
    for fault in (*connections.FAULTS, *processes.FAULTS)
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_promise_is_kept(fault: Fault) -> None:
    seen, kept = fault.run(True)
    assert kept, seen


def test_a_broken_promise_is_an_exit_code_and_a_bold_no(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(short: bool) -> Iterator[Finding]:
        yield "it began", True
        raise ConnectionResetError("peer")

    monkeypatch.setattr(faults, "FAULTS", [Fault("a | fault", "nothing breaks", fails, None)])
    monkeypatch.setattr(sys, "argv", ["faults", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        faults.main()
    assert ended.value.code == 1 and "BROKEN" in capsys.readouterr().out
    row = "| a \\| fault | nothing breaks | ConnectionResetError: peer | **no** |"
    assert row in (tmp_path / "faults.md").read_text()
