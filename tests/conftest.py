"""Leaks are found here: after every test no handler thread may live on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from app import create_app
from batching import BatchingManager
from config import build

SHARED_BPE = Path(__file__).resolve().parents[2] / "shared" / "tiktoken_cache"
if "TIKTOKEN_CACHE_DIR" not in os.environ and SHARED_BPE.is_dir():
    os.environ["TIKTOKEN_CACHE_DIR"] = str(SHARED_BPE)
for name in [name for name in os.environ if name.startswith("EB_")]:
    del os.environ[name]  # a developer's own settings have no business in the tests
# the same tests everywhere: a GPU has benchmarks/gpu.sh, and its attention kernel runs in Triton's interpreter here
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}


@pytest.fixture(autouse=True)
def no_handler_thread_lives_on() -> Iterator[None]:
    yield
    left = [thread for thread in threading.enumerate() if thread.name == "handler"]
    for thread in left:
        thread.join(timeout=5)
    assert not [thread for thread in left if thread.is_alive()], "a test did not close its BatchingManager"


@pytest.fixture
def client_of() -> Iterator[Callable[..., FlaskClient]]:
    """Clients of apps in this process, on the fake model unless another is named, by mode and settings."""
    managers: list[BatchingManager] = []

    def make(mode: str = "dynamic", manager: BatchingManager | None = None, **settings: Any) -> FlaskClient:
        app = create_app(build(mode, {"model": "fake", **settings}, {}), manager)
        managers.append(app.extensions["manager"])
        return app.test_client()

    yield make
    for manager in managers:
        manager.close()
        left = manager.snapshot()
        assert (left.waiting, left.running, left.blocks_used) == (0, 0, 0), "requests or blocks were lost"
