"""Where a package, or a folder for temporary files, is missing, a program ends with what to do and
without a traceback; and no terminal's encoding, and no setting of matplotlib, stops one.

Every folder with programs imports this first. It needs the standard library alone, and can be read
by a Python that is too old for the rest.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
FILES = [
    ROOT / "client" / "requirements.txt",
    *(ROOT / f"requirements{of}.txt" for of in ("", "-dev", "-docs", "-ray")),
]  # the smallest first


def sentence(error: BaseException) -> str | None:
    """Return what is missing and what to do; None if this file does not know."""
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):
        return f"error: {error.strerror}; set TMPDIR to a folder that can be written"
    package = (getattr(error, "name", None) or "").partition(".")[0].replace("_", "-")
    listed = re.compile(rf"^([\w-]+-)?{re.escape(package)}\b", re.MULTILINE)
    if not isinstance(error, ModuleNotFoundError) or not package:
        return None
    for file in FILES:
        if file.exists() and listed.search(file.read_text("utf-8")):
            install = f"pip install -r {os.path.relpath(file)}"
            if Path(sys.prefix).resolve() == VENV.resolve():
                return f"error: {error}; {os.path.relpath(VENV)}/bin/python -m {install}"
            python = f"{os.path.relpath(VENV)}/bin/python"
            return f"error: {error}; run {python} {shlex.join(sys.orig_argv[1:])}, or {install}"
    return None


def explain(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Print the sentence, or any other error as Python does."""
    if said := sentence(error):
        print(said, file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = explain
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="backslashreplace")  # what its encoding lacks, as of Latin-1
# no window is opened; notebooks name a backend that is installed for them alone, with which
# matplotlib is not even imported
os.environ["MPLBACKEND"] = "agg"
if sys.version_info < (3, 11):  # noqa: UP036 - it is how a reader learns of it
    sys.exit("error: Python 3.11 or newer is needed; install it and try again")
