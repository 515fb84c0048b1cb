"""Reading of JSON, in files and from other programs: all that cannot be read is a ValueError.

Python's parser raises RecursionError where JSON is deep, and reads numbers beyond those of a float,
on which arithmetic fails later. Lines end at line feeds alone: str.splitlines() would also split
where a text in JSON has U+2028, U+2029 or U+0085. Knows the standard library alone.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

MOST_DIGITS = 300  # of a whole number: with more it is beyond a float


def parse(text: str | bytes) -> Any:
    """Return the value of JSON. NaN and Infinity are read, too: some tools write them."""
    try:
        return json.loads(text, parse_int=_whole, parse_float=_real)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Any:
    """Return the value in a file of JSON. Raises OSError and ValueError."""
    return parse(path.read_bytes())


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file. Raises OSError and ValueError."""
    lines = path.read_text("utf-8-sig").split("\n")
    return lines if lines[-1] else lines[:-1]


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"the number {digits[:9]}… is too large")
    return int(digits)


def _real(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"the number {digits[:9]} is too large")
    return value
