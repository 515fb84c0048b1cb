"""Texts of servers, settings and command lines in our Markdown, of which none may become markup.

Names of servers need none of this: they have letters, digits and -_. alone (`named`).
"""

from __future__ import annotations

import re

from client.users import NAME


def named(text: str) -> str:
    """A name for a server, made from its own or its model's: also a file name, and a label in
    figures.
    """
    name = "-".join(NAME.findall(text))
    return name if name not in ("", "summary") else f"{name}-model".lstrip("-")


def escape(text: object) -> str:
    """The text as one line, in which Markdown means nothing."""
    return re.sub(r"([\\`*<>\[\]|&~]|(?<!\w)_|_(?!\w))", r"\\\1", _line(text))


def unescape(markdown: str) -> str:
    """The same for a terminal, which shows backslashes."""
    return re.sub(r"\\([\\`*<>\[\]|&~_])", r"\1", markdown)


def code(text: object) -> str:
    """A code span of one line, whatever backticks are in it."""
    line = _line(text)
    fence = "`" * (max(map(len, re.findall("`+", line)), default=0) + 1)
    space = " " if line[:1] in ("", "`") or line[-1:] == "`" else ""
    return f"{fence}{space}{line}{space}{fence}"


def _line(text: object) -> str:
    """One line without control characters, which a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
