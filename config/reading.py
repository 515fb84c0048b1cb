"""Reading of JSON, in files and from other programs, and of texts of settings, such as 4GB or
NAME=FOLDER: all that cannot be read is a ValueError.

Python's parser raises RecursionError where JSON is deep, and reads numbers beyond those of a float,
on which arithmetic fails later. Lines end at line feeds alone: str.splitlines() would also split
where a text in JSON has U+2028, U+2029 or U+0085. Knows the standard library alone.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import math
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

GZIP, LFS = b"\x1f\x8b", b"version https://git-lfs"  # with which such files begin
MOST_DIGITS = 300  # digits of a whole number: with more it is beyond a float


def parse(text: str | bytes) -> Any:
    """Return the value of JSON. NaN and Infinity are read, too: some tools write them."""
    try:
        return json.loads(text, parse_int=_whole, parse_float=_real)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file, which gzip may have packed. Raises OSError, and ValueError for a packed one that
    is damaged, and for the pointer that Git LFS leaves where it did not fetch a file.
    """
    with path.open("rb") as file:
        begins = file.peek(len(LFS))
        if begins.startswith(LFS):
            raise ValueError("it is Git LFS's pointer to a file; fetch the file with git lfs pull")
        packed = begins.startswith(GZIP)
        try:
            with gzip.GzipFile(fileobj=file) if packed else contextlib.nullcontext(file) as content:
                yield cast(BinaryIO, content)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"it cannot be read to its end ({error}); pack it again") from None


def read_json(path: Path) -> Any:
    """Return the value in a file of JSON, as `opened` reads it. Raises OSError and ValueError."""
    with opened(path) as file:
        return parse(file.read())


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file, as `opened` reads it. Raises OSError and ValueError."""
    with opened(path) as file, io.TextIOWrapper(file, "utf-8-sig") as text:
        lines = text.read().split("\n")
    return lines if lines[-1] else lines[:-1]


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"the number {digits[:9]}… is too large")
    return int(digits)


def _real(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"the number {digits[:9]} is too large")
    return value


# ---- sizes


class PoolSize(NamedTuple):
    """The size of the KV cache, in GB, blocks or % of a GPU's memory."""

    amount: float
    unit: str

    def __str__(self) -> str:
        return f"{self.amount:.15g}{self.unit}"


MOST = {"gb": PoolSize(1e6, "GB"), "blocks": PoolSize(1e9, "blocks"), "%": PoolSize(100, "%")}


def read_size(text: str) -> PoolSize:
    """Return what a text such as 4GB stands for. Raises ValueError."""
    words = re.fullmatch(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?) ?(gb|blocks|%)", str(text).strip().lower())
    if words is None:
        raise ValueError(
            "must be a size with its unit: 4GB, 2048blocks, or 90% (of a GPU's memory)"
        )
    most = MOST[words[2]]
    size = PoolSize(float(words[1]), most.unit)
    if size > most:
        raise ValueError(f"is too large; give {most} or less")
    if size.amount <= 0 or (size.unit == "blocks" and size.amount % 1):
        raise ValueError("must be above 0, in whole blocks")
    return size


def read_sizes(text: str) -> tuple[int, ...]:
    """Return the numbers of a text such as 32,8,4,1, or none. Raises ValueError."""
    try:
        return () if text == "none" else tuple(int(size) for size in text.split(","))
    except ValueError:
        raise ValueError("must be numbers separated by commas, such as 32,8,4,1, or none") from None


# ---- API keys: one for all users, or a file with a key and a name for each. Only digests of keys
# are kept

MOST_KEYS = 500  # all are handed on in one variable, which Linux limits to 128 KiB
SHORTEST_KEY = 16
USER = re.compile(r"[A-Za-z0-9._@-]{1,64}")


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
        if len(words) != 2 or not USER.fullmatch(words[0]):
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


# ---- LoRA adapters: in folders, or random ones for measurements

ADAPTER = re.compile("[A-Za-z0-9._/-]{1,128}")


class Source(NamedTuple):
    """Source of an adapter: a folder or, where that is empty, a rank and a seed."""

    folder: str
    rank: int = 0
    seed: int = 0


def check_name(name: str) -> None:
    """Raise ValueError for a name that no adapter may have."""
    if not ADAPTER.fullmatch(name):
        raise ValueError(f"{name[:128]!r} is no name; use 1 … 128 letters, digits and ._-/")


def read_lora(text: str) -> dict[str, Source]:
    """Return the adapters of "NAME=FOLDER,NAME=FOLDER", with whole paths. Raises ValueError."""
    adapters: dict[str, Source] = {}
    for each in text.split(",") if text else ():
        name, _, folder = each.partition("=")
        check_name(name)
        if not folder or name in adapters:
            raise ValueError(f"{name} must have one folder; write NAME=FOLDER,NAME=FOLDER")
        adapters[name] = Source(os.path.abspath(os.path.expanduser(folder)))
    return adapters


def read_lora_random(text: str) -> dict[str, Source]:
    """Return the adapters of "N:RANK". Raises ValueError."""
    found = re.fullmatch("([1-9][0-9]{0,3}):([1-9][0-9]?)", text)
    if text and not found:
        raise ValueError("must be N:RANK, such as 8:16: how many, and their rank")
    n, rank = map(int, found.groups()) if found else (0, 0)
    return {f"lora-{i}": Source("", rank, i) for i in range(n)}
