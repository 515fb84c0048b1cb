"""What a run was made on, and from which code: every report says both."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]


def cache() -> Path:
    """The user's folder for what is made once a machine."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
        / "effective-batching"
    )


def cpu() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def gpu() -> str | None:
    """The first GPU's name, memory and driver, as its driver's own tool says; None without one."""
    asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout
        return said.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def processor(hardware: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """What computed: the GPU, or the CPU and how many of its threads."""
    if config.get("device") == "cuda" and hardware.get("gpu"):
        return str(hardware["gpu"]).split(",")[0]
    if "threads" not in config:
        return str(hardware["cpu"])
    n = config["threads"]
    return f"{hardware['cpu']}, {n} thread{'s' * (n != 1)}"


def hardware() -> dict[str, Any]:
    """What the numbers were made on."""
    return {
        "cpu": cpu(),
        "gpu": gpu(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "busy_before_percent": psutil.cpu_percent(interval=0.5),
    }


def command_line(program: str, arguments: Sequence[str]) -> str:
    """A command line as results tell it: without an API key."""
    words = [program, *arguments]
    for i, word in enumerate(words):
        if words[i - 1] == "--api-key" and i:
            words[i] = "…"
        elif word.startswith("--api-key="):
            words[i] = "--api-key=…"
    return shlex.join(words)


def stamp() -> dict[str, Any]:
    """Machine, code and date: what every saved number carries."""
    return {
        "hardware": hardware(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def commit() -> str:
    """The commit of the code that runs, marked when the tree (results apart) differs from it."""
    try:
        git = ["git", "-C", str(ROOT)]
        name = subprocess.run(
            [*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "-uno", "--", ":!results"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name} with changes" if dirty else name
