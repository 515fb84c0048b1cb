"""A machine without a GPU, and one with a GPU."""

from __future__ import annotations

import pytest

from generate import auto, kernels


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "gpu_is_usable", lambda: False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "gpu_is_usable", lambda: True)
    monkeypatch.setattr(kernels, "why_no_triton", lambda head_size: None)
