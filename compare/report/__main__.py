"""Rebuild a run's report:  python -m compare.report RUN"""

from __future__ import annotations

import argparse
from pathlib import Path

from client import arguments
from client.progress import Output
from client.runs import RunError, load
from client.stopping import fail
from compare.report.report import show, write
from config.flags import add_flags


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m compare.report", description="Rebuild a run's report."
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="a folder of compare.sh or simulate.sh"
    )
    add_flags(parser, arguments.SVG)
    try:
        known = parser.parse_args()
        show(run := load(known.run), Output())
        write(run, known.svg)
    except RunError as error:
        fail(error)


if __name__ == "__main__":
    main()
