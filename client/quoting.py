"""Quoting of texts from servers, settings and command lines, so that reports hold no other markup.

Names of servers need no quoting: they have letters, digits and -_. alone (`named`).
"""

from __future__ import annotations

import re

from client.users import NAME, missing

# control characters but for ends of lines and tabs; marks, overrides and isolates of directions
OBEYED = re.compile("[\0-\b\v-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def named(text: str) -> str:
    """Return a server's name in reports and files, made from its own or its model's."""
    name = "-".join(NAME.findall(text))
    lost = missing(name) or name.lower() in ("", "summary")
    return f"{name}-model".lstrip("-") if lost else name


def escape(text: object) -> str:
    """Return the text as one line without Markdown's meaning."""
    return re.sub(r"([\\`*<>\[\]|&~]|(?<!\w)_|_(?!\w))", r"\\\1", _line(text))


def unescape(markdown: str) -> str:
    """Undo `escape`, for a terminal, which would show its backslashes."""
    return re.sub(r"\\([\\`*<>\[\]|&~_])", r"\1", markdown)


def code(text: object) -> str:
    """Return a code span of one line, whatever backticks it has."""
    line = _line(text)
    fence = "`" * (max(map(len, re.findall("`+", line)), default=0) + 1)
    space = " " if line[:1] in ("", "`") or line[-1:] == "`" else ""
    return f"{fence}{space}{line}{space}{fence}"


def printable(text: str) -> str:
    """Return a text without the characters that a terminal obeys, or by which it turns others."""
    return OBEYED.sub("", text)


def _line(text: object) -> str:
    """Return one line without control characters, which a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
