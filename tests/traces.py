"""Traces in Mooncake's format, for tests: the public ones are too large for this repository."""

from __future__ import annotations

import json
from pathlib import Path

KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


def save_mooncake(path: Path, *lines: tuple[int, int, int, list[int]]) -> None:
    """Write a trace of these timestamps (ms), input lengths, output lengths and hash ids."""
    path.write_text("".join(json.dumps(dict(zip(KEYS, line))) + "\n" for line in lines))
