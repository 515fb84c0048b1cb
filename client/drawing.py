"""Style of all figures: a colour, line and marker for each variant; and how they are written."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from config import MODES

# colours that colour-blind readers can distinguish; with two line styles, twelve looks
PALETTE = ("#7f7f7f", "#d95f02", "#7570b3", "#1b9e77", "#1f3a70", "#e7298a")
LINES = (("-", "o"), ("--", "s"))  # and markers


class Look(NamedTuple):
    """Colour, line and marker of a variant."""

    colour: str
    line: str
    marker: str


LOOKS = [Look(colour, *line) for line in LINES for colour in PALETTE]
COLOURS = 128  # of a PNG
INK = "#444444"  # in a legend, for the colour of any variant
STYLE: dict[Any, Any] = {
    "font.size": 12, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "figure.dpi": 130,
    "legend.frameon": False, "svg.hashsalt": "effective-batching",
    "text.parse_math": False,  # a dollar in a model's name is a dollar
}  # fmt: skip
styled = matplotlib.rc_context(STYLE)  # decorator of functions that draw


def looks(names: Iterable[str]) -> dict[str, Look]:
    """A look for each name: a mode has the same one in all figures, others get what remains."""
    fixed, names = dict(zip(MODES, LOOKS)), list(names)
    taken = [fixed[name] for name in names if name in fixed]
    free = itertools.cycle([look for look in LOOKS if look not in taken])
    return {name: fixed.get(name) or next(free) for name in names}


def new_figure(size: tuple[float, float], caption: str) -> Figure:
    """An empty figure, inches wide and high, with its caption."""
    figure = Figure(figsize=size, layout="constrained")
    caption = textwrap.fill(caption, int(12.5 * size[0]))  # letters that its width holds
    figure.suptitle(caption, fontsize=10.5, color="#555555", x=0.01, ha="left")
    return figure


def legend_below(figure: Figure, handles: Any, labels: Any, ncols: int, **style: Any) -> None:
    """A legend below all panels."""
    figure.legend(list(handles), list(labels), loc="outside lower center", ncols=ncols, **style)


def patches(colours: Iterable[str]) -> list[Any]:
    """Handles of a legend: a rectangle of each colour."""
    return [Rectangle((0, 0), 1, 1, color=colour) for colour in colours]


def plain_log(axis: Any) -> None:
    """Label a logarithmic axis 0.5, 1, 2, 5, not powers of ten; finely where it spans little."""

    def label(value: float, _: Any) -> str:
        low, high = axis.get_view_interval()
        labelled = "1" if high > 200 * low else "125" if high > 6 * low else "123456789"
        return f"{value:,.10g}" if f"{value:.0e}"[0] in labelled else ""

    axis.set_major_formatter(label)
    axis.set_minor_formatter(label)


def save(figure: Figure, *paths: Path) -> None:
    """Write a figure in the formats of the suffixes, reproducibly; a PNG in few colours."""
    with matplotlib.rc_context(STYLE):
        for path in paths:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
            figure.set_layout_engine("none")  # computed once: it costs as much as drawing
            if path.suffix == ".png":
                with Image.open(path) as image:
                    flat = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
                flat.save(path, optimize=True)
