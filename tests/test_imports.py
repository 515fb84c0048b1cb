"""Imports point one way: what schedules and what measures never needs torch or flask."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("batching, policies, scheduler, stats, generate.fake", {"torch", "flask", "aiohttp", "matplotlib"}),
        ("client.client, client.compare", {"torch", "flask", "gunicorn", "tiktoken", "safetensors", "app"}),
        ("app", {"torch", "aiohttp", "matplotlib"}),
        ("policies, batching", {"numpy", "pydantic"}),
    ],
)
def test_a_module_loads_without_what_it_must_not_know(modules: str, absent: set[str]) -> None:
    program = f"import sys; import {modules}; print(*({absent!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
