"""Benchmarks in the tests' own process, on models so small that they take no time."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from lab.benchmarks import harness

Run = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def no_handler_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of SIGTERM did, and a pool of processes that a later test started could not be ended."""
    monkeypatch.setattr(harness, "sigterm_is_ctrl_c", lambda: None)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Settings of a tiny model with GPT-2's vocabulary and context."""
    folder = tmp_path_factory.mktemp("small")
    shape = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32}
    folder.joinpath("config.json").write_text(json.dumps(shape))
    return f"--model {folder} --weights random --dtype float32 --threads 1"


@pytest.fixture
def result_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a benchmark; returns its last line, which has the machine and the commit."""

    def run(benchmark: ModuleType, *arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["benchmark", *shlex.split(" ".join(arguments))])
        benchmark.main()
        result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert result["commit"] and result["hardware"]["cpu"]
        return result

    return run


@pytest.fixture
def refusal_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a benchmark that ends with exit code 2; returns its sentence."""

    def run(benchmark: ModuleType, arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["benchmark", *shlex.split(arguments)])
        with pytest.raises(SystemExit) as ended:
            harness.run(benchmark.main)
        assert ended.value.code == 2
        return capsys.readouterr().err

    return run
