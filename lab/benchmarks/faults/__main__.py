"""Every fault, done to a real server, with the promise and the outcome.

    python -m lab.benchmarks.faults [--only WORDS] [--out DIR]

Ten minutes at most. Writes faults.md and faults.json to --out. Ends with exit code 1 if a promise
was broken.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compare.report.tables import markdown
from config.settings import ConfigError
from lab.benchmarks.faults import connections, processes
from lab.benchmarks.faults.tools import Fault
from lab.benchmarks.harness import Benchmark, run

FAULTS = [*connections.FAULTS, *processes.FAULTS]
BENCHMARK = Benchmark(
    "faults",
    __doc__,
    {
        "--only": (str, "faults alone whose name holds these words"),
        "--out": (Path("runs/faults"), "folder"),
    },
)


def do(fault: Fault) -> dict[str, Any]:
    """Inject a fault; return its outcome. An exception is a broken promise, too."""
    start = time.monotonic()
    try:
        seen, kept = fault.run(short=False)
    except Exception as error:
        seen, kept = f"{type(error).__name__}: {str(error)[:300]}", False
    seconds = round(time.monotonic() - start, 1)
    verdict = "kept  " if kept else "BROKEN"
    print(f"{verdict} {seconds:6.1f} s  {fault.name}: {seen}", flush=True)
    result = {"fault": fault.name, "promise": fault.promise, "seen": seen}
    return result | {"kept": kept, "seconds": seconds}


def table(faults: Sequence[Mapping[str, Any]]) -> str:
    rows = [["fault", "promised", "seen", "kept"]]
    for each in faults:
        cells = [each[name].replace("\n", " ") for name in ("fault", "promise", "seen")]
        rows.append([*cells, "yes" if each["kept"] else "**no**"])
    return markdown(rows, left=4)


def main() -> None:
    options = BENCHMARK.parser().parse_args()
    chosen = [fault for fault in FAULTS if options.only is None or options.only in fault.name]
    if not chosen:
        raise ConfigError(f"--only {options.only!r}: no fault has these words in its name")
    result = BENCHMARK.record() | {"faults": [do(fault) for fault in chosen]}
    hardware, body = result["hardware"], table(result["faults"])
    kept = sum(each["kept"] for each in result["faults"])
    setup = (
        f"{kept} of {len(chosen)} promises kept, on {hardware['cpu']}, {hardware['cores']} cores, "
        f"which servers and clients share"
    )
    BENCHMARK.write(options.out, "Faults, done to real servers", setup, body, result)
    if kept < len(chosen):
        sys.exit(1)


if __name__ == "__main__":
    run(main)
