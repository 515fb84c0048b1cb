"""Two commands in turn, and how their throughputs compare: only neighbours in time do.

    python -m benchmarks.pairs [--pairs 3] 'OUR COMMAND' 'PEER COMMAND'

The speed of a shared machine changes by the minute. Each command says its throughput as
"… 123.4 tok/s" somewhere; the first such number counts. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys

from client.machine import stamp


def throughput(command: str) -> float:
    """Run a command; return the tok/s it says. Raises ValueError, with what it said, if none."""
    done = subprocess.run(shlex.split(command), capture_output=True, text=True)
    said = done.stdout + done.stderr
    found = re.search(r"([\d,]+(?:\.\d+)?) tok/s", said)
    if done.returncode or not found:
        raise ValueError(
            f"{command} ended with {done.returncode} and said no tok/s: …{said[-500:]}"
        )
    return float(found[1].replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pairs",
        description="Two commands run in turn, and how their throughputs compare.",
    )
    parser.add_argument("--pairs", type=int, default=3, help="default: 3")
    parser.add_argument("ours")
    parser.add_argument("peer")
    options = parser.parse_args()
    pairs = []
    try:
        for _ in range(max(1, options.pairs)):
            pairs.append(pair := (throughput(options.ours), throughput(options.peer)))
            print(
                f"ours {pair[0]:9,.1f}, peer {pair[1]:9,.1f}: {pair[0] / pair[1]:.2f} times",
                flush=True,
            )
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    ratio = statistics.median(ours / peer for ours, peer in pairs)
    print(f"median of {len(pairs)} pairs: {ratio:.2f} times")
    print(
        json.dumps(
            {"pairs": pairs, "median_ratio": ratio, "ours": options.ours, "peer": options.peer}
            | stamp()
        )
    )


if __name__ == "__main__":
    main()
