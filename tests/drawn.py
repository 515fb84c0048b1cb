"""What is drawn in the cells of the live page's grid: the colours of its canvas' pixels."""

from __future__ import annotations

import json
from typing import Any

from live import page
from tests.browser import comes_true, state
from tests.shown import KINDS, Rows

Colours = frozenset[int]  # of a cell: red, green, blue and alpha in one number

PALETTE = 16  # colours that requests have
COLUMNS = 40  # in sight at once they are wide, and have no room for figures
# what lines do in iterations 0, 1, …; the last of them lasts; w, u and s differ by pattern alone
LETTERS = "pirwusvd"
# of an iteration the pixels of each line's cell, without the thin line that is left between cells
PIXELS = """([iteration, lines]) => {
  const canvas = document.querySelector('canvas[tabindex]'), height = canvas.height / lines;
  const context = canvas.getContext('2d'), [x, width] = liveForTests.column(iteration);
  return Array.from({length: lines}, (_, line) => {
    const {data} = context.getImageData(x + 1, line * height, width - 1, height - 1);
    return [...new Uint32Array(data.buffer)];
  });
}"""
IN_SIGHT = """() => {
  const {width} = document.querySelector('canvas[tabindex]'), {first, next} = liveForTests.state();
  return Array.from({length: next - first}, (_, i) => first + i).filter((i) => {
    const [x, wide] = liveForTests.column(i), gutter = 48;
    return x >= gutter && x + wide <= width;
  });
}"""
FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def pixels(tab: Any, iteration: int) -> list[list[int]]:
    """Of each line's cell."""
    return list(tab.evaluate(PIXELS, [iteration, state(tab)["lines"]]))


def colours(tab: Any, iteration: int) -> list[Colours]:
    return [frozenset(each) for each in pixels(tab, iteration)]


def every_kind(*adapters: str) -> str:
    """A page made by hand: request k is on line k, and does there what LETTERS say; below them are
    a line of padding and a free one. adapters: of requests, in turn.
    """
    adapters = adapters or ("",)
    about = {
        "name": "every kind", "mode": "dynamic", "model": "fake", "order": "fcfs",
        "max_batch_size": PALETTE + 2, "token_budget": 256, "n_blocks": 100, "block_size": 16,
        "simulated": "made by hand",
    }  # fmt: skip
    iterations = []
    for i in range(COLUMNS):
        letter = LETTERS[i : i + 1]
        # v: a decode of two tokens, and two rejected ones
        does = ("d", 2, 0, 2) if letter == "v" else (letter, 1 if letter == "d" else 4, 0, 0)
        changes = [word for k in range(PALETTE) for word in (k, k, *does) if letter]
        iterations.append([0.1 * i, 0.1, 0, PALETTE, 50, 1, changes])
    history = {
        "about": about, "now": 0.1 * COLUMNS, "restart": True, "first": 0, "next": COLUMNS,
        "lines": [], "iterations": iterations, "ended": [], "snapshots": [[0, 50, 0, 0, []]],
        "requests": [
            [k, 0.0, 4, 100, None, 0, None, adapters[k % len(adapters)]] for k in range(PALETTE)
        ],
    }  # fmt: skip
    return page.saved([json.dumps(history)])


def is_whole(tab: Any) -> None:
    """A saved page shows all of its run, and stands still."""
    tab.keyboard.press("End")
    comes_true(tab, "liveForTests.state().paused")
    tab.evaluate(FRAMES)


def meanings(tab: Any) -> dict[Colours, str]:
    """Which kind of row a cell of these colours is, by a page of every kind."""
    is_whole(tab)
    found: dict[Colours, str] = {}
    for i, letter in enumerate(LETTERS):
        *cells, padding, free = colours(tab, i)
        found |= dict.fromkeys(cells, KINDS.get(letter, "")) | {padding: "padding", free: "free"}
    return found


def drawn_rows(tab: Any, meaning: dict[Colours, str]) -> dict[int, Rows]:
    """Of each iteration in sight its rows, by what their colours mean."""
    found = {}
    for i in tab.evaluate(IN_SIGHT):
        rows = [meaning[each] for each in colours(tab, i)]
        found[i] = {kind: rows.count(kind) for kind in {*meaning.values()} - {"free"}}
    return found
