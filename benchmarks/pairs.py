"""Two commands in turn, and the ratio of their throughputs: only neighbours in time compare.

    python -m benchmarks.pairs [--pairs 3] 'OUR COMMAND' 'PEER COMMAND'

Each command prints its throughput as "… 123.4 tok/s" somewhere; the first such number counts.
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
import subprocess

from benchmarks.harness import Benchmark, alternate, ratios, run
from config import ConfigError

BENCHMARK = Benchmark(
    "pairs",
    "Two commands run in turn, and the ratio of their throughputs.",
    {"--pairs": (3, "how often each command runs")},
)


def throughput(command: str) -> tuple[float, str]:
    """Run a command; return the tok/s that it prints, and the line up to there.

    Raises ConfigError if it fails or prints none.
    """
    try:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True)
    except OSError as error:
        raise ConfigError(str(error)) from None
    output = done.stdout + done.stderr
    line = re.search(r".*?([\d,]+(?:\.\d+)?) tok/s", output)
    if done.returncode or not line:
        raise ConfigError(
            f"{command} ended with {done.returncode} and printed no tok/s: …{output[-500:]}"
        )
    return float(line[1].replace(",", "")), line[0]


def main() -> None:
    parser = BENCHMARK.parser()
    parser.add_argument("ours")
    parser.add_argument("peer")
    options = parser.parse_args()
    commands = {"ours": options.ours, "peer": options.peer}

    def turn(name: str) -> float:
        tokens_per_s, line = throughput(commands[name])
        print(f"{name}: {line}", flush=True)
        return tokens_per_s

    speeds = alternate(commands, turn, options.pairs)
    ratio = statistics.median(ratios(speeds["ours"], speeds["peer"]))
    print(f"median of {options.pairs} pairs: {ratio:.2f} times")
    pairs = list(zip(speeds["ours"], speeds["peer"]))
    print(json.dumps({"pairs": pairs, "median_ratio": ratio, **commands} | BENCHMARK.record()))


if __name__ == "__main__":
    run(main)
