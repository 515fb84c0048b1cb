"""Steps of tests of the live page in a browser, which the fixtures `browser` and `opened` start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from client.calls import get
from tests import servers

PATIENCE_S = 30


def state(tab: Any) -> dict[str, Any]:
    return dict(tab.evaluate("liveForTests.state()"))


def sends_load(tab: Any, seconds: int = 2, rate: int = 200) -> None:
    """Start a load from the page; rate: of its slider, which is logarithmic."""
    tab.evaluate(f"document.getElementById('rate').value = {rate}")
    tab.fill("#most", "20")
    tab.fill("#seconds", str(seconds))
    tab.click("#loading button[type=submit]")


def is_answered(url: str, n: int = 1) -> bool:
    stats = get(f"{url}/stats")
    return bool(stats["completed"] >= n)


def comes_true(tab: Any, condition: str) -> None:
    """Wait for a condition in the page. Playwright's own way needs eval, which the page's security
    policy refuses.
    """
    wait_until(lambda: bool(tab.evaluate(condition)))


def wait_until(true: Callable[[], bool]) -> None:
    servers.wait_until(true, PATIENCE_S, every_s=0.05)
