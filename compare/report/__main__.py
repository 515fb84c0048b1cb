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
from compare.report.side_by_side import beside
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
        help="a folder of compare.sh or simulate.sh; of several, also other tools' JSON files",
    )
    parser.add_argument("--out", type=Path, help="folder for the comparison of several runs")
    arguments = parser.parse_args()
    if (len(arguments.runs) > 1) != (arguments.out is not None):
        parser.error(
            "give --out DIR with several runs, and not with one, whose report goes into its own "
            "folder"
        )
    try:
        if len(arguments.runs) == 1:
            write(run := load(arguments.runs[0]))
            show(run, Console())
        else:
            beside(arguments.runs, arguments.out)
            print(f"report.html, report.md and figures: {arguments.out}")
    except RunError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
