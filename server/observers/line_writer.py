"""Lines appended to a file by a thread of its own, so that neither a slow nor a full disk disturbs
serving.

Lines that cannot be written are lost and counted, with a warning in the server's log. No line is
ever cut off: a file is truncated to its last whole line, and the next reader of a pipe gets the
rest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
# between two writes of many lines: each takes the interpreter from the handler thread
PAUSE_S = 0.05
log = logging.getLogger("effective_batching")


def open_log(path: str) -> int:
    """Open a file to append to; return its descriptor.

    Raises OSError, also for a pipe without a reader, for which it does not wait. Writing waits: a
    pipe without room takes a part of a line longer than 4,096 bytes and refuses the rest.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)
    os.set_blocking(file, True)
    return file


class LineWriter(Generic[T]):
    """Writes a line for each entry, made by `line_of` in that thread. Raises OSError if it cannot
    open the file.

    `name`: of the file, in the server's log. At most `backlog` entries wait to be written. `gap`:
    for lines that are useless unless all are there, makes the entry that replaces the first lost
    one from the reason, and is the last; such lines are written many at once.
    """

    def __init__(
        self,
        path: str,
        name: str,
        line_of: Callable[[T], str],
        backlog: int,
        gap: Callable[[str], T] | None = None,
    ):
        self._file, self._name, self._line_of = open_log(path), name, line_of
        self._backlog, self._gap = backlog, gap
        self._lost, self._why = 0, ""
        self._rest = b""  # the rest of a line whose beginning a pipe took before its reader went
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, entry: T) -> None:
        """Write a line for it, later."""
        if self._queue.qsize() < self._backlog:
            self._queue.put(entry)
        else:
            self._lose("the disk is too slow", 1)

    def close(self, timeout_s: float = 10.0) -> None:
        """Write waiting entries, for so long at most, and end the thread."""
        self._queue.put(None)
        self._closing.set()
        self._thread.join(timeout_s)
        if self._lost:
            log.warning("%s: %d lines were lost", self._name, self._lost)

    def _run(self) -> None:
        has_gap = is_closed = False
        while not is_closed:
            taken = [self._queue.get()]
            if self._gap:
                self._closing.wait(PAUSE_S)
                taken += [self._queue.get() for _ in range(self._queue.qsize())]
            entries = [entry for entry in taken if entry is not None]
            is_closed = len(entries) < len(taken)
            if self._lost and self._gap:
                self._lost += len(entries)
                has_gap = has_gap or self._write([self._gap(self._why)]) is None
            elif (reason := self._write(entries)) is not None:
                self._lose(reason, len(entries))
        os.close(self._file)

    def _write(self, entries: list[T]) -> str | None:
        """Return None, or the reason of a failure."""
        text = "".join(f"{self._line_of(entry)}\n" for entry in entries)
        data, written = self._rest + text.encode(), 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
            self._rest = b""
            return None
        except OSError as error:
            begun = data if written > len(self._rest) else self._rest
            self._rest = begun[written:]
            with contextlib.suppress(OSError):  # a pipe keeps what it has
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                self._rest = b""
            return error.strerror or str(error)

    def _lose(self, reason: str, n: int) -> None:
        if not self._lost:
            self._why = reason
            log.warning(
                "%s: %s; lines are lost from here on, and serving continues", self._name, reason
            )
        self._lost += n
