"""Leaks are found here: after every test no handler thread may live on."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED_BPE = Path(__file__).resolve().parents[2] / "shared" / "tiktoken_cache"
if "TIKTOKEN_CACHE_DIR" not in os.environ and SHARED_BPE.is_dir():
    os.environ["TIKTOKEN_CACHE_DIR"] = str(SHARED_BPE)
for name in [name for name in os.environ if name.startswith("EB_")]:
    del os.environ[name]  # a developer's own settings have no business in the tests


@pytest.fixture(autouse=True)
def no_handler_thread_lives_on() -> Iterator[None]:
    yield
    left = [thread for thread in threading.enumerate() if thread.name == "handler"]
    for thread in left:
        thread.join(timeout=5)
    assert not [thread for thread in left if thread.is_alive()], "a test did not close its BatchingManager"
