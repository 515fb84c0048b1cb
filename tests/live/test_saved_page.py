"""The live page with saved runs in it, in a real browser, from disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from client.workloads import Workload
from config import build
from live import page as live_page
from live.saved import serve_again
from simulate.costs import FAKE
from tests.browser import comes_true, state

pytestmark = pytest.mark.extra

REQUESTS = 16  # as many colours as there are
# what lines do in iterations 0, 1, …; the last lasts
NAMES = {
    "p": "prefill", "i": "idle", "r": "recomputed", "w": "no token budget left", "s": "paused",
    "u": "unknown", "d": "decode",
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
    requested: list[str] = []
    tab = opened("about:blank")
    tab.on("request", lambda request: requested.append(request.url))
    tab.goto(saved.as_uri())
    comes_true(tab, "liveForTests.state().frames > 0")
    assert requested == [saved.as_uri()]
    text = tab.inner_text("body")
    assert text.count("simulated, costs fake") >= 2 and "static" in text and "dynamic" in text
    assert not tab.is_visible("#loading") and not tab.is_visible("#asking")


def every_kind(*adapters: str) -> str:
    """A page made by hand: request k is on line k, and does there what NAMES say; below them are a
    line of padding and a free one. adapters: of requests, in turn.
    """
    about = {
        "name": "every kind", "mode": "dynamic", "model": "fake", "order": "fcfs",
        "max_batch_size": REQUESTS + 2, "token_budget": 256, "n_blocks": 100, "block_size": 16,
        "simulated": "made by hand",
    }  # fmt: skip
    iterations = []
    for i in range(40):  # in sight at once they are wide, and have no room for figures
        kinds = [*NAMES][i : i + 1]
        changes = [
            word
            for kind in kinds
            for k in range(REQUESTS)
            for word in (k, k, kind, 1 if kind == "d" else 4, 0, 0)
        ]
        iterations.append([0.1 * i, 0.1, 0, REQUESTS, 50, 1, changes])
    history = {
        "about": about, "now": 4, "restart": True, "first": 0, "next": 40, "lines": [],
        "iterations": iterations, "ended": [], "snapshots": [[0, 50, 0, 0, []]],
        "requests": [
            [k, 0.0, 4, 100, None, 0, None, adapters[k % len(adapters)]] for k in range(REQUESTS)
        ],
    }  # fmt: skip
    return live_page.saved([json.dumps(history)])


def show_all(tab: Any) -> None:
    """A saved page shows all of its run, and stands still."""
    tab.keyboard.press("End")
    comes_true(tab, "liveForTests.state().paused")
    tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def colours(tab: Any, iteration: int) -> list[frozenset[int]]:
    return [frozenset(cell) for cell in tab.evaluate(COLOURS, [iteration, state(tab)["lines"]])]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_each_request_has_a_colour_and_each_kind_a_texture_that_the_legend_shows(
    theme: str, opened: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "every-kind.html").write_text(every_kind(""))
    tab = opened((tmp_path / "every-kind.html").as_uri())
    tab.emulate_media(color_scheme=theme)
    comes_true(tab, f"document.documentElement.dataset.theme === {theme!r}")
    show_all(tab)
    decoding = colours(tab, 30)[:REQUESTS]
    assert len({*decoding}) == REQUESTS and {*map(len, decoding)} == {1}, "one plain colour each"
    chips = dict(tab.evaluate(CHIPS))
    assert {*NAMES.values(), "padding", "draft, accepted", "draft, rejected"} == {*chips}
    for i, name in enumerate(NAMES.values()):
        assert colours(tab, i)[14] == frozenset(chips[name]), name  # the legend has its colour
    assert colours(tab, 30)[REQUESTS] == frozenset(chips["padding"])


def test_where_requests_name_adapters_a_colour_is_an_adapter(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "adapters.html").write_text(every_kind("", "sql", "of/docs"))
    tab = opened((tmp_path / "adapters.html").as_uri())
    show_all(tab)
    cells = colours(tab, 30)[:REQUESTS]
    assert cells == (6 * cells[:3])[:REQUESTS] and len({*cells}) == 3
    assert tab.inner_text(".adapters").split() == ["base", "model", "A", "sql", "B", "of/docs"]
