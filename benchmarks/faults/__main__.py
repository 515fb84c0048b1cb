"""Every fault, done to a real server, with what is promised and what was seen.

    python -m benchmarks.faults [--short] [--only WORDS] [--soak MINUTES] [--out DIR]

Ten minutes at most. --short does the same smaller, for the tests; --soak adds so many minutes of
load. Writes faults.md and faults.json (and soak.png) to --out. Ends with exit code 1 if a promise
was broken.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults import connections, processes, replicas, soak
from benchmarks.faults.tools import FAULTS, Fault, Seen
from client.machine import stamp
from compare.report import drawing

__all__ = ["connections", "processes", "replicas"]  # they fill FAULTS


def do(fault: Fault, short: bool) -> dict[str, Any]:
    """Do it; what it could not bear to see is a broken promise too."""
    start = time.monotonic()
    try:
        seen = fault.run(short)
    except Exception as error:
        seen = Seen(f"{type(error).__name__}: {str(error)[:300]}", False)
    entry = {"fault": fault.name, "promise": fault.promise, "seen": seen.text, "kept": seen.kept}
    seconds = round(time.monotonic() - start, 1)
    print(
        f"{'kept  ' if seen.kept else 'BROKEN'} {seconds:6.1f} s  {fault.name}: {seen.text}",
        flush=True,
    )
    return entry | {"seconds": seconds}


def table(found: Sequence[Mapping[str, Any]]) -> str:
    rows = ["| fault | promised | seen | kept |", "|---|---|---|---|"]
    for entry in found:
        cells = [
            entry["fault"],
            entry["promise"],
            entry["seen"],
            "yes" if entry["kept"] else "**no**",
        ]
        rows.append(
            "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
        )
    return "\n".join(rows)


def report(result: Mapping[str, Any]) -> str:
    """faults.md."""
    hardware, found = result["hardware"], result["faults"]
    kept = sum(entry["kept"] for entry in found)
    text = [
        "# Faults, done to real servers",
        f"{kept} of {len(found)} promises kept.",
        table(found),
    ]
    if "soak" in result:
        text.append("![What a server held over time](soak.png)")
    text.append(
        f"- {hardware['cpu']}, {hardware['cores']} cores, which servers and clients share; "
        f"torch {hardware['torch']}\n"
        f"- commit {result['commit']}, {result['date']}\n- `{result['command']}`"
    )
    return "\n\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description="Faults, done to real servers."
    )
    parser.add_argument("--short", action="store_true", help="the same faults, smaller")
    parser.add_argument(
        "--only",
        metavar="WORDS",
        help="faults alone whose name holds these words; none for no fault",
    )
    parser.add_argument(
        "--soak", type=float, metavar="MINUTES", help="of load besides (default: none)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/faults"), help="for results (default: runs/faults)"
    )
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if options.only is None or options.only in fault.name]
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.faults", *sys.argv[1:]])
    } | stamp()
    if options.soak:
        result["soak"] = {}
        chosen.append(soak.fault(options.soak, result["soak"]))
    if not chosen:
        parser.error(f"--only {options.only!r}: no fault has these words in its name")
    result["faults"] = [do(fault, options.short) for fault in chosen]
    options.out.mkdir(parents=True, exist_ok=True)
    if result.get("soak"):
        caption = f"{result['hardware']['cpu']} · commit {result['commit']} · {result['date'][:10]}"
        drawing.save(soak.figure(result["soak"], caption), options.out / "soak.png")
    (options.out / "faults.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "faults.md").write_text(report(result))
    print(f"written to {options.out}")
    if not all(entry["kept"] for entry in result["faults"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
