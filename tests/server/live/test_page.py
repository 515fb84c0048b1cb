"""The live page in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from client.calls import ServerError, get, get_text, post
from client.workloads import Workload
from compare import servers
from generate.auto import build
from server.live import page as live_page
from simulate.costs import FAKE
from simulate.saved_page import serve_again
from tests.server.fronts import EVERY_FRONT, FRONTS, servers_of
from tests.server.live.shown import CASES, assert_stats_say, rows_of
from tests.servers import server, started
from tests.servers import wait_until as waited

pytestmark = pytest.mark.extra


NEXT = "liveForTests.state().next"
OVER = "!document.getElementById('loaded').textContent.includes('left')"


def state(tab: Any) -> dict[str, Any]:
    return dict(tab.evaluate("liveForTests.state()"))


def sends_load(tab: Any, seconds: int = 2, rate: int = 200) -> None:
    """Start a load from the page; rate: of its slider, which is logarithmic."""
    tab.evaluate(f"document.getElementById('rate').value = {rate}")
    tab.fill("#most", "20")
    tab.fill("#seconds", str(seconds))
    tab.click("#loading button[type=submit]")


def wait_until(true: Callable[[], bool]) -> None:
    waited(true, 30, every_s=0.05)


def comes_true(tab: Any, condition: str) -> None:
    """Wait for a condition. Playwright's own way needs eval, which the page's policy refuses."""
    wait_until(lambda: bool(tab.evaluate(condition)))


def says(tab: Any, id_: str, text: str) -> None:
    """Wait until an element has a text in it."""
    comes_true(tab, f"document.getElementById({id_!r}).textContent.includes({text!r})")


def ends_load(url: str) -> None:
    wait_until(lambda: get(f"{url}/live/events")["load"] is None)


SLOW = {"model": "fake", "max_batch_size": 4, "loop_interval_ms": 10}  # 2,000 iterations last long
COUNTS = """() => {
  const {first, next} = liveForTests.state(), {counts} = liveForTests;
  return Array.from({length: next - first}, (_, i) => counts(first + i, first + i + 1));
}"""


@contextlib.contextmanager
def at_port(port: int, mode: str, **settings: Any) -> Iterator[str]:
    """A server where another one was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "free_port", lambda: port)
        with server(mode, SLOW | settings) as url:
            yield url


@pytest.mark.parametrize("name", ["windowed, padding", "demand, few blocks", "srpt"])
def test_rows_of_a_load_are_what_stats_say(name: str, opened: Callable[..., Any]) -> None:
    mode, flags, has = CASES[name]
    with server(mode, {**SLOW, **flags}) as url:
        tab = opened(url)
        assert tab.url.endswith("/live")
        comes_true(tab, "liveForTests.state().frames > 0")
        post(f"{url}/stats/reset")
        sends_load(tab, seconds=2)  # in one second srpt once had no reason to pause a row
        comes_true(tab, f"{NEXT} > 20")
        comes_true(tab, OVER)
        ends_load(url)
        comes_true(tab, f"{NEXT} === {get(f'{url}/live/events')['next']}")
        stats, counts = get(f"{url}/stats?iterations=1"), tab.evaluate(COUNTS)
        assert_stats_say(counts, stats, has)
        assert counts == rows_of(get(f"{url}/live/events"))[-len(counts) :]
        assert stats["completed"] > 10 and state(tab)["requests"] >= stats["completed"]


def test_pausing_holds_still_and_steps_and_scrubs(opened: Callable[..., Any]) -> None:
    with server("dynamic", SLOW) as url:
        tab = opened(url)
        sends_load(tab, seconds=20)
        comes_true(tab, f"{NEXT} > 50")
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
        last, one_back, oldest, second = (int(text.split()[1]) for text in seen)
        assert one_back == last - 1 and second == oldest + 1 < one_back
        tab.locator("#scrub").fill("30")
        says(tab, "clock", "iteration 30 ")
        tab.click("#newest")  # it goes on
        comes_true(tab, f"{NEXT} > {before + 20}")
        tab.click("#unload")
        ends_load(url)


def test_a_key_is_asked_for_and_kept_in_the_tab(opened: Callable[..., Any]) -> None:
    with server("dynamic", SLOW, key="sesame") as url:
        tab = opened(url)
        tab.wait_for_selector("#key-dialog[open]")
        tab.fill("#key", "“sesame”")  # a header cannot have it: no request was sent ever after
        tab.click("#unlock button")
        assert tab.evaluate("document.getElementById('key').validity.patternMismatch")
        for key, then in (("wrong", "#refused:not(:empty)"), ("sesame", "#name:text('dynamic')")):
            tab.fill("#key", key)
            tab.click("#unlock button")
            tab.wait_for_selector(then)
        assert not tab.is_visible("#key-dialog")
        assert "sesame" not in tab.url and "sesame" not in tab.title()
        assert tab.evaluate("Object.keys(localStorage).length") == 0
        tab.reload()
        says(tab, "name", "dynamic")


def test_it_goes_on_by_itself_when_a_server_is_back(opened: Callable[..., Any]) -> None:
    with server("dynamic", SLOW) as url:
        port = int(url.rsplit(":", 1)[1])
        tab = opened(url)
        sends_load(tab, seconds=1)
        comes_true(tab, f"{NEXT} > 5")
    tab.wait_for_selector("#problem:not([hidden])")
    says(tab, "problem", "trying again")
    with at_port(port, "static", model="demo", max_model_len=96) as url:
        tab.wait_for_selector("#problem", state="hidden")
        says(tab, "name", "static")
        comes_true(tab, "document.getElementById('tokens').value === '48'")
        tab.click("#ask button[type=submit]")
        says(tab, "latency", "finished")  # "There is no model 'fake' here"
        sends_load(tab, seconds=1)
        comes_true(tab, f"{NEXT} > 5")
        ends_load(url)


HOSTILE = "<img src=x onerror=alert(1)>\u202egnol</script><script>alert(2)</script>"


def test_a_prompt_of_a_megabyte_is_refused_and_none_is_shown(opened: Callable[..., Any]) -> None:
    with started("--loop-interval-ms", "5") as (url, process):
        tab = opened(url)
        comes_true(tab, "liveForTests.state().frames > 0")
        for n_bytes, message in (
            (900_000, "The prompt is longer than the context of 1024 tokens"),
            (1_200_000, "The body is larger than 1,000,000 bytes"),
        ):
            prompt = HOSTILE * (n_bytes // len(HOSTILE.encode()))
            with pytest.raises(ServerError, match=message):
                post(f"{url}/inference", {"prompt": prompt, "num_tokens": 20})
            tab.fill("#prompt", prompt)
            tab.click("#ask button[type=submit]")
            says(tab, "answer", message)
        tab.fill("#prompt", HOSTILE)  # one that is answered
        tab.fill("#tokens", "40")
        tab.click("#ask button[type=submit]")
        comes_true(tab, "document.getElementById('answer').textContent.length === 40")
        wait_until(lambda: get(f"{url}/stats")["completed"] > 0)
        comes_true(tab, "document.getElementById('stop').disabled")
        events = get(f"{url}/live/events")
        assert [end[4] for end in events["ended"]] == [40] and events["next"] > 10
        comes_true(tab, f"{NEXT} === {events['next']}")
        tab.fill("#prompt", "")
        places = [get_text(f"{url}/live/events"), tab.url, tab.title(), tab.content()]
        process.terminate()
        assert process.stdout is not None
        for place in (*places, process.stdout.read()):  # the last one is its log
            assert not re.search(r"onerror|gnol|alert\(", place)
        assert '"requests":[[0,' in places[0], "it was seen"


def test_what_strangers_write_is_text_and_visible(opened: Callable[..., Any]) -> None:
    with server("dynamic", SLOW | {"live": "prompts"}) as url:
        tab = opened(url)
        comes_true(tab, "liveForTests.state().frames > 0")
        post(f"{url}/inference", {"prompt": HOSTILE, "num_tokens": 30, "user": "<b>\u202eeve</b>"})
        comes_true(tab, f"{NEXT} > 20")
        tab.click("#pause")
        tab.focus("#plots canvas[tabindex]")
        tab.keyboard.press("ArrowDown")
        tab.keyboard.press("Home")
        says(tab, "cell", "eve")
        shown = tab.inner_text("#cell")
        assert "<b>" in shown and "onerror=alert(1)" in shown and "202E" in shown
        assert "\u202e" not in shown and tab.query_selector("#cell b, #cell img") is None
        assert "eve" not in tab.url + tab.title()


def test_a_prompt_in_place_of_another_has_its_own_answer(opened: Callable[..., Any]) -> None:
    """The new answer began with "(stopped)", which is of the old one."""
    with server("dynamic", SLOW) as url:
        tab = opened(url)
        for tokens in ("500", "30"):
            tab.fill("#tokens", tokens)
            tab.click("#ask button[type=submit]")
            comes_true(tab, "document.getElementById('answer').textContent.length > 0")
        comes_true(tab, "document.getElementById('stop').disabled")
        assert tab.evaluate("document.getElementById('answer').textContent.length") == 30


def test_a_click_on_a_row_shows_where_its_time_went(opened: Callable[..., Any]) -> None:
    """A prompt that is asked from the page is pinned, too: by its X-Request-Id."""
    with server("dynamic", SLOW) as url:
        tab = opened(url)
        tab.fill("#tokens", "30")
        tab.click("#ask button[type=submit]")
        says(tab, "latency", "Request 0: ")
        says(tab, "latency", "finished")
        assert "prefill" in tab.inner_text("#parts")
        says(tab, "where", "0 is pinned")  # with the next frame
        tab.keyboard.press("Escape")
        comes_true(tab, "document.getElementById('why').hidden")
        tab.click("#plots canvas[tabindex]", position={"x": 400, "y": 4})
        says(tab, "latency", "Request 0: ")


TWO_FRAMES = "new Promise((d) => requestAnimationFrame(() => requestAnimationFrame(d)))"
REQUESTS = 16  # as many colours as there are
# what lines do in iterations 0, 1, …; the last lasts
NAMES = {
    "p": "prefill", "i": "idle", "r": "recomputed", "w": "no token budget left", "s": "paused",
    "d": "decode",
}  # fmt: skip
# of an iteration the colours of each line's cell, without the thin line that is left between cells
COLOURS = """([iteration, lines]) => {
  const canvas = document.querySelector('canvas[tabindex]'), height = canvas.height / lines;
  const context = canvas.getContext('2d'), [x, width] = liveForTests.column(iteration);
  return Array.from({length: lines}, (_, line) => {
    const {data} = context.getImageData(x + 1, line * height, width - 1, height - 1);
    return [...new Set(new Uint32Array(data.buffer))];
  });
}"""
CHIPS = """() => [...document.querySelectorAll('.legend li')].map((item) => {
  const {width, height} = item.firstChild, context = item.firstChild.getContext('2d');
  const {data} = context.getImageData(0, 0, width, height);
  return [item.innerText.trim(), [...new Set(new Uint32Array(data.buffer))]];
})"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of two simulated servers."""
    trace = Workload(seed=1).requests(30, "poisson:60")
    settings = {"model": "fake", "max_batch_size": 8}
    histories = [
        serve_again(mode, build(mode, settings, {}), FAKE, trace, "x", False)
        for mode in ("static", "dynamic")
    ]
    path = tmp_path_factory.mktemp("saved") / "live.html"
    path.write_text(live_page.saved(histories))
    return path


def test_a_run_that_is_over_in_its_first_frame_is_shown(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    """Its plots were empty: nothing moved the view once it had paused."""
    config = build("dynamic", {"model": "fake"}, {})
    trace = Workload(seed=1, lengths="fixed:5").requests(3, "burst")
    (tmp_path / "short.html").write_text(
        live_page.saved([serve_again("dynamic", config, FAKE, trace, "x", False)])
    )
    tab = opened((tmp_path / "short.html").as_uri())
    comes_true(tab, "liveForTests.state().paused")
    width = tab.evaluate("document.querySelector('canvas[tabindex]').width")
    assert tab.evaluate("liveForTests.column(0)[0]") < width


def test_a_saved_page_needs_no_server(saved: Path, opened: Callable[..., Any]) -> None:
    requested: list[str] = []
    tab = opened("about:blank")
    tab.on("request", lambda request: requested.append(request.url))
    tab.goto(saved.as_uri())
    comes_true(tab, "liveForTests.state().frames > 0")
    assert requested == [saved.as_uri()]
    text = tab.inner_text("body")
    assert text.count("simulated, costs fake") >= 2 and "static" in text and "dynamic" in text
    assert not tab.is_visible("#loading") and not tab.is_visible("#asking")


def every_kind(*adapters: str, blocks: Sequence[int] = (50, 0)) -> str:
    """A page made by hand: request k is on line k, and does there what NAMES say; below them are a
    line of padding and a free one. adapters: of requests, in turn. blocks: used, and shared; −1 is
    unknown.
    """
    used, shared = blocks
    about = {
        "name": "every kind", "mode": "dynamic", "model": "fake", "order": "fcfs",
        "max_batch_size": REQUESTS + 2, "token_budget": 256, "n_blocks": 100, "block_size": 16,
        "simulated": "made by hand",
    }  # fmt: skip
    iterations = []
    for i in range(40):  # in sight at once they are wide, and have no room for figures
        changes: list[Any] = []
        for kind, k in itertools.product([*NAMES][i : i + 1], range(REQUESTS)):
            changes += [k, k, kind, 1 if kind == "d" else 4, 0, 0]
        iterations.append([0.1 * i, 0.1, 0, REQUESTS, used, 1, changes])
    history = {
        "about": about, "now": 4, "restart": True, "first": 0, "next": 40, "lines": [],
        "iterations": iterations, "ended": [], "snapshots": [[0, 50, shared, 0, []]],
        "requests": [
            [k, 0.0, 4, 100, None, 0, None, adapters[k % len(adapters)]] for k in range(REQUESTS)
        ],
    }  # fmt: skip
    return live_page.saved([json.dumps(history)])


def test_blocks_that_a_recording_leaves_out_are_no_number(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    """101 of 100 blocks were free."""
    (tmp_path / "page.html").write_text(every_kind("", blocks=(-1, -1)))
    tab = opened((tmp_path / "page.html").as_uri())
    says(tab, "blocks", "– used, – free; shared and cached unknown")
    parts = "[...document.getElementById('pool').children]"
    assert tab.evaluate(f"{parts}.every((part) => part.offsetWidth === 0)")


def colours(tab: Any, iteration: int) -> list[frozenset[int]]:
    return [frozenset(cell) for cell in tab.evaluate(COLOURS, [iteration, state(tab)["lines"]])]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_requests_have_own_colours(theme: str, opened: Callable[..., Any], tmp_path: Path) -> None:
    """Or their adapters have."""
    tabs = []
    for name, adapters in (("none", [""]), ("two", ["", "sql", "of/docs"])):
        (tmp_path / f"{name}.html").write_text(every_kind(*adapters))
        tabs.append(tab := opened((tmp_path / f"{name}.html").as_uri()))
        tab.emulate_media(color_scheme=theme)
        comes_true(tab, f"document.documentElement.dataset.theme === {theme!r}")
        tab.keyboard.press("End")  # it shows all of its run, and stands still
        comes_true(tab, "liveForTests.state().paused")
        tab.evaluate(TWO_FRAMES)
    decoding, of_adapters = (colours(tab, 30)[:REQUESTS] for tab in tabs)
    assert len({*decoding}) == REQUESTS and {*map(len, decoding)} == {1}, "one plain colour each"
    assert of_adapters == (6 * of_adapters[:3])[:REQUESTS] and len({*of_adapters}) == 3
    assert tabs[1].inner_text(".adapters").split() == ["base", "model", "A", "sql", "B", "of/docs"]
    chips = dict(tabs[0].evaluate(CHIPS))
    assert {*NAMES.values(), "padding", "draft, accepted", "draft, rejected"} == {*chips}
    for i, name in enumerate(NAMES.values()):
        assert colours(tabs[0], i)[14] == frozenset(chips[name]), name  # the legend has its colour
    assert colours(tabs[0], 30)[REQUESTS] == frozenset(chips["padding"])


# not among test_conformance.py's: Playwright runs a loop, which clients there cannot have
def test_lengths_on_a_page_fit_a_small_context(opened: Callable[..., Any]) -> None:
    """A load and a prompt as they stand on the page were refused, and Stop was, too."""
    with server("dynamic", SLOW | {"max_model_len": 32, "kv_cache": "8blocks"}) as url:
        tab = opened(url)
        comes_true(tab, "document.getElementById('most').value === '16'")
        tab.click("#ask button[type=submit]")
        comes_true(tab, "document.getElementById('answer').textContent.length === 16")
        tab.click("#loading button[type=submit]")
        says(tab, "loaded", "in flight")
        tab.click("#unload")
        ends_load(url)


TWO_ROWS: dict[str, Any] = {"model": "fake", "max_batch_size": 2, "loop_interval_ms": 20}


@pytest.mark.parametrize("front", EVERY_FRONT[-1:])
def test_the_page_of_each_server_shows_its_own_rows(front: str, opened: Callable[..., Any]) -> None:
    with FRONTS[front]("dynamic", TWO_ROWS, None) as url:
        *others, own = servers_of(url)
        assert others
        tab = opened(f"{own}/live")
        comes_true(tab, "liveForTests.state().frames > 0")
        tab.fill("#tokens", "3")
        tab.click("#ask button[type=submit]")
        wait_until(lambda: get(f"{own}/stats")["completed"] == 1)
        sends_load(tab, seconds=1, rate=5)
        wait_until(lambda: get(f"{own}/stats")["completed"] > 1)
        comes_true(tab, f"{NEXT} > 3")
        assert not any(get(f"{other}/stats")["completed"] for other in others)
