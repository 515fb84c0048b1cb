"""The page: files that a server serves, or one file with saved runs in it that needs no network."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
STYLE = "style.css"
# modules, each after those that it imports
SCRIPTS = (
    *("text.js", "history.js", "view.js", "readout.js", "drawing.js", "curves.js"),
    *("controls.js", "server.js", "page.js"),
)
FILES = (STYLE, *SCRIPTS)
# what page.html has once each
OWN = "script-src 'self'; style-src 'self'; connect-src 'self'"
POLICY = f"default-src 'none'; {OWN}; base-uri 'none'; form-action 'none'"
LINK = f'<link rel="stylesheet" href="live/{STYLE}">'
RUNS = '<script type="application/json" id="runs">[]</script>'
SCRIPT = f'<script type="module" src="live/{SCRIPTS[-1]}"></script>'


@functools.cache
def read(name: str = "page.html") -> str:
    """Return the page as a server serves it, without data, or one of its FILES."""
    return (HERE / name).read_text("utf-8")


def saved(histories: Sequence[str]) -> str:
    """Return the page as one file with one or two histories (JSON) in it, which makes no requests.

    Its modules become one, in which no name has to be imported.
    """
    modules = "".join(map(read, SCRIPTS))
    script = re.sub(r"^(import .*?;\n|export )", "", modules, flags=re.DOTALL | re.MULTILINE)
    style = read(STYLE)
    # JSON has no < outside of strings, and in one it may be written so: no markup can begin
    data = f"[{','.join(histories)}]".replace("<", "\\u003c")
    page = read()
    for place, content in (
        (OWN, f"script-src {_hash(script)}; style-src {_hash(style)}"),
        (LINK, f"<style>{style}</style>"),
        (RUNS, RUNS.replace("[]", data)),
        (SCRIPT, f'<script type="module">{script}</script>'),
    ):
        assert page.count(place) == 1, f"page.html has one place for {place}"
        page = page.replace(place, content)
    return page


def security_policy() -> str:
    """Return the Content-Security-Policy of the served page: the files and data of its server."""
    return f"{POLICY}; frame-ancestors 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
