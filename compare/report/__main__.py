"""Rebuild a run's report, or compare runs.

python -m compare.report RUN                  rebuild a run's report
python -m compare.report RUN RUN… --out DIR  compare runs of other commits, machines, settings
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from compare.report.report import show, write
from compare.report.side_by_side import compare_runs
from compare.runs import RunError, load


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m compare.report", description="Rebuild a run's report, or compare runs."
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="a folder of compare.sh or simulate.sh",
    )
    parser.add_argument("--out", type=Path, help="folder for the comparison of several runs")
    arguments = parser.parse_args()
    if (len(arguments.runs) > 1) != (arguments.out is not None):
        parser.error(
            "give --out DIR with several runs, and not with one, whose report goes into its own "
            "folder"
        )
    try:
        runs = [load(folder) for folder in arguments.runs]
        if len(runs) == 1:
            write(runs[0])
            show(runs[0], Console())
        else:
            compare_runs(runs, arguments.out)
            print(f"report.html, report.md and figures: {arguments.out}")
    except RunError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
