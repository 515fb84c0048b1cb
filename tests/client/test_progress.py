"""What is shown while a user waits: a line that moves in a terminal, and fits it."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
from rich.console import Console

from client import progress as module
from client.outcomes import Outcome
from client.progress import Progress, Replayed
from client.workloads import Workload
from compare.report import tables
from tests.servers import wait_until

LONG = "requests are sent at 1,234.5 requests/s; " * 5


@contextmanager
def replayed(name: str, total: int, sent: int, ended: int, failed: int) -> Iterator[Replayed]:
    """A replay since ten seconds."""
    requests = Workload().requests(total)
    with mock.patch.object(time, "monotonic", lambda: 100.0):
        watch = Replayed(name, requests)
        for request in requests[:sent]:
            watch.sent()
            if request.id < ended:
                watch.ended(Outcome(request, 0, 0, 0, error="500" if request.id < failed else ""))
    with mock.patch.object(time, "monotonic", lambda: 110.0):
        yield watch


@pytest.mark.parametrize(("counts", "line"), [
    ((40, 20, 12, 0), "static 12/40 · 1.2/s · 8 in flight · 23 s left"),
    ((40, 20, 12, 2), "static 12/40 · 1.2/s · 8 in flight · 2 failed · 23 s left"),
    ((40, 20, 0, 0), "static 0/40 · 0.0/s · 20 in flight · 10 s"),
    # it goes on to change after the last answer
    ((3, 3, 3, 0), "static 3/3 · evaluating · 10 s"),
])  # fmt: skip
def test_a_line_tells_rate_and_the_time_left(counts: tuple[int, int, int, int], line: str) -> None:
    """By this clock: hours of a trace may pass in seconds."""
    with replayed("static", *counts) as watch:
        assert str(watch) == line


@pytest.mark.parametrize("columns", [40, 50, 60, 79, 80, 120])
@pytest.mark.parametrize("name", ["static", "capacity of dynamic", "a-long-name at 0.5946/s"])
def test_lines_fit_the_terminal_and_break_between_words(columns: int, name: str) -> None:
    """A replay's line of 80 columns had two lines, and lines of a sweep broke within numbers."""
    console = Console(force_terminal=True, width=columns, file=(shown := io.StringIO()))
    with replayed(name, 3000, 1500, 1212, 13) as watch:
        console.print(watch)
        line = str(watch)
    Progress(console).say(LONG)
    lines = re.sub(r"\x1b\[[\d;]*m", "", shown.getvalue()).splitlines()
    assert max(map(len, lines)) <= columns
    assert {*line.split(), *LONG.split()} <= {*" ".join(lines).split()}
    assert len(line) > columns or lines[0].endswith(line)


def test_a_path_longer_than_the_terminal_stays_one_word() -> None:
    console = Console(force_terminal=True, width=50, file=(shown := io.StringIO()))
    Progress(console).say(text := "results: /a" + "/folder" * 10)
    assert shown.getvalue().split() == text.split()


def test_steps_and_replays_move_in_a_terminal() -> None:
    """A comparison was silent for seconds, while a server started and while figures were drawn."""
    console = Console(force_terminal=True, width=100, record=True)
    with Progress(console) as progress, progress.step("starting static"):
        with progress.replay("static", Workload().requests(3)) as watch:
            progress.table(tables.sweep_table({"static": [[]]}))
            watch.sent()
            console.print(progress._render())
        text = console.export_text()
        assert "static 0/3" in text and "sustained" in text and "starting static · 0 s" in text
    assert progress.lines == {}


def test_elsewhere_a_line_comes_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PLAIN_EVERY_S", 0.01)
    console = Console(file=(shown := io.StringIO()), width=20)
    with Progress(console) as progress:
        progress.say(LONG)
        with progress.step("starting the fake engine"):
            wait_until(lambda: shown.getvalue().count("starting the fake engine · 0 s\n") > 1)
        with progress.paused():
            assert not progress._plain.is_alive(), "a process with threads cannot fork safely"
    assert not progress._plain.is_alive() and shown.getvalue().splitlines()[0] == LONG


def test_a_reader_that_has_enough_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`./compare.sh … | head -3` ended at its next line, and what it had measured was lost."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        console = module.Output()
        console.print("of the first seed")
        console.print("of the second seed")
        out.write("what is printed else")
