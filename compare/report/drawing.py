"""How figures look: a colour, line and marker for each variant in all of them, and how they are
written.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from PIL import Image

from config import MODES

# told apart by eyes of every kind: after each colour comes its line style, so that twelve differ
PALETTE = ("#7f7f7f", "#d95f02", "#7570b3", "#1b9e77", "#1f3a70", "#e7298a")
LINES = (("-", "o"), ("--", "s"))  # and markers


class Look(NamedTuple):
    """How a variant is drawn."""

    colour: str
    line: str
    marker: str


LOOKS = [Look(colour, *line) for line in LINES for colour in PALETTE]
COLOURS = 128  # of a PNG
STYLE: dict[Any, Any] = {
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "figure.dpi": 130,
    "legend.frameon": False,
    # a dollar in a model's name is one
    "svg.hashsalt": "effective-batching",
    "text.parse_math": False,
}


def looks(names: Iterable[str]) -> dict[str, Look]:
    """A look for each name: a mode has its own in every figure, others what is left, in their
    order.
    """
    own = dict(zip(MODES, LOOKS))
    names = list(names)
    left = itertools.cycle(
        [look for look in LOOKS if look not in [own[name] for name in names if name in own]]
    )
    return {name: own.get(name) or next(left) for name in names}


def plain_log(axis: Any) -> None:
    """A logarithmic axis labelled 0.5, 1, 2, 5 instead of powers of ten; more finely where it spans
    little.
    """

    def label(value: float, _: Any) -> str:
        low, high = axis.get_view_interval()
        labelled = "1" if high > 500 * low else "125" if high > 6 * low else "123456789"
        return f"{value:g}" if f"{value:.0e}"[0] in labelled else ""

    for formatter in (axis.set_major_formatter, axis.set_minor_formatter):
        formatter(label)


def caption_of(figure: Figure, caption: str) -> None:
    """What a figure is of, above it."""
    figure.suptitle(caption, fontsize=10.5, color="#555555", x=0.01, ha="left")


def save(figure: Figure, *paths: Path) -> None:
    """Write a figure in the format that each path's suffix names; the same run gives the same
    files. A PNG gets a palette of its own, which makes it a third as large.
    """
    with matplotlib.rc_context(STYLE):
        for path in paths:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
            figure.set_layout_engine("none")  # computed once: it costs as much as drawing
            if path.suffix == ".png":
                with Image.open(path) as image:
                    flat = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
                flat.save(path, optimize=True)
