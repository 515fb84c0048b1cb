"""A saved run as a page that shows its rows, iteration by iteration, without a server.

python -m live RUN          RUN/live.html, of static and dynamic, or the first two, and a
                            link to it in the run's report
python -m live CALLS.jsonl  CALLS.html, of what a server's --record wrote
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from compare.report import report
from compare.runs import LIVE, RunError, load
from live import page
from live.saved import chosen, histories

MOST_BYTES = 30_000_000  # that a browser still opens quickly


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m live",
        description="The rows of a saved run, iteration by iteration, as one page.",
    )
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="a folder of simulate.sh or compare.sh --record, or a recording",
    )
    parser.add_argument(
        "--of", metavar="NAME[,NAME]", help="one or two of its servers (default: static,dynamic)"
    )
    parser.add_argument("--out", type=Path, help="the page (default: live.html in the run)")
    arguments = parser.parse_args()
    run, out = arguments.run, arguments.out
    try:
        found, seed = histories(run)
        mine = chosen(found, arguments.of.split(",") if arguments.of else None)
        if (size := sum(map(len, mine))) > MOST_BYTES:
            raise RunError(
                f"{run} comes to a page of {size / 1e6:.0f} MB, which no browser likes; take a "
                f"shorter run, or one server with --of"
            )
    except RunError as error:
        sys.exit(f"error: {error}")
    out = out or (run.with_suffix(".html") if run.is_file() else run / LIVE)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page.saved(mine))
    except OSError as error:
        sys.exit(f"error: {out} cannot be written: {error.strerror}")
    if out == run / LIVE:
        report.write(load(run))  # which links it
    if seed:
        print(f"{run}: shown is {seed}", file=sys.stderr)
    print(out)


if __name__ == "__main__":
    main()
