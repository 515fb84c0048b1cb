"""Progress of long work: lines that move in a terminal, else plain ones every few seconds."""

from __future__ import annotations

import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from client.load import Watch
from client.outcomes import Outcome
from client.quoting import printable
from client.traces import Request

PLAIN_EVERY_S = 10.0
BAR, LEAST_BAR = 24, 8  # columns
Shown = TypeVar("Shown", bound=RenderableType)


class Output(Console):
    """A console whose reader may have enough (`| head`), or whose terminal may be closed: what is
    measured goes on, and is saved.
    """

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            self.on_broken_pipe()
            with suppress(OSError):
                print(f"error: nothing more is printed: {error.strerror}", file=sys.stderr)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def render(self, *what: Any, **how: Any) -> Iterator[Segment]:
        """All that is shown passes here: a terminal obeys no text of a trace, server or file."""
        for each in super().render(*what, **how):
            yield each if each.control else each._replace(text=printable(each.text))


class Progress:
    """Shows steps and replays, each in a line, below a table if there is one. A context manager."""

    def __init__(self, console: Console):
        self.console = console
        self.lines: dict[Any, RenderableType] = {}
        self._table: RenderableType | None = None
        # twice per second: drawing takes time from the replay that it shows
        self._live = Live(
            console=console, refresh_per_second=2, get_renderable=self._render, transient=True
        )
        self._ended = threading.Event()
        self._plain = threading.Thread()

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live.start()
        else:
            self._ended.clear()
            self._plain = threading.Thread(target=self._say_lines, daemon=True)
            self._plain.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.stop()
        self._ended.set()
        if self._plain.ident:
            self._plain.join()

    def _say_lines(self) -> None:
        before: Collection[Any] = ()  # a line that was not there is of something short
        while not self._ended.wait(PLAIN_EVERY_S):
            lines = self.lines.copy()
            for line in (lines[key] for key in lines if key in before):
                self.say(str(line))
            before = lines.keys()

    def _render(self) -> RenderableType:
        return Group(*([self._table] if self._table else []), *list(self.lines.values()))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Show nothing meanwhile, and have no thread, so that this process can fork."""
        self.__exit__()
        yield
        self.__enter__()

    def say(self, text: str) -> None:
        """Print text that stays, in a terminal broken between words."""
        if self.console.is_terminal:  # a path that is longer than a line stays whole
            lines = textwrap.TextWrapper(
                self.console.width, break_long_words=False, break_on_hyphens=False
            )
            text = "\n".join(map(lines.fill, text.splitlines()))
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def table(self, table: RenderableType | None) -> None:
        """Show a table above the lines from now on, or none, in a terminal."""
        self._table = table

    def step(self, text: str) -> AbstractContextManager[ProgressStep]:
        """Show what is done, and for how long, while the context lasts."""
        return self._shown(ProgressStep(text))

    def replay(self, name: str, requests: Sequence[Request]) -> AbstractContextManager[Replayed]:
        """Watch one replay, and show it while the context lasts."""
        return self._shown(Replayed(name, requests))

    @contextmanager
    def _shown(self, line: Shown) -> Iterator[Shown]:
        self.lines[line] = line
        try:
            yield line
        finally:
            del self.lines[line]


@dataclass(eq=False)
class ProgressStep:
    """A step; with a total, what has ended of it, a bar, and the time left on this clock."""

    text: str
    started: float = field(default_factory=time.monotonic)
    ended: int = 0
    total: int = 0

    def __str__(self) -> str:
        elapsed = time.monotonic() - self.started
        if not self.ended:
            return f"{self.text} · {elapsed:.0f} s"
        left = elapsed * (self.total - self.ended) / self.ended
        return f"{self.text} · {self.ended}/{self.total} · {left:.0f} s left"

    def __rich__(self) -> RenderableType:
        return ProgressLine(str(self), self.ended, self.total) if self.total else Text(str(self))


@dataclass(frozen=True)
class ProgressLine:
    """A bar, where there is room for it, and a text."""

    text: str
    ended: int
    total: int

    def __str__(self) -> str:
        return self.text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - len(self.text) - 1
        if room < LEAST_BAR:
            yield Text(self.text)
            return
        line = Table.grid(padding=(0, 1))
        line.add_row(ProgressBar(self.total, self.ended, min(BAR, room)), self.text)
        yield line


class Replayed(Watch):
    """One replay's counts, and the time left on this clock."""

    def __init__(self, name: str, requests: Sequence[Request]):
        self._name, self._total = name, len(requests)
        self._started = self._last_ended = time.monotonic()
        self._in_flight = self._ended = self._failed = 0
        self.show: Callable[[Outcome], None] = lambda outcome: None  # called with each outcome

    def sent(self) -> None:
        self._in_flight += 1

    def ended(self, outcome: Outcome) -> None:
        self._in_flight -= 1
        self._ended += 1
        self._last_ended = time.monotonic()
        self._failed += bool(outcome.error)
        self.show(outcome)

    def __str__(self) -> str:
        now = time.monotonic()
        counts = f"{self._name} {self._ended}/{self._total}"
        if self._ended == self._total:
            return f"{counts} · evaluating · {now - self._last_ended:.0f} s"
        elapsed = now - self._started
        rate = self._ended / elapsed if elapsed else 0.0
        left = f"{(self._total - self._ended) / rate:.0f} s left" if rate else f"{elapsed:.0f} s"
        failed = f" · {self._failed} failed" if self._failed else ""
        return f"{counts} · {rate:.1f}/s · {self._in_flight} in flight{failed} · {left}"

    def __rich__(self) -> ProgressLine:
        return ProgressLine(str(self), self._ended, self._total)
