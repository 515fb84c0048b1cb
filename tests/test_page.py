"""The live page in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from client import servers
from client.calls import get, post
from client.data import PromptData
from client.histories import serve_again
from config import build
from live import page as live_page
from simulate.costs import FAKE
from tests.servers import server

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium"
)
PATIENCE_MS = 30_000
SLOW = {"model": "fake", "max_batch_size": 4, "loop_interval_ms": 10}  # 2,000 iterations last long
COUNTED = ("live", "idle", "padding", "recomputed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages in which nothing may go wrong: no error, no dialog of a script."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE_MS)

    def refuse(dialog: Any) -> None:
        wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def listen(said: Any) -> None:
        # what the network does the browser says itself
        if said.type == "error" and not said.text.startswith("Failed to load resource"):
            wrong.append(said.text)

    def make(address: str) -> Any:
        tab = context.new_page()
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("dialog", refuse)
        tab.on("console", lambda said: listen(said))
        tab.goto(address)
        return tab

    yield make
    context.close()
    assert not wrong


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
    """Playwright's own way to wait needs eval, which the page's security policy refuses."""
    wait_until(lambda: tab.evaluate(condition))


def wait_until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_MS / 1e3
    while not true():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.05)


@contextlib.contextmanager
def at_port(port: int, mode: str) -> Iterator[str]:
    """A server where another one was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "free_port", lambda: port)
        with server(mode, SLOW) as url:
            yield url


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_cells_appear_as_a_load_is_served_and_are_what_stats_count(
    mode: str, opened: Callable[..., Any]
) -> None:
    with server(mode, SLOW) as url:
        tab = opened(url)
        assert tab.url.endswith("/live")
        comes_true(tab, "liveForTests.state().frames > 0")
        post(f"{url}/stats/reset")
        sends_load(tab)
        comes_true(tab, "liveForTests.state().next > 20")
        comes_true(tab, "!document.getElementById('loaded').textContent.includes('left')")
        wait_until(lambda: get(f"{url}/live/events")["load"] is None)
        last = get(f"{url}/live/events")["next"]
        comes_true(tab, f"liveForTests.state().next === {last}")
        stats = get(f"{url}/stats")
        counted = tab.evaluate("liveForTests.counts(0, 1e9)")
        assert {kind: counted[kind] for kind in COUNTED} == {
            kind: stats[f"{kind}_rows"] for kind in COUNTED
        }
        assert (stats["idle_rows"] > 0) == (mode == "static") and stats["completed"] > 10
        assert state(tab)["requests"] >= stats["completed"]


def test_pausing_holds_still_and_steps_and_scrubs(opened: Callable[..., Any]) -> None:
    with server("dynamic", SLOW) as url:
        tab = opened(url)
        sends_load(tab, seconds=20)
        comes_true(tab, "liveForTests.state().next > 50")
        tab.keyboard.press("Escape")
        tab.click("#pause")
        comes_true(tab, "liveForTests.state().paused")
        before = state(tab)["next"]
        time.sleep(0.7)
        assert state(tab)["next"] == before, "nothing new is taken"
        seen = [tab.inner_text("#clock")]
        for button in ("back", "oldest", "forth"):
            tab.click(f"#{button}")
            comes_true(tab, f"document.getElementById('clock').innerText !== {seen[-1]!r}")
            seen.append(tab.inner_text("#clock"))
        iterations = [int(told.split()[1]) for told in seen]
        assert iterations[1] == iterations[0] - 1 and iterations[3] == iterations[2] + 1
        assert iterations[2] < iterations[1]
        tab.locator("#scrub").fill("30")
        comes_true(tab, "document.getElementById('clock').innerText.startsWith('iteration 30 ')")
        tab.click("#newest")  # it goes on
        comes_true(tab, f"liveForTests.state().next > {before + 20}")
        tab.click("#unload")
        wait_until(lambda: get(f"{url}/live/events")["load"] is None)


def test_a_key_is_asked_for_and_kept_in_the_tab(opened: Callable[..., Any]) -> None:
    with server("dynamic", SLOW, key="sesame") as url:
        tab = opened(url)
        tab.wait_for_selector("#door[open]")
        tab.fill("#key", "wrong")
        tab.click("#unlock button")
        comes_true(tab, "document.getElementById('refused').textContent !== ''")
        tab.fill("#key", "sesame")
        tab.click("#unlock button")
        tab.wait_for_selector("#door", state="hidden")
        comes_true(tab, "document.getElementById('name').textContent.includes('dynamic')")
        assert "sesame" not in tab.url and "sesame" not in tab.title()
        assert tab.evaluate("Object.keys(localStorage).length") == 0
        tab.reload()
        comes_true(tab, "document.getElementById('name').textContent.includes('dynamic')")


def test_it_goes_on_by_itself_when_a_server_is_back(opened: Callable[..., Any]) -> None:
    with server("dynamic", SLOW) as url:
        port = int(url.rsplit(":", 1)[1])
        tab = opened(url)
        sends_load(tab, seconds=1)
        comes_true(tab, "liveForTests.state().next > 5")
    tab.wait_for_selector("#problem:not([hidden])")
    assert "trying again" in tab.inner_text("#problem")
    with at_port(port, "static") as url:
        tab.wait_for_selector("#problem", state="hidden")
        comes_true(tab, "document.getElementById('name').textContent.includes('static')")
        sends_load(tab, seconds=1)
        comes_true(tab, "liveForTests.state().next > 5")
        wait_until(lambda: get(f"{url}/live/events")["load"] is None)


def test_ten_tabs_see_the_same(opened: Callable[..., Any]) -> None:
    with server("dynamic", SLOW) as url:
        tabs = [opened(url) for _ in range(10)]
        for tab in tabs:
            comes_true(tab, "liveForTests.state().frames > 0")
        sends_load(tabs[-1], seconds=1)
        wait_until(lambda: is_answered(url, 5) and get(f"{url}/live/events")["load"] is None)
        last = get(f"{url}/live/events")["next"]
        counts = []
        for tab in tabs:
            tab.bring_to_front()  # one that nobody sees asks seldom
            comes_true(tab, f"liveForTests.state().next === {last}")
            counts.append(tab.evaluate("liveForTests.counts(0, 1e9)"))
        assert counts[0]["live"] > 50 and all(each == counts[0] for each in counts)


def test_an_answer_streams_into_the_page(opened: Callable[..., Any]) -> None:
    with server("dynamic", {"model": "fake", "loop_interval_ms": 5}) as url:
        tab = opened(url)
        tab.fill("#prompt", "one two three")
        tab.fill("#tokens", "40")
        tab.click("#ask button[type=submit]")
        comes_true(tab, "document.getElementById('answer').textContent.length > 5")
        wait_until(lambda: is_answered(url))
        comes_true(tab, "document.getElementById('stop').disabled")
        told = get(f"{url}/live/events")
        assert [end[4] for end in told["ended"]] == [40]


def test_what_strangers_write_is_text_and_visible(opened: Callable[..., Any]) -> None:
    hostile = "<img src=x onerror=alert(1)> \u202egnol\u0000 <script>alert(2)</script>"
    with server("dynamic", SLOW | {"live_prompts": True}) as url:
        tab = opened(url)
        comes_true(tab, "liveForTests.state().frames > 0")
        body = {"prompt": hostile, "num_tokens": 30, "user": "<b>\u202eeve</b>"}
        post(f"{url}/inference", body)
        comes_true(tab, "liveForTests.state().next > 20")
        tab.click("#pause")
        tab.focus("#plots canvas[tabindex]")
        tab.keyboard.press("ArrowDown")
        tab.keyboard.press("Home")
        comes_true(tab, "document.getElementById('cell').textContent.includes('eve')")
        shown = tab.inner_text("#cell")
        assert "<b>" in shown and "onerror=alert(1)" in shown and "202E" in shown
        assert "\u202e" not in shown and tab.query_selector("#cell b, #cell img") is None
        assert "eve" not in tab.url + tab.title()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of two simulated servers."""
    trace = PromptData(seed=1).requests(30, "poisson:60")
    histories = [
        serve_again(mode, build(mode, {"model": "fake", "max_batch_size": 8}, {}), FAKE, trace, "x")
        for mode in ("static", "dynamic")
    ]
    path = tmp_path_factory.mktemp("saved") / "live.html"
    path.write_text(live_page.saved(histories))
    return path


def test_a_saved_page_needs_no_server_and_says_that_it_is_simulated(
    saved: Path, opened: Callable[..., Any]
) -> None:
    asked: list[str] = []
    tab = opened("about:blank")
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(saved.as_uri())
    comes_true(tab, "liveForTests.state().frames > 0")
    assert asked == [saved.as_uri()]
    text = tab.inner_text("body")
    assert text.count("simulated, costs fake") >= 2 and "static" in text and "dynamic" in text
    assert not tab.is_visible("#loading") and not tab.is_visible("#asking")
    told = json.loads(saved.read_text().split('id="runs">')[1].split("</script>")[0])
    n = [len(history["iterations"]) for history in told]
    tab.select_option("#speed", index=0)
    tab.keyboard.press("End")
    time.sleep(0.3)
    assert state(tab)["next"] <= max(n)
