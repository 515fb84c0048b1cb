"""A saved run as Chrome's trace events, which https://ui.perfetto.dev opens.

python -m live.timelines RUN            RUN/NAME.timeline.json of each server
python -m live.timelines CALLS.jsonl    the same of what a server's --record wrote, beside it
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from compare.runs import RunError
from live import timeline
from live.saved import histories


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m live.timelines",
        description="A saved run as Chrome's trace events, for Perfetto; files of at most 100 MB.",
    )
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="a folder of simulate.sh or compare.sh --record, or a recording",
    )
    parser.add_argument("--out", type=Path, help="folder (default: that of the run)")
    arguments = parser.parse_args()
    run = arguments.run
    out = arguments.out or (run.parent if run.is_file() else run)
    try:
        found, seed = histories(run)
    except RunError as error:
        sys.exit(f"error: {error}")
    out.mkdir(parents=True, exist_ok=True)
    for name, text in found.items():
        for path in timeline.write(json.loads(text), out / f"{name}.timeline.json"):
            print(path)
    if seed:
        print(f"{run}: shown is {seed}", file=sys.stderr)


if __name__ == "__main__":
    main()
