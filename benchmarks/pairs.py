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

from benchmarks.harness import Benchmark, Times, alternate, ratios, run
from config import ConfigError

BENCHMARK = Benchmark(
    "pairs",
    "Two commands run in turn, and the ratio of their throughputs.",
    {"--pairs": (Times(3), "how often each command runs")},
)


def throughput(command: str) -> float:
    """Run a command; return the tok/s that it prints. Raises ValueError if it prints none."""
    done = subprocess.run(shlex.split(command), capture_output=True, text=True)
    output = done.stdout + done.stderr
    printed = re.search(r"([\d,]+(?:\.\d+)?) tok/s", output)
    if done.returncode or not printed:
        raise ValueError(
            f"{command} ended with {done.returncode} and printed no tok/s: …{output[-500:]}"
        )
    return float(printed[1].replace(",", ""))


def main() -> None:
    parser = BENCHMARK.parser()
    parser.add_argument("ours")
    parser.add_argument("peer")
    options = parser.parse_args()

    commands = {"ours": options.ours, "peer": options.peer}

    def measured(name: str) -> float:
        tokens_per_s = throughput(commands[name])
        print(f"{name} {tokens_per_s:9,.1f} tok/s", flush=True)
        return tokens_per_s

    try:
        found = alternate(commands, measured, options.pairs)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from None
    ratio = statistics.median(ratios(found["ours"], found["peer"]))
    print(f"median of {options.pairs} pairs: {ratio:.2f} times")
    pairs = list(zip(found["ours"], found["peer"]))
    print(json.dumps({"pairs": pairs, "median_ratio": ratio, **commands} | BENCHMARK.record()))


if __name__ == "__main__":
    run(main)
