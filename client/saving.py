"""Files of results: whole or not there, in UTF-8 on every machine, not lost with a full disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from config.settings import ConfigError


class Unwritten(ConfigError):
    """A file that cannot be written, such as on a full disk."""


@contextmanager
def written(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Write a file, and its folders. It is written beside its place and then renamed: neither a
    full disk nor the end of this process leaves half of it, and an earlier file stays until then.

    mode: "w" for text, or "wb". Raises Unwritten.
    """
    with unwritten(path):
        place = path.resolve()  # a link's is the file that it names
        # a pipe or a device, as /dev/null, is written itself: a renamed file would replace it
        is_file = place.is_file() or not place.exists()
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


def write(path: Path, content: str | bytes) -> None:
    """Write a whole file. Raises Unwritten."""
    with written(path, "w" if isinstance(content, str) else "wb") as file:
        file.write(content)


def saved(save: Callable[[Path], None], folder: Path, say: Callable[[str], None]) -> Path:
    """Save into a folder or, where that cannot be written, into a new one for temporary files;
    return which it was. Raises Unwritten.
    """
    try:
        save(folder)
        return folder
    except Unwritten as error:
        say(f"error: {error}")
        with unwritten(Path(tempfile.tempdir or "/tmp")):
            elsewhere = Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
        save(elsewhere)
        say(f"saved in {elsewhere} instead")
        return elsewhere


@contextmanager
def unwritten(path: Path) -> Iterator[None]:
    """Raise Unwritten for an OSError."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise Unwritten(
            f"{path} cannot be written: {why}; make room there, or name another place"
        ) from None
