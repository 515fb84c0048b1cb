"""The text that `demo` learns from, which every machine with CPython has on its disk.

Both sources are under CPython's licence: the language reference as `help()` shows it
(`pydoc_data.topics`), and the docstrings of the standard library, read with `ast`, so that nothing
is imported or run. A document is a topic, or all docstrings of a top-level module or package. The
text depends on the version of Python and its distributor: machines compare `Corpus.digest`.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

HELD_OUT_IN = 16  # one document of so many is held out, drawn by a hash of its name
LONG = 60  # characters; shorter paragraphs ("For example:") may occur again
# test cases, which not every installation has, and packages that are not CPython's
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
# characters other than white space, about ten words: so long a run in both parts is a copy
COPIED = 48
BETWEEN = "\n\n\n"  # between docstrings and between documents


@dataclass(frozen=True)
class Corpus:
    """`train` and `held_out` are UTF-8 text that share no paragraph, not even with other spacing.

    Paragraphs that are copies but for a few words remain: `copied_bytes` finds them.
    """

    train: bytes
    held_out: bytes

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.train + b"\0" + self.held_out).hexdigest()

    def copied_bytes(self) -> list[bool]:
        """Return for each held-out byte if it is in a run of COPIED characters of `train`, too."""
        train = b"".join(self.train.split())
        runs = {train[i : i + COPIED] for i in range(len(train) - COPIED + 1)}
        where = [i for i, byte in enumerate(self.held_out) if not chr(byte).isspace()]
        text = bytes(self.held_out[i] for i in where)
        copied = [False] * len(self.held_out)
        for i in range(len(text) - COPIED + 1):
            if text[i : i + COPIED] in runs:
                first, last = where[i], where[i + COPIED - 1]
                copied[first : last + 1] = [True] * (last + 1 - first)
        return copied


def load_corpus() -> Corpus:
    """Read the text of the running Python and split it by topic and module."""
    documents = [*_topics(), *_modules(Path(sysconfig.get_path("stdlib")))]
    held_out = [texts for name, texts in documents if _is_held_out(name)]
    paragraphs = {_plain(p) for texts in held_out for text in texts for p in _paragraphs(text)}
    seen: set[str] = set()
    train = [
        [_unseen(text, paragraphs, seen) for text in texts]
        for name, texts in documents
        if not _is_held_out(name)
    ]
    return Corpus(_joined(train), _joined(held_out))


def _topics() -> Iterator[tuple[str, list[str]]]:
    for name in sorted(topics):
        yield f"topic {name}", [topics[name]]


def _modules(stdlib: Path) -> Iterator[tuple[str, list[str]]]:
    documents: dict[str, list[str]] = {}
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).parts
        if LEFT_OUT.isdisjoint(parts):
            documents.setdefault(parts[0].removesuffix(".py"), []).extend(_docstrings(path))
    for name, texts in documents.items():
        yield f"module {name}", texts


def _docstrings(path: Path) -> Iterator[str]:
    try:
        # of doubtful escapes: the text must not depend on filters
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # lib2to3 keeps files that are wrong on purpose
        return
    for node in sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield inspect.cleandoc(text)


def _is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % HELD_OUT_IN == 0


def _paragraphs(text: str) -> list[str]:
    return re.split(r"\n\s*\n", text.strip())


def _plain(paragraph: str) -> str:
    return " ".join(paragraph.split())


def _unseen(text: str, held_out: set[str], seen: set[str]) -> str:
    """Return `text` without paragraphs in `held_out` and `seen`; add the long ones to `seen`."""
    kept = []
    for paragraph in _paragraphs(text):
        plain = _plain(paragraph)
        if plain not in held_out and plain not in seen:
            kept.append(paragraph)
            if len(plain) >= LONG:
                seen.add(plain)
    return "\n\n".join(kept)


def _joined(documents: list[list[str]]) -> bytes:
    return BETWEEN.join(text for texts in documents for text in texts if text).encode()
