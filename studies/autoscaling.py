"""How replicas follow a burst: rate, replicas and latency over time, by Ray Serve's rule on
requests and on tokens; with real replicas on Ray Serve, and in virtual time.

    python -m studies.autoscaling [--start-s 5] [--out DIR]

The engine is the fake one, slowed down, so that four replicas leave the cores to Ray. Real and
simulated replicas serve the same trace by the same rule; --start-s is what a simulated one takes to
start. A few requests are long: by requests they count as much as short ones.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from client.calls import ServerError, get
from client.load import Watch, replay
from client.outcomes import Outcome
from client.traces import Request
from client.workloads import Workload
from compare import servers
from compare.report.drawing import LOOKS, STYLE, caption_of
from compare.report.tables import markdown
from config import build
from deploy.autoscaling import read_autoscaling
from simulate.costs import load
from simulate.fleet import Layout
from simulate.simulated import Simulated
from studies.runner import Study, write

STUDY = Study(
    "studies.autoscaling", "autoscaling", "How replicas follow a burst",
    "requests a second, replicas and latency over time, by requests and by tokens",
)  # fmt: skip
PHASES = ((20, 2.0), (30, 12.0), (50, 2.0))  # seconds, requests a second
LENGTHS = "lognormal:30:1:300"
SETTINGS: dict[str, Any] = {"model": "fake", "fake_slowdown": 20, "max_batch_size": 8}
RULE = (
    "max_replicas=4", "metrics_interval_s=1", "look_back_period_s=2", "upscale_delay_s=1",
    "downscale_delay_s=8",
)  # fmt: skip
TARGETS = {"by requests": "target_ongoing_requests=8", "by tokens": "target_tokens=300"}
WINDOW_S = 5.0  # of which a percentile of latency is told
SAMPLE_S = 0.5


def burst() -> list[Request]:
    """The trace."""
    found: list[Request] = []
    begin = 0.0
    for k, (seconds, rate) in enumerate(PHASES):
        data = Workload(seed=k, lengths=LENGTHS)
        for each in data.requests(round(seconds * rate), f"poisson:{rate}", scaled=True):
            at = begin + each.at * seconds / (round(seconds * rate) / rate)
            found.append(each.model_copy(update={"id": len(found), "at": at}))
        begin += seconds
    return sorted(found, key=lambda request: request.at)


def live(requests: Sequence[Request], rule: Sequence[str]) -> tuple[list[Outcome], list[Any]]:
    """Real replicas: what became of the requests, and [second, replicas] now and then."""
    seen: list[Any] = []
    start = ("-m", "deploy.serve", "--autoscale", *rule, "--replicas", "1")
    with servers.server("dynamic", SETTINGS, start=start) as url:
        over = threading.Event()
        begin = time.monotonic()

        def look() -> None:
            while not over.wait(SAMPLE_S):
                try:
                    names = get(f"{url}/stats")["replicas"]
                except ServerError:
                    continue
                seen.append([round(time.monotonic() - begin, 2), len(names)])

        looker = threading.Thread(target=look)
        looker.start()
        outcomes = replay(url, requests)
        over.set()
        looker.join()
    return outcomes, seen


def simulated(
    requests: Sequence[Request], rule: Sequence[str], start_s: float
) -> tuple[list[Outcome], list[Any]]:
    """The same of simulated ones."""
    config = build("dynamic", SETTINGS | {"max_waiting": 10**6}, {})
    layout = Layout(start_s=start_s, autoscaling=read_autoscaling(rule))
    server = Simulated("dynamic", config, load("fake"), layout)
    outcomes = [*server.replay(requests, float("inf"), Watch())]
    changes = server.report()[0]["replicas"]["changes"]
    return outcomes, [[change.at_s, change.up] for change in changes]


def latencies(outcomes: Sequence[Outcome]) -> list[list[float]]:
    """[middle of a window, median, p99] of those sent in it, seconds."""
    answers = [outcome.answer for outcome in outcomes if outcome.answer]
    assert len(answers) == len(outcomes), "a request failed"
    sent = np.array([answer.sent_at for answer in answers])
    e2e = np.array([answer.e2e_s for answer in answers])
    found = []
    for begin in np.arange(0.0, sent.max(), WINDOW_S):
        mine = e2e[(sent >= begin) & (sent < begin + WINDOW_S)]
        if len(mine):
            found.append([begin + WINDOW_S / 2, *np.percentile(mine, (50, 99)).tolist()])
    return found


def measured(outcomes: Sequence[Outcome], replicas: Sequence[Any]) -> dict[str, Any]:
    end = max(outcome.ended_at for outcome in outcomes)
    at, n = zip(*replicas)
    each = np.diff([*at, max(end, at[-1])])
    e2e = [outcome.answer.e2e_s for outcome in outcomes if outcome.answer]
    return {
        "replicas": replicas,
        "latencies": latencies(outcomes),
        "most": max(n),
        "replica_s": float(np.dot(each, n)),
        "p50_s": float(np.percentile(e2e, 50)),
        "p99_s": float(np.percentile(e2e, 99)),
    }


def table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    rows = [["", "", "replicas at most", "replica-seconds", "median, s", "p99, s"]]
    rows += [
        [rule, where, f"{run['most']}", f"{run['replica_s']:.0f}", f"{run['p50_s']:.2f}",
         f"{run['p99_s']:.2f}"]
        for rule, runs in found.items()
        for where, run in runs.items()
    ]  # fmt: skip
    return markdown(rows)


def figure(
    requests: Sequence[Request], found: dict[str, dict[str, dict[str, Any]]], caption: str
) -> Figure:
    """Three panels over time; real replicas as lines, simulated ones dotted."""
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(11, 8.5), layout="constrained")
        rate, replicas, latency = fig.subplots(3, 1, sharex=True, height_ratios=(1, 1.4, 1.6))
        end = sum(seconds for seconds, _ in PHASES)
        counts, edges = np.histogram([request.at for request in requests], np.arange(0, end + 1, 2))
        rate.stairs(counts / 2, edges, fill=True, color="#bbbbbb")
        rate.set_ylabel("requests a second")
        for look, (rule, runs) in zip(LOOKS[1:], found.items()):
            for where, run in runs.items():
                real = where == "real"
                style = {"color": look.colour, "ls": "-" if real else ":", "lw": 2}
                at, n = zip(*run["replicas"])
                shift = 0.03 * (1 if rule == "by tokens" else -1)
                replicas.step(
                    at, np.array(n) + shift, where="post", label=f"{rule}, {where}", **style
                )
                middle, _, p99 = zip(*run["latencies"])
                latency.plot(middle, p99, marker=look.marker if real else None, ms=5, **style)
        replicas.set_ylabel("replicas up")
        replicas.set_ylim(0, None)
        replicas.yaxis.get_major_locator().set_params(integer=True)
        replicas.legend(fontsize=10, ncols=2)
        latency.set_ylabel("p99 of latency, s")
        latency.set_ylim(0, None)
        latency.set_xlim(0, None)
        latency.set_xlabel("seconds since the first request (latency: when it was sent)")
        for axes in (rate, replicas, latency):
            axes.grid(alpha=0.25)
        caption_of(fig, caption)
    return fig


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.autoscaling", description=STUDY.title)
    parser.add_argument(
        "--start-s", type=float, default=5.0, help="of a simulated replica (default: 5)"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/autoscaling"), help="folder")
    options = parser.parse_args()
    requests = burst()
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, target in TARGETS.items():
        rule = (*RULE, target)
        found[name] = {
            "real": measured(*live(requests, rule)),
            "simulated": measured(*simulated(requests, rule, options.start_s)),
        }
    told_of = (
        f"dynamic on the fake engine, {SETTINGS['fake_slowdown']} times slower, "
        f"{SETTINGS['max_batch_size']} rows a replica; {len(requests)} requests of {LENGTHS} tokens"
    )
    result = {"runs": found, "rule": RULE, "targets": TARGETS, "start_s": options.start_s}
    write(STUDY, options.out, told_of, table(found), figure(requests, found, told_of), result)


if __name__ == "__main__":
    main()
