"""SIGTERM, and SIGHUP of a closed terminal, end a program as Ctrl-C does."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from client.stopping import end_as_on_ctrl_c, held
from tests.counts import nightly_but
from tests.servers import launched, wait_until
from tests.stub import stub

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def unhandled(number: int, _: object) -> None:
    raise AssertionError(f"{signal.strsignal(number)} is not handled")


@pytest.fixture
def handlers() -> Iterator[None]:
    """Unless a test has others, a signal is an error: by default it would end the tests."""
    before = [(each, signal.signal(each, unhandled)) for each in SIGNALS]
    yield
    for each, handler in before:
        signal.signal(each, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_of_two_signals_the_second_changes_nothing(first: signal.Signals) -> None:
    """A terminal that is closed sends SIGHUP twice: the second stopped the saving."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a script's background job
    end_as_on_ctrl_c()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(first)
    signal.signal(signal.SIGINT, unhandled)
    for again in (signal.SIGTERM, signal.SIGHUP):
        signal.raise_signal(again)


@pytest.mark.usefixtures("handlers")
def test_nohup_still_ignores_sighup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end_as_on_ctrl_c()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_ctrl_c_waits_while_something_is_saved() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        steps.append("saved")
    assert steps == ["saved"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("how", nightly_but([signal.SIGHUP], [signal.SIGHUP, signal.SIGTERM]))
def test_a_load_that_is_stopped_is_saved(how: signal.Signals, tmp_path: Path) -> None:
    """It was lost: client.py had no handler."""
    run = tmp_path / "run"
    with stub() as server:
        words = f"--url {server.url} --api openai --numsamples 2000 --arrival constant:20 --quiet"
        words += f" --lengths fixed:2 --out {run} --figure {tmp_path}/figure.png"
        with launched(sys.executable, "client/client.py", *words.split()) as process:
            wait_until(lambda: len(server.bodies) > 5, every_s=0.05)
            process.send_signal(how)
            process.send_signal(how)
            said, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in said, said
    summary = json.loads((run / "summary.json").read_text())
    assert summary["partial"] and summary["variants"]["stub"]["completed"] > 0
    assert (run / "report.html").exists()
