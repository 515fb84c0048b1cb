"""Files of results: whole or not there, in UTF-8 on every machine, not lost with a full disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from config import ConfigError


class Unwritten(ConfigError):
    """A file that cannot be written, such as on a full disk."""


@contextmanager
def written(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Write a file, and its folders. It is written beside its place and then renamed: neither a
    full disk nor the end of this process leaves half of it, and an earlier file stays until then.

    mode: "w" for text, or "wb". Raises Unwritten.
    """
    try:
        place = path.resolve()  # of a link, the file that it names
        is_file = place.is_file() or not place.exists()  # and no pipe or device, as /dev/null is
        beside = place.with_name(f"{place.name}.{os.getpid()}.part") if is_file else place
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            with beside.open(mode, encoding=None if mode == "wb" else "utf-8") as file:
                yield file
            if is_file:
                beside.replace(place)
        finally:
            if is_file:
                beside.unlink(missing_ok=True)
    except OSError as error:
        raise Unwritten(
            f"{path} cannot be written: {error.strerror}; make room there, or name another place"
        ) from None


def write(path: Path, content: str | bytes) -> None:
    """Write a whole file. Raises Unwritten."""
    with written(path, "w" if isinstance(content, str) else "wb") as file:
        file.write(content)
