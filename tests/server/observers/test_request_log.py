"""The request log has a whole line for each request that ended; serving never waits for it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from generate.auto import build
from scheduling.inference import Inference, State
from server import launch
from server.observers.request_log import RequestLog
from tests.servers import PATIENCE_S, ClientOf, wait_until


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_line_has_the_request_s_id(client_of: ClientOf, tmp_path: Path, stream: bool) -> None:
    """What no header can hold, or is too long for one, gets another id."""
    client, found = client_of(order="sjf", request_log=str(tmp_path / "log.jsonl")), []
    body = {"prompt": ["hi", "there"], "num_tokens": 2, "stream": stream}
    body |= {"user": "ann", "priority": -1}
    for given in ("trace-7;a=b", "x" * 128, "x" * 129, "a b", "é", "", None):
        headers = {} if given is None else {"X-Request-Id": given}
        response = client.post("/inference", json=body, headers=headers)
        assert response.status_code == 200 and response.data
        [told] = response.headers.getlist("X-Request-Id")
        found += [told, told]
    client.application.extensions["engine"].close()
    assert [line["request_id"] for line in lines(tmp_path / "log.jsonl")] == found
    for line in lines(tmp_path / "log.jsonl"):
        assert (line["user"], line["priority"], line["predicted_tokens"]) == ("ann", -1, 2)
    assert found[:3] == ["trace-7;a=b", "trace-7;a=b", "x" * 128]
    assert len(set(found)) == 7 and all(re.fullmatch("[0-9a-f]{32}", id_) for id_ in found[4:])


def test_what_ended_otherwise_is_a_line_too(client_of: ClientOf, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"from": "an earlier run"}\n')
    client = client_of("nobatch", request_log=str(path))
    manager = client.application.extensions["engine"].manager
    manager.enqueue([Inference([0], 1000)])
    client.post("/inference", json={"prompt": "hi", "num_tokens": 5, "timeout_s": 0.02})
    manager.close()
    client.application.extensions["engine"].request_log.close()
    earlier, expired, stopped = lines(path)
    assert earlier == {"from": "an earlier run"}
    late: dict[str, Any] = {
        "state": "expired", "error": "deadline_passed", "batch_id": None, "admitted_at": None,
        "token_times": [], "finish_reason": None,
    }  # fmt: skip
    assert expired | late == expired
    drained = {"state": "failed", "error": "draining", "batch_id": 0, "position": 0}
    assert stopped | drained == stopped


# ---- a log that is a pipe: its lines stay whole, whatever its reader does

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
    done: dict[str, Any] = {"state": State.FINISHED, "answered_at": 1.0}
    return Inference([0], TOKENS, id=n, token_times=[n / 7] * TOKENS, **done)


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


def test_a_reader_stands_still(pipe: Path, reader: int, caplog: pytest.LogCaptureFixture) -> None:
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
    kept = [n for n, path in links.items() if path == str(pipe.resolve()) and n != reader]
    with pytest.raises(BlockingIOError):  # and not b"", which is the end
        os.read(reader, 1)
    assert len(kept) == 1 and os.get_inheritable(kept[0]), "gunicorn's master has it, too"
    os.close(kept[0])
