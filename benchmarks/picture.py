"""The README's moving picture: static batching above, dynamic below, the same trace on one clock.

    python -m benchmarks.picture [--again] [--out docs/live.gif]

Of results/live, which --again makes anew: the rows of two simulated servers. No browser is needed.
"""

from __future__ import annotations

import argparse
import colorsys
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from PIL import Image, ImageDraw, ImageFont

from client.machine import ROOT, stamp
from client.workloads import Workload
from config import build
from live.history import DECODE, IDLE, PREFILL
from live.reading import iterations
from live.saved import serve_again
from simulate.costs import FAKE

FOLDER = ROOT / "results" / "live"
NAMES = ("static", "dynamic")
ROWS, REQUESTS = 8, 40
SIZE = WIDTH, HEIGHT = 1000, 470
LEFT, RIGHT, TOP, PANEL, GAP = 116, 20, 30, 176, 36
FRAMES, FRAME_MS, LAST_MS = 90, 90, 4000
LEGEND = (
    "a line is a row of the batch · a colour is a request · dark: its prompt is computed · "
    "hatched: computed for nobody"
)
SAID = f"the same {REQUESTS} requests to both, simulated (costs fake)"
INK, FAINT, EMPTY, PAPER = "#222222", "#777777", "#efefef", "#ffffff"


class Piece(NamedTuple):
    """What a line does for a while. Times are seconds."""

    line: int
    id: int
    kind: str
    begin: float
    end: float


def made() -> dict[str, Any]:
    """The histories of both servers, and how they were made."""
    trace = Workload(seed=3, lengths="lognormal:60:0.9:300").requests(REQUESTS, "poisson:40")
    found = {}
    for mode in NAMES:
        config = build(mode, {"model": "fake", "max_batch_size": ROWS}, {})
        found[mode] = json.loads(serve_again(mode, config, FAKE, trace, "results/live"))
    return {"histories": found, **stamp()}


def pieces(history: Mapping[str, Any]) -> list[Piece]:
    """A history's cells, those of one kind for one request together."""
    found: list[Piece] = []
    open_: dict[int, Piece] = {}
    for seen in iterations(history):
        end = seen.at + seen.seconds
        for line, cell in seen.cells.items():
            before = open_.get(line)
            if before and (before.id, before.kind) == (cell.id, cell.kind):
                open_[line] = before._replace(end=end)
                continue
            if before:
                found.append(before._replace(end=seen.at))
            open_[line] = Piece(line, cell.id, cell.kind, seen.at, end)
        for line in open_.keys() - seen.cells.keys():
            found.append(open_.pop(line))
    return found + list(open_.values())


def colour(id_: int) -> tuple[int, int, int]:
    """A request's own; neighbours are far apart on the wheel."""
    red, green, blue = colorsys.hls_to_rgb(id_ * 0.61803 % 1, 0.55, 0.62)
    return round(255 * red), round(255 * green), round(255 * blue)


class Picture:
    """Draws both servers as they are at a time."""

    def __init__(self, histories: Mapping[str, Any]):
        self._histories = histories
        self._pieces = {name: pieces(history) for name, history in histories.items()}
        self.end = max(piece.end for mine in self._pieces.values() for piece in mine)
        folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
        self._font, self._bold = (
            ImageFont.truetype(str(folder / f"DejaVuSans{style}.ttf"), size)
            for style, size in (("", 14), ("-Bold", 17))
        )

    def frame(self, now: float) -> Image.Image:
        image = Image.new("RGB", SIZE, PAPER)
        draw = ImageDraw.Draw(image)
        draw.text((LEFT, 12), LEGEND, FAINT, self._font)
        for k, name in enumerate(self._histories):
            self._panel(image, draw, name, TOP + 24 + k * (PANEL + GAP), now)
        draw.text((LEFT, HEIGHT - 23), SAID, FAINT, self._font)
        draw.text((WIDTH - RIGHT, HEIGHT - 25), f"{now:.2f} s", INK, self._bold, anchor="ra")
        return image

    def _panel(
        self, image: Image.Image, draw: ImageDraw.ImageDraw, name: str, top: int, now: float
    ) -> None:
        high, scale = PANEL / ROWS, (WIDTH - LEFT - RIGHT) / self.end
        draw.rectangle((LEFT, top, WIDTH - RIGHT, top + PANEL - 2), EMPTY)
        idle = live = 0.0
        for piece in self._pieces[name]:
            begin, end = piece.begin, min(piece.end, now)
            if end <= begin:
                continue
            if piece.kind == IDLE:
                idle += end - begin
            else:
                live += end - begin
            x0, x1 = LEFT + begin * scale, LEFT + end * scale
            y0 = top + piece.line * high
            box = (round(x0), round(y0), max(round(x0), round(x1) - 1), round(y0 + high) - 2)
            own = colour(piece.id)
            if piece.kind == DECODE:
                draw.rectangle(box, own)
            elif piece.kind == PREFILL:
                draw.rectangle(box, tuple(c * 45 // 100 for c in own))
            else:
                self._hatch(draw, box)
        history = self._histories[name]
        answered = sum(at <= now for _, at, *_ in history["ended"])
        waiting = sum(r[1] <= now for r in history["requests"]) - self._begun(name, now)
        draw.text((12, top), name, INK, self._bold)
        told = (f"{answered} of {REQUESTS}", "answered", f"{waiting} wait")
        for i, line in enumerate(told):
            draw.text((12, top + 30 + 18 * i), line, INK if i != 1 else FAINT, self._font)
        if live:
            useful = 100 * live / (live + idle)
            draw.text((12, top + 104), f"{useful:.0f}% useful", INK, self._font)

    def _begun(self, name: str, now: float) -> int:
        return len({piece.id for piece in self._pieces[name] if piece.begin <= now})

    @staticmethod
    def _hatch(draw: ImageDraw.ImageDraw, box: tuple[int, int, int, int]) -> None:
        x0, y0, x1, y1 = box
        draw.rectangle(box, "#dddddd")
        for x in range(x0 - (y1 - y0), x1, 6):
            begin, end = max(x, x0), min(x + y1 - y0, x1)
            if begin < end:
                draw.line((begin, y1 - (begin - x), end, y1 - (end - x)), "#a0a0a0")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.picture", description="The README's moving picture."
    )
    parser.add_argument("--again", action="store_true", help="serve the trace once more")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "live.gif")
    options = parser.parse_args()
    path = FOLDER / "histories.json"
    if options.again:
        FOLDER.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(made(), separators=(",", ":")) + "\n")
    picture = Picture(json.loads(path.read_text())["histories"])
    times = [picture.end * k / (FRAMES - 1) for k in range(FRAMES)]
    frames = [picture.frame(now) for now in times]
    palette = frames[-1].quantize(64, dither=Image.Dither.NONE)
    small = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    small[0].save(
        options.out,
        save_all=True,
        append_images=small[1:],
        duration=[FRAME_MS] * (FRAMES - 1) + [LAST_MS],
        loop=0,
        optimize=True,
    )
    size = options.out.stat().st_size
    assert size <= 1_500_000, f"{size:,} bytes"
    print(f"{options.out}: {size / 1e3:.0f} kB, {len(frames)} frames, {math.ceil(picture.end)} s")


if __name__ == "__main__":
    main()
