"""Facts about the machine and the code of a run, for every result."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from client.results import Json
from client.saving import written
from config.reading import read_json
from scheduling.user_policies import SOURCES, file_of

ROOT = Path(__file__).resolve().parents[1]
SECRET = ("--api-key", "--header")
LIMIT = "client.json"  # in the user's `cache`


def stamp() -> dict[str, Any]:
    """Return machine, commit and date, for a saved result."""
    return {
        "hardware": hardware(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def hardware() -> Json:
    """Return the machine, its software, and how busy it is."""
    return {
        "cpu": cpu(),
        "gpu": _first_line(
            "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
        ),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "busy_before_percent": psutil.cpu_percent(interval=0.5),
    }


def cpu() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line[:10] == "model name")
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def processor(hardware: Json, config: Json) -> str:
    """Return the GPU that computed, or the CPU and its number of threads."""
    if config.get("device") == "cuda" and hardware.get("gpu"):
        return str(hardware["gpu"]).split(",")[0]
    if "threads" not in config:
        return str(hardware["cpu"])
    n = config["threads"]
    return f"{hardware['cpu']}, {n} thread{'s' * (n != 1)}"


def commit() -> str:
    """Return the commit of the code that runs, or unknown, marked when the tree (results apart)
    differs from it, and the hash of each file of a user's own that a policy or order comes from.
    """
    git = functools.partial(_first_line, "git", "-C", str(ROOT), environ=git_environ())
    name = git("rev-parse", "--short=10", "HEAD") or "unknown"
    changed = git("status", "--porcelain", "-uno", "--", ":!results")
    own = [
        f", {source.word} of SHA-256 {source.sha256}"
        for kind, source in SOURCES.items()
        if git("ls-files", file_of(kind)) is None
    ]
    return (f"{name} with changes" if changed else name) + "".join(own)


def git_environ() -> dict[str, str]:
    """Return the environment in which git answers for the folder of the code: for no repository
    around that folder, nor for one that variables name, as git's hooks do.
    """
    others = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return others | {"GIT_CEILING_DIRECTORIES": str(ROOT.parent)}


def command_line(program: str, arguments: Sequence[str]) -> str:
    """Return a command line for results, without the values of SECRET flags."""
    words = [program, *arguments]
    for i, word in enumerate(words):
        name, given, _ = word.partition("=")
        if words[i - 1] in SECRET and i:
            words[i] = "…"
        elif given and name in SECRET:
            words[i] = f"{name}=…"
    return shlex.join(words)


def cache() -> Path:
    """Return the user's folder for files that are made once on a machine."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "effective-batching"


def limit_key() -> str:
    """Return the facts on which `send_limit` depends, as far as they are known before a run."""
    return f"{platform.node()} {cpu()} {platform.python_version()}"


def send_limit() -> Json | None:
    """Return how fast this client can send, if `compare.calibrate` has measured that here."""
    try:
        saved = read_json(cache() / LIMIT)
    except (OSError, ValueError):
        return None
    return saved if isinstance(saved, dict) and saved.get("key") == limit_key() else None


def save_json(path: Path, value: Any) -> None:
    """Write JSON, indented. Raises Unwritten, and ValueError for NaN, which others do not read."""
    with written(path) as file:  # piece by piece: one string of it can be as large as a run
        file.writelines(json.JSONEncoder(indent=1, allow_nan=False).iterencode(value))
        file.write("\n")


def _first_line(*command: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The first line that a program prints; None where it is missing, fails or prints nothing."""
    try:
        output = subprocess.run(command, env=environ, capture_output=True, check=True, timeout=30)
        return output.stdout.decode(errors="replace").splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
