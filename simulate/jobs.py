"""Processes that share the runs of a simulation (`--jobs`), with the same results as one."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from rich.console import RenderableType

from client.load import Watch
from client.progress import Progress, ProgressStep, Replayed
from client.traces import Request
from scheduling.user_policies import SOURCES

EVERY_S = 0.5  # between two lines of a worker
SHOWN_S = 0.1  # between two looks for such lines

Result = TypeVar("Result")


class _Shared(NamedTuple):
    """State that a worker shares with the process that started it."""

    stopped: Any  # multiprocessing's Event
    lines: Any  # its SimpleQueue: (process, its line; None: no longer)


_shared: _Shared | None = None  # a worker's own


def as_worker(on_sigterm: signal.Handlers = signal.SIG_IGN) -> None:
    """Begin a process that another one has started: that one handles Ctrl-C and other signals, and
    if it is killed this one ends, too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, on_sigterm)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _begin(shared: _Shared) -> None:
    global _shared
    _shared = shared
    as_worker()


def _called(pickled: bytes) -> Any:
    """Return the result of a call; None if all were stopped before its end."""
    try:
        Stoppable().tick()
        function, arguments = pickle.loads(pickled)
        return function(*arguments)
    except KeyboardInterrupt:
        return None


class Stoppable(Watch):
    """Interrupts a worker's replay when all are stopped."""

    def tick(self) -> None:
        if _shared is not None and _shared.stopped.is_set():
            raise KeyboardInterrupt


class _Reported(Stoppable, Replayed):
    """A worker's replay, whose line another process shows."""

    _shown = -math.inf

    def tick(self) -> None:
        super().tick()
        assert _shared is not None
        if time.monotonic() > self._shown + EVERY_S:
            self._shown = time.monotonic()
            _shared.lines.put((os.getpid(), self.__rich__()))


class Reporting(Progress):
    """Progress in a worker. The process that started it shows the lines of replays, waits in a step
    of its own, and prints what is `said` here when it takes this call's result.
    """

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def table(self, table: RenderableType | None) -> None:
        """Show none: the other process has the points of all servers."""

    @contextmanager
    def step(self, text: str) -> Iterator[ProgressStep]:
        yield ProgressStep(text)

    @contextmanager
    def replay(self, name: str, requests: Sequence[Request]) -> Iterator[Replayed]:
        assert _shared is not None
        try:
            yield _Reported(name, requests)
        finally:
            _shared.lines.put((os.getpid(), None))


def lost() -> str:
    """Return a sentence about a worker that ended without a result."""
    exits = [f"by os._exit in {source.word}" for source in SOURCES.values()]
    return f"a process of --jobs ended at once, {' or '.join([*exits, 'for want of memory'])}"


class Jobs(ProcessPoolExecutor):
    """Workers, forked when this is made: by a process without threads. A call in the middle of
    which all are stopped, by Ctrl-C or at the end of the context, has the result None, unless it
    returns what there is by then.
    """

    def __init__(self, n: int, progress: Progress | None = None):
        self._progress = progress
        self._lines: Any = multiprocessing.SimpleQueue()
        self._stopped = multiprocessing.Event()
        shared = _Shared(self._stopped, self._lines)
        super().__init__(n, initializer=_begin, initargs=(shared,))
        self.submit(int)

    def __exit__(self, *error: Any) -> None:
        self._stopped.set()
        self.shutdown(cancel_futures=True)

    def submit(  # type: ignore[override]
        self, function: Callable[..., Result], *arguments: Any
    ) -> Future[Result | None]:
        # here, where an error is raised: in the executor's own thread it can end in a deadlock
        return super().submit(_called, pickle.dumps((function, arguments)))

    def result(self, future: Future[Result]) -> Result:
        """Return a result, and show workers' lines. Ctrl-C stops all calls; a second one raises."""
        while not future.done():
            try:
                wait([future], SHOWN_S)
                self._show()
            except KeyboardInterrupt:
                if self._stopped.is_set():
                    raise
                self._stopped.set()
        return future.result()

    def _show(self) -> None:
        assert self._progress is not None
        while not self._lines.empty():
            process, line = self._lines.get()
            if line is not None:
                self._progress.lines[process] = line
            else:
                self._progress.lines.pop(process, None)
