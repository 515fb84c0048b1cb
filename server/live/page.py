"""The page: one HTML file that needs no network, empty or with saved runs in it."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).with_name("page.html")
_CHARSET = '<meta charset="utf-8">\n'
_RUNS = '<script type="application/json" id="runs">[]</script>'


@functools.cache
def empty() -> str:
    """Return the page as a server serves it: without data."""
    return PAGE.read_text()


def saved(histories: Sequence[str]) -> str:
    """Return the page with one or two histories (JSON) in it, which makes no requests."""
    # JSON has no < outside of strings, and in one it may be written so: no markup can begin
    data = f"[{','.join(histories)}]".replace("<", "\\u003c")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_own_content()}">\n'
    page = empty()
    assert page.count(_CHARSET) == page.count(_RUNS) == 1, "page.html has one place for each"
    return page.replace(_CHARSET, _CHARSET + policy).replace(_RUNS, _RUNS.replace("[]", data))


def security_policy() -> str:
    """Return the Content-Security-Policy of the served page: its own script, style and server."""
    return f"{_own_content()}; connect-src 'self'; frame-ancestors 'none'"


@functools.cache
def _own_content() -> str:
    def hashes(tag: str) -> str:
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", empty(), re.DOTALL)
        digests = [hashlib.sha256(text.encode()).digest() for text in texts]
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; "
        "base-uri 'none'; form-action 'none'"
    )
