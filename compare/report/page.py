"""A report as one HTML file that needs no network."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping

from markdown_it import MarkdownIt

from client.quoting import unescape
from client.runs import LIVE

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1300px; margin: 2rem auto }
body { padding: 0 1.2rem; color: #222; background: #fff }
h1 { font-size: 1.6rem }
h2 { font-size: 1.25rem; margin-top: 2.4rem; border-bottom: 1px solid #ddd }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .4rem; border-bottom: 1px solid #e5e5e5; text-align: left }
th { vertical-align: bottom; background: #f7f7f7 }
td[style*=right] { white-space: nowrap }
img { max-width: 100%; height: auto }
code { background: #f3f3f3; padding: 0 .2em; font-size: .9em }
li { overflow-wrap: anywhere }
"""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}</body>
</html>
"""


def as_page(markdown: str, vectors: Mapping[str, bytes]) -> str:
    """Return a report as one HTML file that needs no network, with figures as SVG in it."""
    sources = {f"{name}.png" for name in vectors}
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.validateLink = lambda url: url in {*sources, LIVE}  # type: ignore[method-assign]  # nothing else is looked at or linked
    body = parser.render(markdown)
    for name, vector in vectors.items():
        data = base64.b64encode(_shortened(vector)).decode()
        body = body.replace(f'src="{name}.png"', f'src="data:image/svg+xml;base64,{data}"')
    body = re.sub(
        r"<table>.*?</table>",
        lambda table: f'<div class="wide">{table[0]}</div>',
        body,
        flags=re.DOTALL,
    )
    title = html.escape(unescape(markdown.split("\n", 1)[0].removeprefix("# ")))
    return PAGE.format(title=title, style=STYLE, body=body)


def _shortened(vector: bytes) -> bytes:
    """Return an SVG with two decimals in coordinates, not six: a third of the page's size."""
    return re.sub(
        rb' (?:d|x|y)="[^"]*"',
        lambda attribute: re.sub(rb"(\.\d\d)\d+", rb"\1", attribute[0]),
        vector,
    )
