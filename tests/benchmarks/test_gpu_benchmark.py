"""benchmarks/gpu.sh on a CPU: each part, and what becomes of one that fails or takes too long."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import agreement, burst, engine, gpu
from benchmarks.peers import engines
from config import ConfigError


def test_every_part_gets_the_settings_that_it_knows() -> None:
    chosen = {"max_batch_size": 16, "loop_interval_ms": 1}
    options = Namespace(rows="1", context="9", n=3, numsamples=5, **chosen)
    config: Any = SimpleNamespace(model="gpt2", dtype="float32", device="cuda")
    flags = ("--tokenizer", "--max-batch-size", "--loop-interval-ms")
    found = {
        name: [word for word in command if word in flags]
        for name, command in gpu.commands(options, config, Path("out")).items()
    }
    assert found == {
        "agreement": ["--max-batch-size"],
        "steps": ["--max-batch-size"],
        "eager": ["--max-batch-size"],
        "burst": ["--max-batch-size", "--loop-interval-ms"],
        "generate": [],
        "comparison": [*flags],
    }


@pytest.mark.nightly
def test_every_part_is_reported_or_said_to_be_missing(
    small: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    parts = {part.__name__: part for part in (agreement, engine, burst, engines)}
    monkeypatch.setitem(engine.PROBE_WIDTH, "cpu", 128)

    def here(command: list[str], log: Path, seconds: float) -> str | None:
        """The part in this process; the comparison, which other tests run, ends out of time."""
        assert 0 < seconds <= 9 * 60
        if command[0] not in parts:
            return "no time was left to finish it"
        monkeypatch.setattr(sys, "argv", [*command])
        capsys.readouterr()
        parts[command[0]].main()
        log.write_text(capsys.readouterr().out)
        return None

    monkeypatch.setattr(gpu, "call", here)
    monkeypatch.setattr(gpu, "server", lambda mode, settings, seconds: nullcontext())
    out = tmp_path / "out"
    sizes = "--device cpu --max-batch-size 16 --rows 1,3 --context 20 --n 3"
    monkeypatch.setattr(sys, "argv", ["gpu", *shlex.split(f"{small} {sizes} --out {out}")])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 1
    page = (out / "gpu.md").read_text()
    for text in (
        "\nfloat32: 10 of 10 requests have the oracle's ids",
        "\nA server is ready 0.0 s after its start.",
        "[All of it](steps/engine.md):\n\n| rows |",
        "\ndynamic: 3 requests, ",
        "**Missing: comparison** (no time was",
    ):
        assert text in page
    result = json.loads((out / "gpu.json").read_text())
    assert result["commit"] and '"hardware"' not in page


@pytest.mark.nightly
def test_a_part_that_fails_is_told_from_one_that_ran(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert gpu.call(["benchmarks.engine", "--rows", "x"], tmp_path / "log", 100) == (
        "exit code 2: error: 'x' is no list of positive numbers such as 1,8,64"
    )
    assert "positive numbers" in (tmp_path / "log").read_text()
    assert gpu.call(["benchmarks.engine"], tmp_path / "log", -1.0) == "no time was left"
    endless = gpu.call(["http.server", "0"], tmp_path / "log", 1.0)
    assert endless == "no time was left to finish it"
    (tmp_path / "notes").touch()
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--out", str(tmp_path)])
    with pytest.raises(ConfigError, match="holds no earlier run of this; choose another --out"):
        gpu.main()
