"""Each fault is done to a server of one HTTP process, and, with --all, to one of three."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, params=[1, pytest.param(3, marks=pytest.mark.nightly)])
def http_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("EB_HTTP_PROCESSES", str(request.param))
    return int(request.param)
