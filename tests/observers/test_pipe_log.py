"""A request log that is a pipe: its lines stay whole, whatever its reader does."""

from __future__ import annotations

import fcntl
import json
import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import launch
from config import build
from observers.request_log import RequestLog
from scheduling.inference import Inference, State
from tests.servers import PATIENCE_S, wait_until

TOKENS = 500  # a line of some 9,000 bytes: a pipe takes at most 4,096 at once or not at all


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(path := tmp_path / "log")
    return path


def opened(pipe: Path) -> int:
    """A reader, and a pipe that takes no more than 4,096 bytes."""
    file = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(file, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(file, True)
    return file


@pytest.fixture
def reader(pipe: Path) -> Iterator[int]:
    yield (file := opened(pipe))
    os.close(file)


def ended(n: int) -> Inference:
    return Inference(
        [0], TOKENS, id=n, state=State.FINISHED, answered_at=1.0, token_times=[n / 7] * TOKENS
    )


def read_until(
    enough: Callable[[bytes], bool], file: int, found: bytes = b"", at_once: int = 65536
) -> bytes:
    while not enough(found):
        assert select.select([file], [], [], PATIENCE_S / 4)[0], "nothing more came"
        found += os.read(file, at_once)
    return found


def whole(data: bytes) -> list[int]:
    """The ids of lines, every one of which is whole."""
    assert data.endswith(b"\n")
    return [json.loads(line)["id"] for line in data.splitlines()]


def test_a_reader_that_stands_still_loses_lines_and_never_halves(
    pipe: Path, reader: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The pipe took 4,096 bytes of a line, and the rest of it was lost."""
    log = RequestLog(str(pipe), "dynamic", 0.0, backlog=3)
    for n in range(30):
        log.answered(ended(n))
    found = read_until(lambda found: found.count(b"\n") >= 3, reader)
    log.answered(ended(99))
    found = read_until(lambda found: b'"id": 99,' in found and found.endswith(b"\n"), reader, found)
    log.close()
    ids = whole(found)
    assert ids == sorted(ids) and ids[:3] == [0, 1, 2] and 4 <= len(ids) < 30
    assert "lines were lost" in caplog.text


def test_the_next_reader_gets_the_rest_of_a_line_that_the_last_one_left(pipe: Path) -> None:
    first = opened(pipe)
    log = RequestLog(str(pipe), "dynamic", 0.0)
    for n in range(3):
        log.answered(ended(n))
    found = read_until(lambda found: len(found) > 6000, first, at_once=1000)
    os.close(first)
    wait_until(lambda: log._lines._lost > 0)  # the thread has found that nobody reads
    second = opened(pipe)
    wait_until(log._lines._queue.empty)
    log.answered(ended(7))
    found = read_until(lambda found: b'"id": 7,' in found and found.endswith(b"\n"), second, found)
    log.close()
    os.close(second)
    ids = whole(found)
    assert ids[0] == 0 and ids[-1] == 7 and ids == sorted(set(ids))


def test_the_launcher_does_not_end_what_a_pipes_reader_reads(pipe: Path, reader: int) -> None:
    """It opened and closed the pipe: `cat pipe` ended before the server had begun."""
    os.set_blocking(reader, False)
    launch._check_files(build("dynamic", {"model": "fake", "request_log": str(pipe)}, {}))
    links = {int(file.name): os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()}
    kept = [
        number for number, path in links.items() if path == str(pipe.resolve()) and number != reader
    ]
    with pytest.raises(BlockingIOError):  # and not b"", which is the end
        os.read(reader, 1)
    assert len(kept) == 1 and os.get_inheritable(kept[0]), "gunicorn's master has it, too"
    os.close(kept[0])
