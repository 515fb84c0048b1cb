"""How figures look and how they are written; and the figure that client.py and reports share."""

from __future__ import annotations

import io
import itertools
import textwrap
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from client.saving import write
from client.summary import line_text
from scheduling.policies import MODES

# colours that colour-blind readers can distinguish; with two line styles, twelve variants
PALETTE = ("#7f7f7f", "#d95f02", "#7570b3", "#1b9e77", "#1f3a70", "#e7298a")
LINES = (("-", "o"), ("--", "s"))  # and markers
COLOURS = 128  # a PNG's colours
INK = "#444444"  # in a legend, for the colour of any variant
MANY = 5_000  # points, which as shapes would make a page of megabytes
OF_ALL: dict[Any, Any] = {
    # whatever a user's matplotlibrc says; config/environment.py says more about MPLBACKEND
    **{name: value for name, value in matplotlib.rcParamsDefault.items() if name != "backend"},
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "figure.dpi": 130,
    "legend.frameon": False,
    "svg.hashsalt": "effective-batching",
    "text.parse_math": False,  # a dollar in a model's name is a dollar
}
styled = matplotlib.rc_context(OF_ALL)  # decorator of functions that draw


class Style(NamedTuple):
    """Colour, line and marker of a variant."""

    colour: str
    line: str
    marker: str


STYLES = [Style(colour, *line) for line in LINES for colour in PALETTE]


def styles(names: Iterable[str]) -> dict[str, Style]:
    """A style for each name: a mode has the same one in all figures, others get what remains. A
    remark in brackets that follows a name changes nothing.
    """
    modes = dict(zip(MODES, STYLES))
    fixed = {name: modes.get(name.split(" (")[0]) for name in names}
    free = itertools.cycle([style for style in STYLES if style not in fixed.values()])
    return {name: style or next(free) for name, style in fixed.items()}


def new_figure(size: tuple[float, float], caption: str) -> Figure:
    """An empty figure, inches wide and high, with its caption."""
    figure = Figure(figsize=size, layout="constrained")
    caption = textwrap.fill(caption, int(12.5 * size[0]))  # letters that its width holds
    figure.suptitle(caption, fontsize=10.5, color="#555555", x=0.01, ha="left")
    return figure


def legend_below(figure: Figure, handles: Any, labels: Any, ncols: int, **how: Any) -> None:
    """A legend below all panels."""
    figure.legend(list(handles), list(labels), loc="outside lower center", ncols=ncols, **how)


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
    """Write a figure in the formats of the suffixes, reproducibly; a PNG in few colours. Raises
    Unwritten.
    """
    with matplotlib.rc_context(OF_ALL), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a letter that the font lacks is a box
        for path in paths:
            kind, drawn = path.suffix[1:], io.BytesIO()
            figure.savefig(drawn, format=kind, metadata={"Date": None} if kind == "svg" else None)
            figure.set_layout_engine("none")  # computed once: it costs as much as drawing
            if kind == "png":
                with Image.open(drawn) as image:
                    flat = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
                flat.save(drawn := io.BytesIO(), "PNG", optimize=True)
            write(path, drawn.getvalue())


@styled
def latency_vs_tokens(
    runs: Mapping[str, tuple[Sequence[int], Sequence[float], Mapping[str, float] | None]],
    caption: str,
) -> Figure:
    """Latency against completion tokens, a point a request, with each variant's least-squares line.

    runs: {variant: (completion tokens, latencies in seconds, latency_line)}. The left panel shares
    one linear scale, so that slopes and intercepts compare; the right one has a logarithmic scale,
    so that no variant hides another.
    """
    figure = new_figure((12, 4.8), caption)
    many = sum(len(tokens) for tokens, _, _ in runs.values()) > MANY
    some = any(len(tokens) for tokens, _, _ in runs.values())  # else a log scale has no range
    for axis, scale in zip(axes := figure.subplots(1, 2), ("linear", "log")):
        for name, (colour, dashes, marker) in styles(runs).items():
            tokens, seconds, line = runs[name]
            how: dict[str, Any] = {"color": colour, "marker": marker, "rasterized": many}
            label = f"{name}:  {line_text(line)}"
            axis.scatter(tokens, seconds, s=14, alpha=0.45, linewidths=0, label=label, **how)
            if line:
                x = np.linspace(0, max(tokens), 100)
                y = line["intercept_s"] + line["slope_s_per_token"] * x
                axis.plot(x[y > 0], y[y > 0], color=colour, ls=dashes, lw=2)
        axis.set(xlabel="completion tokens", ylabel=f"end-to-end latency, s ({scale} scale)")
        axis.set(yscale=scale if some else "linear", xlim=(0, None))
        axis.grid(alpha=0.25)
    if some:
        plain_log(axes[1].yaxis)
    axes[0].set(ylim=(0, None), title="Latency by completion tokens")
    handles, labels = axes[1].get_legend_handles_labels()
    legend_below(figure, handles, labels, 2, markerscale=2, fontsize=11)
    return figure
