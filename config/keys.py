"""API keys: one for all users, or a file with a key and a name for each; of these only digests are
kept.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from config.reading import read_lines

MOST_KEYS = 500  # all are handed on in one variable, which Linux limits to 128 KiB
SHORTEST_KEY = 16
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def read_key(text: str) -> str | None:
    """An API key, or None for "none". Raises ValueError, which does not show it."""
    if not re.fullmatch("[!-~]+", text):
        raise ValueError("a key is letters, digits and signs of ASCII without spaces, or none")
    return None if text == "none" else text


def read_keys(path: str) -> dict[str, str] | None:
    """The user of each key in a file, by the key's digest; None for "none".

    A line is NAME KEY, empty, or a comment that begins with #; a user may have several keys. Raises
    ValueError, which names the line and shows no key.
    """
    if path == "none":
        return None
    try:
        lines = read_lines(Path(os.path.expanduser(path)))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise ValueError(
            f"the file cannot be read ({reason}); give a text file of lines NAME KEY"
        ) from None
    users: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not NAME.fullmatch(words[0]):
            raise ValueError(
                f"line {number} is no NAME KEY; write a name of at most 64 letters, digits and "
                "._@- , a space, and the key"
            )
        name, key = words
        if len(key) < SHORTEST_KEY or not re.fullmatch("[!-~]+", key):
            raise ValueError(
                f"line {number}: a key is {SHORTEST_KEY} or more letters, digits and signs of "
                "ASCII; make one by `openssl rand -hex 16`"
            )
        if digest(key) in users:
            raise ValueError(f"line {number} repeats the key of an earlier line; make another one")
        users[digest(key)] = name
    if not 1 <= len(users) <= MOST_KEYS:
        raise ValueError(f"the file has {len(users)} keys; give 1 … {MOST_KEYS}")
    return users
