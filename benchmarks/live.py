"""What it costs a server to be looked at.

    python -m benchmarks.live [--model demo] [--pairs 20] [--out DIR]

Bursts of requests to one server, now with a reader that polls /live/events as the page does, now
without, in pairs whose order alternates; and to two servers that nobody looks at, one of them with
`--live off`. The reader is a process of its own that throws away what it is told: on a machine of
few cores it takes its share of them, as a browser on the same machine would. The ratio of
throughputs with its 95% interval.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from client.load import Watch
from client.machine import command_line, processor, save_json, stamp
from client.wire import Plain
from client.workloads import Workload
from compare.analysis import estimate
from compare.measure import Target, measure, warm_up
from compare.report.tables import markdown
from compare.servers import server

POLLS_S = 1 / 7  # between two of the page
REQUESTS = 96
SETTLED_S = 4.0  # before each burst: a reader has begun, or the one before is forgotten


def read(url: str, stop: Event) -> None:
    """Poll as a page does, until told to stop."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port)
    cursor = ""
    while not stop.wait(POLLS_S):
        connection.request("GET", f"/live/events{cursor}")
        told = json.loads(connection.getresponse().read())
        cursor = f"?since={told['cursor']}"
    connection.close()


@contextlib.contextmanager
def reader(url: str) -> Iterator[None]:
    """Somebody looks, as long as the context lasts."""
    stop = multiprocessing.Event()
    process = multiprocessing.Process(target=read, args=(url, stop))
    process.start()
    time.sleep(SETTLED_S)
    try:
        yield
    finally:
        stop.set()
        process.join()
        assert process.exitcode == 0, "the reader failed"


def throughput(target: Target) -> float:
    """Completion tokens a second of a burst."""
    requests = Workload(seed=0).requests(REQUESTS, "burst")
    result, _ = measure(target, requests, {}, 600.0, Watch())
    assert result["completed"] == REQUESTS
    return float(result["output_throughput"])


def pairs(
    n: int, one: Callable[[], float], other: Callable[[], float], what: str
) -> dict[str, Any]:
    """The ratios one / other, in turns of which each begins every second."""
    ratios = []
    for k in range(n):
        if k % 2:
            second = other()
            ratios.append(one() / second)
        else:
            first = one()
            ratios.append(first / other())
        print(f"{what}, pair {k + 1}: {ratios[-1]:.3f}", flush=True)
    found = estimate([math.log(ratio) for ratio in ratios])
    half = found.half or 0.0
    low, mean, high = (math.exp(found.mean + side * half) for side in (-1, 0, 1))
    return {"what": what, "ratio": mean, "low": low, "high": high, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.live", description="What it costs a server to be looked at."
    )
    parser.add_argument("--model", default="demo", help="default: demo")
    parser.add_argument("--pairs", type=int, default=20, help="of each comparison (default: 20)")
    parser.add_argument("--out", type=Path, default=Path("runs") / "live", help="folder")
    options = parser.parse_args()
    flags = {"model": options.model}
    with (
        server("dynamic", flags, name="live") as url,
        server("dynamic", flags | {"live": "off"}, name="off") as plain,
    ):
        looked, unlooked = Target("live", url, Plain()), Target("off", plain, Plain())
        for target in (looked, unlooked):
            warm_up(target)
            throughput(target)

        def watched() -> float:
            with reader(url):
                return throughput(looked)

        def alone() -> float:
            time.sleep(SETTLED_S)
            return throughput(looked)

        found = [
            pairs(options.pairs, watched, alone, "one reader ÷ nobody looks"),
            pairs(
                options.pairs,
                lambda: throughput(looked),
                lambda: throughput(unlooked),
                "nobody looks ÷ --live off",
            ),
        ]
    rows = [["throughput", "ratio", "95%", "pairs"]]
    for each in found:
        between = f"{each['low']:.3f} to {each['high']:.3f}"
        rows.append([each["what"], f"{each['ratio']:.3f}", between, str(options.pairs)])
    made, command = stamp(), command_line("python", ["-m", "benchmarks.live", *sys.argv[1:]])
    text = (
        "# What it costs to be looked at\n\n"
        f"Bursts of {REQUESTS} requests to {options.model}, dynamic; a reader polls every "
        f"{1e3 * POLLS_S:.0f} ms in a process of its own on the same machine.\n\n"
        f"{markdown(rows)}\n\n{processor(made['hardware'], {})}, `{command}`, commit "
        f"{made['commit']}, {made['date']}\n"
    )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "live.md").write_text(text)
    save_json(options.out / "live.json", {"comparisons": found, **made})
    print(text)


if __name__ == "__main__":
    main()
