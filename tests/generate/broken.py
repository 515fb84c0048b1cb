"""Files that hold anything, or are no files, for those that read folders of models."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.counts import tenth

SHORT = ("", "null", "[]", "3", '"r"', "NaN", "{", "\0", "\ufeff{}", '{"\\ud800": 1}')
ODD_JSON = ("[" * 100_000, '{"a":' * 100_000, "9" * 10_000, *SHORT)
NUMBERS = (4.0, 2.5, -1, 0, 1e30, float("nan"), float("inf"), 10**400, 10**30)
ODD_VALUES: list[Any] = [*NUMBERS, None, True, "4", "nan", [], [4], {}, {"a": []}, "x" * 100_000]


def odd_settings(path: Path, names: list[str]) -> Iterator[None]:
    """Write one odd content after the other into a JSON file with these names."""
    whole = json.loads(path.read_text())
    for text in ODD_JSON:
        path.write_text(text, errors="surrogatepass")
        yield
    path.write_bytes(b"\xff" * 9)
    yield
    for name in names:
        for value in ODD_VALUES:
            path.write_text(json.dumps(whole | {name: value}))
            yield
    path.write_text(json.dumps(whole))


def odd_bytes(path: Path, cases: int) -> Iterator[None]:
    """Truncate a file, and write random bytes into its beginning."""
    whole, draw = path.read_bytes(), random.Random(1)
    for _ in range(cases):
        data = bytearray(whole[: draw.choice([len(whole), draw.randrange(len(whole))])])
        for _ in range(draw.choice([0, 1, 9]) if len(data) > 8 else 0):
            data[draw.randrange(min(len(data), 400))] = draw.choice([draw.randrange(256), 48, 125])
        path.write_bytes(data)
        yield
    path.write_bytes(whole)


def no_files(path: Path) -> Iterator[None]:
    """Put what is no file into a file's place."""
    whole = path.read_bytes()
    makers: list[Callable[[], Any]] = [int, path.mkdir, partial(os.mkfifo, path)]  # int: nothing
    makers += [partial(path.symlink_to, to) for to in (path, "/dev/zero", "/nowhere")]
    for make in makers:
        path.unlink()
        make()
        yield
        if path.is_dir():
            path.rmdir()
            path.touch()
        path.unlink(missing_ok=True)
        path.touch()
    path.write_bytes(whole)


def assert_odd_files_are_refused(
    settings: Path, names: list[str], tensors: Path, refused: Callable[[], bool]
) -> None:
    """Have a model's files hold anything. refused: returns whether they are, in a sentence; what it
    does not refuse can be read.
    """
    assert not refused()
    for _ in odd_settings(settings, names):
        refused()
    for file in (settings, tensors):
        for _ in no_files(file):
            assert refused()
    for _ in odd_bytes(tensors, tenth(1000)):
        refused()
    assert not refused()


# numbers with which every text is token 0
NO_WEIGHTS = [float("nan"), float("inf"), -float("inf"), 1e30, -1e30]
