"""Neither a closed terminal, nor SIGKILL, nor a full disk loses what was measured."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from unittest import mock

import psutil
import pytest
from rich.console import Console

from client import runs
from client.progress import Progress
from client.results import OF_POINT, Point, Result
from compare import calibrate
from compare.measuring import Measured, Measuring
from tests.compare.test_compare import FAKE, are_gone, completed_by_a_server_of
from tests.counts import nightly_but
from tests.programs import output, ran
from tests.servers import ROOT, launched, wait_until
from tests.stub import stub

FIND = "simulate --find order=fcfs,sjf --slo ttft:9000 --lengths fixed:2 --arrival poisson:15"
FIND += " --numsamples 200 --repeats 2000 --jobs 2"
WORDS = "--modes static,dynamic --numsamples 30 --lengths choice:3,9 --arrival burst --jobs 1"
# of the process that it starts: this terminal is its own
IN_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@contextlib.contextmanager
def in_a_terminal(*words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A program in a terminal of its own, and the file of the terminal, which nobody reads."""
    ours, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, *words],
        cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()


def test_a_closed_terminal_loses_nothing(tmp_path: Path) -> None:
    """The comparison was lost, and gunicorn kept its port and its memory."""
    words = f"-m tests.programs compare {FAKE} --modes dynamic --arrival burst --lengths fixed:400"
    words += f" --numsamples 200 --out {tmp_path}"
    with in_a_terminal(*words.split()) as (process, terminal):
        wait_until(lambda: completed_by_a_server_of(process.pid) > 10, every_s=0.2)
        servers = psutil.Process(process.pid).children(recursive=True)
        os.close(terminal)
        process.send_signal(signal.SIGHUP)  # the shell's, besides the terminal's own
        process.wait(timeout=60)
    assert servers and are_gone(servers)
    kept = json.loads((tmp_path / "dynamic.json").read_text())
    assert kept["partial"] and 0 < kept["completed"] < 200
    assert "**Partial**" in (tmp_path / "report.md").read_text()


@pytest.mark.usefixtures("undrawn")
def test_what_was_measured_before_sigkill_is_kept_and_no_server_stays(tmp_path: Path) -> None:
    """All variants of the seed were lost, and gunicorn stayed."""
    words = f"-m tests.programs compare {FAKE} --modes nobatch,dynamic --arrival burst"
    words += f" --lengths fixed:200 --numsamples 9 --max-batch-size 1 --out {tmp_path}"
    with launched(sys.executable, *words.split()) as process:
        wait_until((tmp_path / "summary.json").exists, every_s=0.05)
        wait_until(lambda: completed_by_a_server_of(process.pid), every_s=0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        servers = [each for each in children if each.name() not in ("sh", "sleep")]
        process.kill()
        process.wait()
        wait_until(lambda: servers and are_gone(servers), every_s=0.1)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["partial"] and [*summary["variants"]] == ["nobatch"]
    measured = (tmp_path / "nobatch.json").stat().st_mtime_ns
    assert "missing: 1 of 2 measurements" in output("compare", f"--resume {tmp_path}")
    assert (tmp_path / "nobatch.json").stat().st_mtime_ns == measured
    assert not runs.load(tmp_path).partial


class Killed(BaseException):
    """As SIGKILL does, it ends a program that saves nothing more."""


def killed(words: str, n: int) -> None:
    """Run simulate.sh, and kill it when it begins its n-th measurement."""
    really, calls = Measuring.measured, []

    def measured(self: Measuring, seed: int, name: str) -> Measured:
        calls.append(name)
        if len(calls) == n:
            raise Killed
        return really(self, seed, name)

    with mock.patch.object(Measuring, "measured", measured), pytest.raises(Killed):
        ran("simulate", *words.split())


@pytest.mark.usefixtures("undrawn")
def test_a_run_goes_on_with_the_variant_that_was_measured_when_it_was_killed(
    tmp_path: Path,
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    output("simulate", f"{WORDS} --repeats 2 --out {whole}")
    killed(f"{WORDS} --repeats 2 --out {run}", 4)
    first, second = (runs.read_json(run / f"seed-{k}" / "summary.json") for k in range(2))
    assert (first["partial"], second["partial"]) == (False, True)
    assert [*second["variants"]] == ["dynamic"], "the second seed is measured backwards"
    # a file of the next one was being written
    (run / "seed-1" / "static.json.1.part").write_text("{")
    shown = output("simulate", f"--resume {run}")
    assert "missing: 1 of 4 measurements" in shown
    assert runs.load(run).results == runs.load(whole).results


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_was_killed_before_anything_was_measured_is_a_sentence(tmp_path: Path) -> None:
    killed(f"{WORDS} --out {tmp_path}", 1)
    done = ran("simulate", "--resume", str(tmp_path))
    assert done.returncode == 2 and "holds no run" in done.stderr


@pytest.mark.usefixtures("undrawn")
def test_the_points_of_a_sweep_are_kept_as_they_are_measured(tmp_path: Path) -> None:
    points: list[Point] = []

    def add(name: str, point: Point) -> str:
        if len(points) == 2:
            raise Killed
        points.append(point)
        return ""

    words = "--modes dynamic --numsamples 30 --lengths fixed:9 --sweep --seconds 0.1 --jobs 1"
    with (
        mock.patch("compare.report.sentences.point_line", add),
        pytest.raises(Killed),
    ):
        ran("simulate", *f"{words} --out {tmp_path}".split())
    summary = runs.read_json(tmp_path / "summary.json")
    points.sort(key=lambda point: point.rate)
    assert summary["sweep"] == {"dynamic": [point.json(OF_POINT) for point in points]}
    assert summary["partial"] and not summary["swept"], "--resume measures it anew"


@pytest.mark.parametrize(
    "how", nightly_but([signal.SIGTERM], [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
)
def test_trials_are_kept_and_processes_end_with_the_one_that_started_them(
    how: signal.Signals, tmp_path: Path
) -> None:
    """SIGTERM lost the trials of --find, and its processes waited for work for ever."""
    code, said = ended(f"{FIND} --out {tmp_path}", how)
    if how != signal.SIGKILL:
        assert code == 130 and "Traceback" not in said
        found = runs.read_json(tmp_path / "find.json")
        assert found["stopped"] and all(each["traces"] for each in found["tried"])
        assert "interrupted: what follows" in (tmp_path / "find.md").read_text()


def ended(words: str, how: signal.Signals) -> tuple[int, str]:
    """End a program with two processes once it has tried something: its exit code and output."""
    with launched(sys.executable, *f"-m {words}".split()) as process:
        assert process.stdout
        while "traces each" not in (line := process.stdout.readline()) and "1 of " not in line:
            assert line, "it ended before it had tried anything"
        workers = psutil.Process(process.pid).children()
        process.send_signal(how)
        said = process.communicate(timeout=60)[0]
        wait_until(lambda: len(workers) == 2 and are_gone(workers), every_s=0.1)
    return process.returncode, said


@pytest.mark.usefixtures("undrawn")
def test_ctrl_c_while_a_variant_is_saved_keeps_it(tmp_path: Path) -> None:
    @contextlib.contextmanager
    def came() -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    with mock.patch("compare.comparison.held", came):
        done = ran("simulate", *f"{WORDS} --out {tmp_path}".split())
    kept = f"interrupted; what was simulated is kept; --resume {tmp_path} goes on\n"
    assert (done.returncode, done.stderr) == (130, kept)
    assert [*runs.load(tmp_path).first["variants"]] == ["static"]
    output("simulate", f"--resume {tmp_path}")


# ---- disks


@contextlib.contextmanager
def full(*folders: Path, after: int = 0) -> Iterator[None]:
    """Files in these folders, but for the first few, have no room."""
    really, written = Path.open, []

    def opened(self: Path, mode: str = "r", *how: Any, **more: Any) -> IO[Any]:
        if mode[0] == "w" and any(self.is_relative_to(folder) for folder in folders):
            written.append(self)
            if len(written) > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return really(self, mode, *how, **more)

    with mock.patch.object(Path, "open", opened):
        yield


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder := tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("after", nightly_but([0, 3], [0, 1, 3, 5]))
def test_what_a_full_disk_does_not_take_is_saved_elsewhere(
    after: int, elsewhere: Path, tmp_path: Path
) -> None:
    """It was twenty lines of traceback, and the seed was lost."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    output("simulate", f"{WORDS} --repeats 2 --out {whole}")
    with full(out, after=after):
        done = ran("simulate", *f"{WORDS} --repeats 2 --out {out}".split())
    assert done.returncode == 1 and not done.stderr
    [folder] = elsewhere.iterdir()
    assert "cannot be written: No space left on device" in done.stdout
    assert f"saved in {folder} instead" in done.stdout
    assert runs.load(folder).results == runs.load(whole).results
    assert (folder / "report.html").exists() and not [*out.rglob("*.part")]
    assert "missing: 0 of 4" in output("simulate", f"--resume {folder}")


@pytest.mark.usefixtures("undrawn")
def test_a_load_and_the_trials_of_find_are_saved_elsewhere(elsewhere: Path, tmp_path: Path) -> None:
    out, figure = tmp_path / "out", tmp_path / "figure.png"
    with stub() as server, full(out):
        words = f"--url {server.url} --api openai --numsamples 2 --arrival burst --quiet"
        sent = ran("client.client", *f"{words} --out {out} --figure {figure}".split())
        words = "--find replicas=1 --arrival poisson:3 --numsamples 30 --slo ttft:9e3 --repeats 2"
        found = ran("simulate", *f"{words} --jobs 1 --out {out}".split())
    first, second = sorted(elsewhere.iterdir(), key=lambda path: path.stat().st_ctime_ns)
    assert sent.stderr == f"error: the run is saved in {first}, as {out} cannot be written\n"
    assert (sent.returncode, found.returncode) == (1, 1)
    assert (first / "report.html").exists() and not runs.load(first).partial
    assert f"find.md, find.json and find.png: {second}" in found.stdout
    assert runs.read_json(second / "find.json")["best"]


def test_a_calibration_that_cannot_be_kept_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "server", lambda *_: contextlib.nullcontext("http://h"))
    monkeypatch.setattr(calibrate, "warm_up", lambda _: None)
    monkeypatch.setattr(calibrate, "in_time", lambda _: True)
    monkeypatch.setattr(calibrate, "measure", lambda *_: Result(request_throughput=9.0))
    said = io.StringIO()
    with full(tmp_path), Progress(Console(file=said)) as progress:
        assert calibrate.calibrate(progress)["rate"] == calibrate.RATES[-1]
    assert "No space left on device" in said.getvalue()


@pytest.mark.usefixtures("undrawn")
def test_where_nothing_can_be_written_it_is_said_in_a_sentence(
    elsewhere: Path, tmp_path: Path
) -> None:
    with full(tmp_path):
        done = ran("simulate", *f"{WORDS} --out {tmp_path / 'out'}".split())
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"error: {elsewhere}" in done.stderr and "No space left on device" in done.stderr


@pytest.mark.usefixtures("undrawn")
def test_a_folder_that_is_deleted_meanwhile_is_made_again(tmp_path: Path) -> None:
    """Also with what was in it of this seed."""
    really = Measuring.measured

    def measured(self: Measuring, seed: int, name: str) -> Measured:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        return really(self, seed, name)

    with mock.patch.object(Measuring, "measured", measured):
        output("simulate", f"{WORDS} --out {tmp_path / 'out'}")
    assert not runs.load(tmp_path / "out").partial


def test_a_full_disk_of_what_is_printed_stops_nothing(tmp_path: Path) -> None:
    words = f"{WORDS} --modes dynamic --out {tmp_path}"
    with open("/dev/full", "w") as printed:
        done = subprocess.run(
            [sys.executable, "-m", "tests.programs", "simulate", *words.split()],
            cwd=ROOT, stdout=printed, stderr=subprocess.PIPE, encoding="utf-8",
        )  # fmt: skip
    assert done.stderr == "error: nothing more is printed: No space left on device\n"
    assert (tmp_path / "report.html").exists()
