"""Whether routers rank on Ray Serve as they do in virtual time: the same traces, served by real
replicas and by simulated ones.

    python -m studies.ranking [--seeds 3] [--out DIR]

The engine is the fake one, slowed down, so that four replicas and Ray leave the cores time to
spare: to iterations of 50 ms and more a shared host's pauses matter little. Simulated answers take
longer by what Ray adds (results/replicas/fronts.json), and `least_tokens` goes by reports as old as
Ray's are (results/replicas/replicas.json). Half an hour; nothing else should run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import psutil
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from client.calls import ServerError
from client.load import Watch
from client.outcomes import Outcome
from client.wire import Plain
from client.workloads import Workload
from compare.analysis import difference
from compare.deployments import Deployment, deployed
from compare.measure import Measurable, warm_up
from compare.report.drawing import LOOKS, STYLE, caption_of
from compare.report.tables import formatted, markdown
from compare.servers import ROOT
from config import build
from deploy.kinds import KINDS
from simulate.costs import load, through
from simulate.fleet import Layout
from simulate.simulated import Simulated
from studies.runner import Case, Cases, Study, only, shown, values, write

STUDY = Study(
    "studies.ranking", "ranking", "Routers on Ray Serve and in virtual time",
    "what each router gives on Ray Serve against what it gives in virtual time",
)  # fmt: skip
REPLICAS, USERS, REQUESTS = 4, 24, 200
SETTINGS: dict[str, Any] = {
    "model": "fake", "fake_slowdown": 45.0, "max_batch_size": 8, "kv_cache": "600blocks",
    "prefix_caching": True, "live": "off",
}  # fmt: skip
ROUTERS = KINDS["ray"].routers
AGES = ROOT / "results" / "replicas" / "replicas.json"
TIMEOUT_S = 900.0
# a trace is served again, so often at most, if the machine's host gave more of the cores to others
TRIES, STOLEN_PERCENT = 3, 20.0


class Trace(NamedTuple):
    """A kind of trace: requests a second of all users together, and what they ask for."""

    told: str
    rate: float
    lengths: str
    prefixes: str | None = None


TRACES = {
    "long tails": Trace("lengths with a long tail", 3.7, "lognormal:60:1.2:600"),
    "prefixes": Trace("64 shared prefixes of 512 tokens", 8.7, "uniform:5:40", "64:512:0.8"),
}
MEASURES = {  # heading, format
    "mean_s": ("latency mean, s", "{:.3f}"),
    "p99_s": ("latency p99, s", "{:.2f}"),
    "ttft_s": ("first token mean, s", "{:.3f}"),
    "cached": ("prompt tokens found cached, %", "{:.0f}"),
}
REAL, SIMULATED = "real", "simulated"


def data_of(trace: Trace, seed: int) -> Workload:
    """Users have other names in each trace, by which `session` puts them elsewhere."""
    each = f"{trace.rate / USERS:.6f},{trace.lengths}"
    users = [f"s{seed}u{k},{each}" for k in range(USERS)]
    return Workload(seed=seed, users=users, prompts="ids", prefixes=trace.prefixes)


def served(target: Measurable, trace: Trace, seed: int) -> dict[str, float]:
    """What became of one trace."""
    target.begin()
    outcomes: Sequence[Outcome] = [
        *target.replay(data_of(trace, seed).requests(REQUESTS), TIMEOUT_S, Watch())
    ]
    answers = [outcome.answer for outcome in outcomes if outcome.answer]
    assert len(answers) == REQUESTS, [outcome.error for outcome in outcomes if outcome.error][:1]
    stats, _, _ = target.report()
    e2e = [answer.e2e_s for answer in answers]
    return {
        "mean_s": float(np.mean(e2e)),
        "p99_s": float(np.percentile(e2e, 99)),
        "ttft_s": float(np.mean([answer.ttft_s for answer in answers])),
        "cached": 100 * stats["cached_tokens"] / stats["total_input_tokens"],
    }


def simulated(trace: Trace, router: str, seeds: int, stale_s: float) -> list[dict[str, float]]:
    config = build("dynamic", SETTINGS | {"max_waiting": 10**5}, {})
    layout = Layout(REPLICAS, router, stale_s if router == "least_tokens" else 0.0)
    found = []
    for seed in range(seeds):
        server = Simulated(router, config, through("ray", load("fake")), layout)
        found.append(served(server, trace, seed))
    return found


def real(trace: Trace, router: str, seeds: int) -> list[dict[str, float]]:
    """The router is not told when a trace ends, and needs not: none shares prompts or users."""
    deployment = Deployment("ray", REPLICAS, router)
    with deployed(router, deployment, "dynamic", SETTINGS, Plain()) as target:
        warm_up(target)
        found = []
        for seed in range(seeds):
            for _ in range(TRIES):
                psutil.cpu_times_percent()  # of /proc/stat, from here on
                mine = served(target, trace, seed)
                cores = psutil.cpu_times_percent()
                mine |= {"busy_percent": 100 - cores.idle, "stolen_percent": cores.steal}
                print(f"{router}, seed {seed}: mean {mine['mean_s']:.3f} s, "
                      f"{mine['busy_percent']:.0f}% of the CPU, {cores.steal:.1f}% stolen",
                      flush=True)  # fmt: skip
                if cores.steal <= STOLEN_PERCENT:
                    break
            found.append(mine)
    return found


class Pair(NamedTuple):
    """Two routers by one measure. Signs are of the second one's mean − the first one's."""

    trace: str
    measure: str
    routers: tuple[str, str]
    simulated: int  # 0 where no difference is shown, with 95%
    real: int  # the same
    real_mean: int


def pairs(found: Cases) -> list[Pair]:
    told_of = []
    for trace, measure, (a, b) in itertools.product(
        TRACES, MEASURES, itertools.combinations(ROUTERS, 2)
    ):
        signs = {}
        for where in (SIMULATED, REAL):
            [mine] = only(found, trace=trace, router=a, where=where)
            [its] = only(found, trace=trace, router=b, where=where)
            gap = difference(values(mine, measure), values(its, measure))
            signs[where] = int(np.sign(gap.mean)), bool(gap.shown)
        sign, is_shown = signs[SIMULATED]
        really, is_shown_really = signs[REAL]
        told_of.append(
            Pair(trace, measure, (a, b), sign * is_shown, really * is_shown_really, really)
        )
    return told_of


def verdict(found: Cases) -> str:
    """Whether the two agree, in sentences."""
    all_pairs = pairs(found)
    shown_there = [pair for pair in all_pairs if pair.simulated]
    same = [pair for pair in shown_there if pair.simulated == pair.real_mean]
    sure = [pair for pair in same if pair.real]
    against = [pair for pair in all_pairs if pair.simulated * pair.real < 0]
    only_real = [pair for pair in all_pairs if pair.real and not pair.simulated]
    said = [
        f"**Of {len(shown_there)} differences between two routers that virtual time shows (95%, "
        f"paired), {len(same)} have the same sign on Ray Serve, {len(sure)} of them shown there "
        f"too; {len(against) or 'none'} {'is' if len(against) == 1 else 'are'} shown with the "
        f"opposite sign.** {len(only_real)} {'is' if len(only_real) == 1 else 'are'} shown on Ray "
        "Serve alone."
    ]
    for pair in (*against, *only_real):
        a, b = pair.routers
        more, less = (b, a) if pair.real > 0 else (a, b)
        there = "less, in virtual time" if pair.simulated else "with no difference in virtual time"
        said.append(
            f"- {pair.trace}, {MEASURES[pair.measure][0]}: {more} more than {less}, {there}"
        )
    return "\n".join([said[0], "", *said[1:]]).strip()


def tables(found: Cases) -> str:
    parts = [verdict(found)]
    for name, trace in TRACES.items():
        headings = [heading for heading, _ in MEASURES.values()]
        rows = [["router", "", *headings, "CPU in use, %"]]
        for router, where in itertools.product(ROUTERS, (SIMULATED, REAL)):
            [case] = only(found, trace=name, router=router, where=where)
            cells = [
                formatted(shown(case, measure), form) for measure, (_, form) in MEASURES.items()
            ]
            busy = f"{max(values(case, 'busy_percent')):.0f}" if where == REAL else ""
            rows.append([router, where, *cells, busy])
        parts += [f"## {trace.told}, {trace.rate:g} requests a second", markdown(rows, left=2)]
    return "\n\n".join(parts)


def figure(found: Cases, caption: str) -> Figure:
    """A column a trace, a row a measure; on the diagonal both are the same."""
    drawn = ("mean_s", "p99_s")
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(11, 9.5), layout="constrained")
        for axes_of, measure in zip(fig.subplots(len(drawn), len(TRACES)), drawn):
            for axes, name in zip(axes_of, TRACES):
                _points(axes, only(found, trace=name), measure)
                axes.set_title(TRACES[name].told)
                axes.set_xlabel(f"{MEASURES[measure][0]}, in virtual time")
                axes.set_ylabel("on Ray Serve")
        handles, labels = axes.get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=11)
        caption_of(fig, caption)
    return fig


def _points(axes: Axes, mine: Cases, measure: str) -> None:
    """Small: each trace; large: their means."""
    for look, router in zip(LOOKS[1:], ROUTERS):
        [there] = only(mine, router=router, where=SIMULATED)
        [here] = only(mine, router=router, where=REAL)
        style: dict[str, Any] = {"color": look.colour, "ls": "", "marker": look.marker}
        axes.plot(values(there, measure), values(here, measure), ms=6, alpha=0.4, **style)
        x, y = shown(there, measure).mean, shown(here, measure).mean
        axes.plot(x, y, ms=11, mec="white", label=router, **style)
    most = max(axes.get_xlim()[1], axes.get_ylim()[1])
    axes.plot([0, most], [0, most], color="#999999", lw=1, zorder=0, label="the same")
    axes.set_xlim(0, most)
    axes.set_ylim(0, most)
    axes.grid(alpha=0.25)


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {STUDY.module}", description=STUDY.title)
    parser.add_argument("--seeds", type=int, default=3, help="traces of each kind (default: 3)")
    parser.add_argument("--out", type=Path, default=Path("runs") / STUDY.name, help="folder")
    options = parser.parse_args()
    # a report is as likely to be young as old, up to its most
    stale_s = math.ceil(2 * json.loads(AGES.read_text())["report_age_ms"]["p50"]) / 1e3
    found: list[Case] = []
    for (name, trace), router in itertools.product(TRACES.items(), ROUTERS):
        case = {"trace": name, "router": router}
        there = simulated(trace, router, options.seeds, stale_s)
        found.append(case | {"where": SIMULATED, "seeds": there})
        found.append(case | {"where": REAL, "seeds": real(trace, router, options.seeds)})
    told_of = (
        f"dynamic on the fake engine, {SETTINGS['fake_slowdown']:g} times slower, {REPLICAS} "
        f"replicas of {SETTINGS['max_batch_size']} rows; {REQUESTS} requests of {USERS} users; "
        f"{options.seeds} seeds ± half of a 95% t interval; reports up to {stale_s:g} s old; a "
        f"trace is served again if the host took over {STOLEN_PERCENT:g}% of the cores meanwhile"
    )
    result = {"cases": found, "stale_s": stale_s}
    drawn_of = f"{REPLICAS} replicas of a slow fake engine; small: a trace; large: the mean of all"
    write(STUDY, options.out, told_of, tables(found), figure(found, drawn_of), result)


if __name__ == "__main__":
    try:
        main()
    except ServerError as error:
        sys.exit(f"error: {error}")
