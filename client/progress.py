"""Progress of long work: a line that moves in a terminal, else a plain line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from client.load import Watch
from client.outcomes import Outcome
from client.traces import Request

PLAIN_EVERY_S = 10.0
BAR = 24


class Progress:
    """Shows replays, each in a line, below a table if there is one. A context manager."""

    def __init__(self, console: Console):
        self.console = console
        self.lines: dict[Any, RenderableType] = {}
        self._table: RenderableType | None = None
        # twice a second: drawing takes time from the replay that it shows
        self._live = Live(
            console=console, refresh_per_second=2, get_renderable=self._render, transient=True
        )

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        return Group(*([self._table] if self._table else []), *list(self.lines.values()))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Show nothing meanwhile, and have no thread, so that this process can fork."""
        self.__exit__()
        yield
        self.__enter__()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def table(self, table: RenderableType) -> None:
        """Show a table above the lines from now on, in a terminal."""
        self._table = table

    @contextmanager
    def replay(self, name: str, requests: Sequence[Request]) -> Iterator[Replayed]:
        """Watch one replay, and show it while the context lasts."""
        replayed = Replayed(name, requests, None if self.console.is_terminal else self.say)
        self.lines[replayed] = replayed
        try:
            yield replayed
        finally:
            del self.lines[replayed]


class Replayed(Watch):
    """One replay's counts, and the time left on this clock. `say` prints them now and then."""

    def __init__(self, name: str, requests: Sequence[Request], say: Callable[[str], None] | None):
        self._name = name
        self._total = len(requests)
        self._say = say
        self._started = self._printed = time.monotonic()
        self._in_flight = self._ended = self._failed = 0
        self.show: Callable[[Outcome], None] = lambda outcome: None  # called with each outcome

    def sent(self) -> None:
        self._in_flight += 1

    def ended(self, outcome: Outcome) -> None:
        self._in_flight -= 1
        self._ended += 1
        self._failed += bool(outcome.error)
        self.show(outcome)

    def tick(self) -> None:
        if self._say and time.monotonic() > self._printed + PLAIN_EVERY_S:
            self._printed = time.monotonic()
            self._say(str(self))

    def __str__(self) -> str:
        elapsed = time.monotonic() - self._started
        rate = self._ended / elapsed if elapsed else 0.0
        text = (
            f"{self._name}: {self._ended}/{self._total} ended, {rate:.1f} a second, "
            f"{self._in_flight} in flight, {self._failed} failed"
        )
        if rate:
            text += f", {(self._total - self._ended) / rate:.0f} s left"
        return text

    def __rich__(self) -> RenderableType:
        line = Table.grid(padding=(0, 1))
        line.add_row(ProgressBar(self._total, self._ended, BAR), Text(str(self)))
        return line
