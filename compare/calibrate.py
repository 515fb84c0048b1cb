"""The client's own limit: up to which rate of streaming requests it keeps its schedule.

    python -m compare.calibrate

Measured against `--model fake` on the same machine, so the server takes its share of the processor.
The limit is one of client and machine together, and every report names it: latencies measured near
it are partly the client's own.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from datetime import UTC, datetime

from client.calls import ServerError
from client.machine import LIMIT, cache, commit, limit_key, save_json
from client.measure import Target, judged, warm_up
from client.progress import Output, Progress
from client.results import Json, Result
from client.saving import Unwritten
from client.stopping import end_as_on_ctrl_c, fail
from client.summary import CLIENT_LIMITED_MS
from client.wire import wire
from client.workloads import Workload
from compare.servers import server

TOKENS = 16
SECONDS = 4.0  # seconds of sending at each rate
RATES = [100, 150, 200, 250, 300, 400, 500, 600, 800, 1000, 1500, 2000]
SERVER = {"model": "fake", "max_batch_size": 256}


def calibrate(progress: Progress) -> Json:
    """Raise the rate until the client is late; keep and return the result. Raises ServerError."""
    best, answered = 0, 0.0
    with contextlib.ExitStack() as stack:
        with progress.step("starting the fake engine"):
            url = stack.enter_context(server("dynamic", SERVER))
            target = Target("the fake engine", url, wire("inference", stream=True))
            warm_up(target)
        for rate in RATES:
            point = measure(target, rate, progress)
            # twice more where it is late: the machine may have been busy for a moment
            again = (in_time(measure(target, rate, progress)) for _ in range(2))
            if not in_time(point) and not all(again):
                break
            best, answered = rate, max(answered, point.request_throughput or 0.0)
    if not best:
        raise ServerError(
            f"this machine is too busy to send {RATES[0]} requests per second in time; try again "
            f"when it is idle"
        )
    result = {
        "rate": best,
        "tokens": TOKENS,
        "answered": answered,
        "key": limit_key(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    try:
        save_json(cache() / LIMIT, result)
    except Unwritten as error:
        progress.say(f"{error}; it is measured again the next time")
    return result


def measure(target: Target, rate: float, progress: Progress) -> Result:
    n = max(30, round(rate * SECONDS))
    requests = Workload(f"fixed:{TOKENS}").requests(n, f"poisson:{rate:g}")
    with progress.replay(f"calibrating the client at {rate:g}/s", requests) as watch:
        result = judged(requests, target.replay(requests, 3600, watch), {})
    progress.say(
        f"{rate:>5g} requests/s: schedule lag p99 {result.schedule_lag.p99 or 0:.2f} ms; "
        f"answered {result.request_throughput:.0f}/s, {result.failed} failed"
    )
    return result


def in_time(point: Result) -> bool:
    return not point.failed and not point.client_limited


def sentence(result: Json | None) -> str:
    """Return the client's own limit as a sentence of a report."""
    if result is None:
        return (
            "How fast this client can send was not measured on this machine; `python -m "
            "compare.calibrate` does."
        )
    return (
        f"This client kept its schedule (p99 lag within {CLIENT_LIMITED_MS:g} ms) up to "
        f"{result['rate']:g} streaming requests of {result['tokens']} tokens per second on this "
        f"machine, beside a fake engine that answered at most {result['answered']:.0f} (commit "
        f"{result['commit']}, {result['date'][:10]})."
    )


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m compare.calibrate", description="Measure how fast this client can send."
    ).parse_args()
    end_as_on_ctrl_c()
    try:
        with Progress(Output()) as progress:
            progress.say(sentence(calibrate(progress)))
    except ServerError as error:
        fail(error)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
