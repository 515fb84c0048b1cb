"""Files are whole or not there, in UTF-8, and neither a locale nor a terminal stops a program."""

from __future__ import annotations

import ast
import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from client.saving import Unwritten, write, written
from tests.programs import output
from tests.servers import ROOT

OPENS = {"open", "read_text", "write_text", "write_bytes", "fdopen", "NamedTemporaryFile"}
WRITERS = {  # what goes into a file piece by piece, while a program or a server runs
    "client/saving.py", "lab/benchmarks/gpu.py", "lab/studies/own_vllm.py",
    "simulate/vllm/vllm_recorder.py", "simulate/playground/worker.py",  # in a browser
}  # fmt: skip


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path) -> None:
    """A full disk cut report.md in its middle, and was a traceback."""
    write(path := tmp_path / "new" / "summary.json", "whole")
    why = "summary.json cannot be written: No space left on device; make room there, or name"
    with pytest.raises(Unwritten, match=why), written(path) as file:
        file.write("ha")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(KeyboardInterrupt), written(path) as file:
        file.write("ha")
        raise KeyboardInterrupt
    assert path.read_text() == "whole" and [*path.parent.iterdir()] == [path]
    with pytest.raises(Unwritten, match="below cannot be written"):
        write(path / "below", b"")


def test_a_pipe_and_a_link_stay_what_they_are(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write(pipe, "read")
    assert os.read(reader, 9) == b"read" and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)
    (link := tmp_path / "link").symlink_to(place := tmp_path / "place")
    write(link, "é")
    assert link.is_symlink() and place.read_bytes() == b"\xc3\xa9"


def test_every_file_is_opened_as_utf_8_and_written_by_one_function() -> None:
    """In other locales a report was lost that had a dash, and files of one could not be read."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, check=True)
    wrong = []
    for name in listed.stdout.decode().split():
        if name.startswith(("tests/", "lab/tests/")):
            continue
        for call in ast.walk(ast.parse((ROOT / name).read_text("utf-8"))):
            if isinstance(call, ast.Call) and not is_right(call, name):
                wrong.append(f"{name}:{call.lineno}: {ast.unparse(call)}")
    assert not wrong


def is_right(call: ast.Call, file: str) -> bool:
    words, what = ast.unparse(call), call.func
    name = getattr(what, "attr", getattr(what, "id", ""))
    if "subprocess" in words.partition("(")[0]:
        return not {"text", "universal_newlines"} & {each.arg for each in call.keywords}
    if name not in OPENS or words.startswith(("os.open", "Image.open", "tarfile.open")):
        return True
    modes = [each.value for each in call.args if isinstance(each, ast.Constant)]
    writes = name.startswith("write") or {"w", "wb", "a"} & {*modes}
    is_binary = name == "write_bytes" or {"rb", "wb"} & {*modes}
    return (is_binary or "utf-8" in words or "encoding=" in words) and (
        not writes or file in WRITERS
    )


def test_a_report_depends_neither_on_a_locale_nor_on_settings_of_matplotlib(tmp_path: Path) -> None:
    """Colab and Jupyter set MPLBACKEND for each command, and where it named a module that is not
    installed here the report was lost; with LC_ALL=C, by the first dash.
    """
    words = "--numsamples 9 --modes dynamic --arrival burst --jobs 1 --repeats 2"
    output("simulate", f"{words} --out {tmp_path / 'run'}")
    names = ("report.md", "report.html", "latency_vs_tokens.png", "rows.png")
    before = {name: (tmp_path / "run" / name).read_bytes() for name in names}
    (own := tmp_path / "matplotlibrc").write_text("text.usetex: True\naxes.facecolor: red\n")
    hostile = {
        "MPLBACKEND": "module://matplotlib_inline.backend_inline", "MATPLOTLIBRC": str(own),
        "MPLCONFIGDIR": str(own), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii", "COLUMNS": "200",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "compare.report", str(tmp_path / "run")],
        cwd=ROOT, env=os.environ | hostile, capture_output=True, encoding="ascii",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\\xb1" in done.stdout, "± is escaped, which ASCII lacks"
    assert before == {name: (tmp_path / "run" / name).read_bytes() for name in names}
