"""The project's programs in the tests' own process, whose imports would take a new one seconds.

python -m tests.programs MODULE …     a program in a process of its own, whose figures are empty
"""

from __future__ import annotations

import contextlib
import importlib
import io
import runpy
import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from unittest import mock

from matplotlib.figure import Figure

from client import drawing
from compare.report import report
from tests.servers import ROOT


def ran(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m module arguments` from the root. Raises the program's exceptions."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.chdir(ROOT),
        warnings.catch_warnings(action="ignore"),  # as a process of its own would
        mock.patch.object(sys, "argv", [module, *arguments]),
        mock.patch.object(signal, "signal"),  # a program's handlers are not for the tests
    ):
        try:
            program = importlib.import_module(module)
            if hasattr(program, "__path__"):
                program = importlib.import_module(f"{module}.__main__")
            program.main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            if isinstance(ended.code, str):
                print(ended.code, file=err)
    return subprocess.CompletedProcess([module, *arguments], code, out.getvalue(), err.getvalue())


def output(module: str, words: str, *more: str) -> str:
    """Return what a program prints that succeeds; words: as in a shell, and more that are whole."""
    done = ran(module, *shlex.split(words), *more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.contextmanager
def empty_figures() -> Iterator[None]:
    """Reports have empty figures, whose making and drawing takes longer than all else."""
    write_files = report.write_files

    def write(folder: Path, text: str, drawn: Collection[str], svg: bool = False) -> None:
        write_files(folder, text, dict.fromkeys(drawn, Figure), svg)

    def save(figure: Figure, *paths: Path) -> None:
        for path in paths:
            path.touch()

    def of_client(run: Path) -> str:
        return output("compare.report", str(run.resolve()))

    with (
        mock.patch.object(report, "write_files", write),
        mock.patch.object(drawing, "save", save),
        mock.patch("client.client.report", of_client),
    ):
        yield


if __name__ == "__main__":
    del sys.argv[0]
    with empty_figures():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
