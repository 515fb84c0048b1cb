"""The live page of each server behind a front end, in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from client.calls import get
from tests.browser import comes_true, sends_load, wait_until
from tests.fronts import EVERY_FRONT, FRONTS, servers_of

SLOW: dict[str, Any] = {"model": "fake", "max_batch_size": 2, "loop_interval_ms": 20}


@pytest.mark.extra
# not among test_conformance.py's: Playwright runs a loop, which clients there cannot have
@pytest.mark.parametrize("front", EVERY_FRONT[1:])
def test_the_page_of_each_server_shows_its_own_rows_asks_it_and_loads_it(
    front: str, opened: Callable[..., Any]
) -> None:
    with FRONTS[front]("dynamic", SLOW, None) as url:
        *others, own = servers_of(url)
        assert others
        tab = opened(f"{own}/live")
        comes_true(tab, "liveForTests.state().frames > 0")
        tab.fill("#tokens", "3")
        tab.click("#ask button[type=submit]")
        wait_until(lambda: get(f"{own}/stats")["completed"] == 1)
        sends_load(tab, seconds=1, rate=5)
        wait_until(lambda: get(f"{own}/stats")["completed"] > 1)
        comes_true(tab, "liveForTests.state().next > 3")
        assert not any(get(f"{other}/stats")["completed"] for other in others)
