"""Benchmarks in the tests' own process, on models so small that they take no time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.generate.conftest import in_order  # noqa: F401
from tests.programs import output


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Settings of a tiny model with GPT-2's vocabulary and context."""
    folder = tmp_path_factory.mktemp("small")
    shape = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32}
    folder.joinpath("config.json").write_text(json.dumps(shape))
    return f"--model {folder} --weights random --dtype float32 --threads 1"


def result_of(benchmark: str, *words: str) -> dict[str, Any]:
    """Run a benchmark; return its last line, which has the machine and the commit."""
    lines = output(f"lab.benchmarks.{benchmark}", " ".join(words)).splitlines()
    result: dict[str, Any] = json.loads(lines[-1])
    assert result["commit"] and result["hardware"]["cpu"]
    return result
