"""The live page with saved runs in it, in a real browser, from disk."""

from __future__ import annotations

import json
import time
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
from tests.drawn import LETTERS, PALETTE, colours, every_kind, is_whole, meanings, pixels

pytestmark = pytest.mark.extra

NAMES = {
    "p": "prefill", "i": "idle", "r": "recomputed", "w": "no token budget left", "s": "paused",
    "u": "unknown", "d": "decode",
}  # fmt: skip
CHIPS = """() => [...document.querySelectorAll('.legend li')].map((item) => {
  const {width, height} = item.firstChild, context = item.firstChild.getContext('2d');
  const {data} = context.getImageData(0, 0, width, height);
  return [item.innerText.trim(), [...new Uint32Array(data.buffer)]];
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
    runs = json.loads(saved.read_text().split('id="runs">')[1].split("</script>")[0])
    n = [len(history["iterations"]) for history in runs]
    tab.select_option("#speed", index=0)
    tab.keyboard.press("End")
    time.sleep(0.3)
    assert state(tab)["next"] <= max(n)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_each_request_has_a_colour_and_each_kind_a_texture_that_the_legend_shows(
    theme: str, opened: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "every-kind.html").write_text(every_kind())
    tab = opened((tmp_path / "every-kind.html").as_uri())
    tab.emulate_media(color_scheme=theme)
    comes_true(tab, f"document.documentElement.dataset.theme === {theme!r}")
    is_whole(tab)
    early, late = (colours(tab, i)[:PALETTE] for i in (len(LETTERS), 2 * len(LETTERS)))
    assert early == late and all(len(cell) == 1 for cell in early), "decode is one plain colour"
    assert len({*early}) == PALETTE, "requests differ"
    chips = dict(tab.evaluate(CHIPS))
    drafts = {f"draft, {ending}" for ending in ("accepted", "rejected")}
    assert set(chips) == {*NAMES.values(), *drafts, "padding"}
    assert len({tuple(chip) for chip in chips.values()}) == 10, "textures differ"
    cells = {letter: pixels(tab, i) for i, letter in enumerate(LETTERS)}
    shown = 14  # the request whose colour the legend has
    for letter, name in NAMES.items():
        assert set(cells[letter][shown]) == set(chips[name]), name
    assert set(cells["v"][shown]) == set().union(*(chips[name] for name in ("decode", *drafts)))
    assert set(cells["d"][PALETTE]) == set(chips["padding"])
    [decoded] = early[shown]
    idle = cells["i"][shown]
    assert 0 < idle.count(decoded) < len(idle) / 4, "its request's colour, but for most of it dim"
    assert cells["s"][shown][0] == decoded != cells["w"][shown][0], "paused: a line at its edges"
    # of all requests: prefill, recomputed, idle, paused and decode with drafts or without; nobody's
    assert len(meanings(tab)) == 6 * PALETTE + 2


def test_where_requests_name_adapters_a_colour_and_a_letter_are_an_adapter(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "adapters.html").write_text(every_kind("", "sql", "of/docs"))
    tab = opened((tmp_path / "adapters.html").as_uri())
    is_whole(tab)
    cells = colours(tab, 2 * len(LETTERS))[:PALETTE]
    assert cells == (6 * cells[:3])[:PALETTE] and len({*cells}) == 3
    assert tab.inner_text(".adapters").split() == ["base", "model", "A", "sql", "B", "of/docs"]
    base, sql, docs = pixels(tab, 0)[:3]
    assert len({*base}) < len({*sql}) and {*sql} != {*docs}, "letters where rows begin"
