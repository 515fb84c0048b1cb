"""A greedy user beside another one: who is served how much, and what a limit leaves idle.

Service is counted as in VTC (Sheng et al., OSDI 2024): prompt tokens, and completion tokens twice.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from client.traces import Request
from compare.report.drawing import STYLE, caption_of, plain_log
from compare.report.tables import formatted, markdown
from scheduling.inference import Inference, IterationRecord, State
from studies.orders.tools import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    PURPLE,
    Capacity,
    Part,
    Serve,
    Settings,
    asked,
    data_of,
    latencies,
    part_of,
    serve,
)
from studies.orders.tools import capacity as capacity_of
from studies.runner import Case, Cases, apart, only, shown

LENGTHS = "exponential:50:200"
ROWS, BLOCKS = 8, 136  # which eight of the longest requests fill
W_PROMPT, W_COMPLETION = 1, 2  # what a token counts
MINUTE_S = 60.0
STEP_S = 2.0  # of what is drawn over time
USERS = ("greedy", "other")
# of each user the stretches in which it sends, as shares of the run, and the load that it sends
TRACES: dict[str, dict[str, tuple[Sequence[tuple[float, float]], float]]] = {
    "modest": {"greedy": ([(0, 1)], 1.0), "other": ([(0, 1)], 0.2)},
    "returns": {"greedy": ([(0, 1)], 1.0), "other": ([(0, 1 / 3), (2 / 3, 1)], 0.6)},
}
TOLD = {
    "modest": "the other one wants 20%",
    "returns": "it wants 60%, goes and returns",
}
LOOKS = {
    "fcfs": GREY,
    "limit, requests": PURPLE,
    "limit, tokens": BLUE,
    "fair": GREEN,
}
SHOWN = {  # measure: heading, format
    "greedy": ("service of the greedy one, % of capacity", "{:.1f}"),
    "other": ("service of the other one, % of capacity", "{:.1f}"),
    "both": ("of both", "{:.1f}"),
    "refused": ("greedy one's requests refused, %", "{:.1f}"),
    "mean_s": ("latency of the other one, mean, s", "{:.2f}"),
    "p99_s": ("p99, s", "{:.2f}"),
    "apart": ("largest difference of service while both wait, tokens", "{:,.0f}"),
}


def capacity() -> Capacity:
    return capacity_of(ROWS, LENGTHS, BLOCKS)


def service_rate() -> float:
    """Weighted tokens a second that are served while requests always wait."""
    return W_PROMPT * capacity().prompt_tokens + W_COMPLETION * capacity().tokens


def variants(seconds: float | None = None) -> dict[str, Settings]:
    """A limit is a user's equal share of so many seconds' capacity, by default a minute's."""
    share = (seconds or MINUTE_S) * capacity().requests / len(USERS)
    tokens = (capacity().prompt_tokens + capacity().tokens) / capacity().requests
    return {
        "fcfs": {},
        "limit, requests": {"user_requests_per_minute": round(share)},
        "limit, tokens": {"user_tokens_per_minute": round(share * tokens)},
        "fair": {"order": "fair"},
    }


def bound(longest_prompt: int) -> int:
    """Of the difference of service among users who always wait (VTC, theorem 4.4)."""
    return 2 * max(W_PROMPT * longest_prompt, W_COMPLETION * 16 * BLOCKS)


class Asked(NamedTuple):
    """A request as it is sent, and as it is served."""

    request: Request
    inference: Inference


def trace(name: str, seconds: float, seed: int) -> list[Asked]:
    """What both users send in so many seconds, by time."""
    sent: list[Asked] = []
    for k, (user, (stretches, load)) in enumerate(TRACES[name].items()):
        rate = load * capacity().requests
        for j, (begins, ends) in enumerate(stretches):
            data = data_of(LENGTHS, 1000 * seed + 10 * k + j)
            n = round(rate * (ends - begins) * seconds)
            requests = [
                request.model_copy(update={"at": request.at + begins * seconds})
                for request in data.requests(n, f"poisson:{rate:g}", scaled=True)
            ]
            sent += map(Asked, requests, asked(requests, user=user))
    return sorted(sent, key=lambda each: each.request.at)


class Service:
    """What each user was served by when, in weighted tokens."""

    def __init__(self) -> None:
        self.at = [0.0]
        self.of = {user: [0.0] for user in USERS}

    def observed(self, record: IterationRecord) -> None:
        got = dict.fromkeys(USERS, 0)
        for row in record.iteration.rows:
            assert row.inference.user
            prompt = 0 if row.decodes else row.n_tokens
            got[row.inference.user] += W_PROMPT * prompt + W_COMPLETION * row.samples
        self.at.append(record.started_at + record.seconds)
        for user, tokens in got.items():
            self.of[user].append(self.of[user][-1] + tokens)

    def until(self, user: str, times: np.ndarray) -> np.ndarray:
        return np.asarray(np.interp(times, self.at, self.of[user]))

    def apart(self, times: np.ndarray) -> np.ndarray:
        """How much more the greedy one was served, by when."""
        return self.until("greedy", times) - self.until("other", times)


def waits(inferences: Iterable[Inference]) -> list[tuple[float, float]]:
    """When any of them waited, by time."""
    found: list[tuple[float, float]] = []
    for i in inferences:  # by arrival
        admitted = i.admitted_at or i.arrived_at
        if found and i.arrived_at <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], admitted)
        else:
            found.append((i.arrived_at, admitted))
    return found


def largest_difference(service: Service, sent: Sequence[Asked]) -> float:
    """Of the service of both between any two moments between which both always waited."""
    answered = [each.inference for each in sent if each.inference.state is State.FINISHED]
    mine, its = (waits(i for i in answered if i.user == user) for user in USERS)
    at = np.array(service.at)
    more = service.apart(at)
    largest = 0.0
    for (a, b), (c, d) in itertools.product(mine, its):
        if max(a, c) < min(b, d):
            first, last = np.searchsorted(at, [max(a, c), min(b, d)])
            largest = max(largest, float(np.ptp(more[first : last + 1])))
    return largest


def task(case: dict[str, Any], n: int, seed: int, serve: Serve = serve) -> dict[str, Any]:
    """Of n requests' time, and then to the end."""
    seconds = n / capacity().requests
    sent = trace(case["trace"], seconds, seed)
    of_variant = variants(case.get("limits_s"))[case["variant"]]
    settings = {"max_batch_size": ROWS, "kv_cache": f"{BLOCKS}blocks", **of_variant}
    service = Service()
    requests, inferences = [s.request for s in sent], [s.inference for s in sent]
    serve("dynamic", settings, requests, inferences, service.observed)
    of = {user: [i for i in inferences if i.user == user] for user in USERS}
    steps = np.arange(0, seconds, STEP_S)
    whole = service_rate()
    in_all = {user: float(service.until(user, np.array([seconds]))[0]) for user in of}
    share = {user: 100 * tokens / whole / seconds for user, tokens in in_all.items()}
    waited = latencies(of["other"])
    return {
        **share,
        "both": sum(share.values()),
        "refused": 100 * statistics.mean(i.error is not None for i in of["greedy"]),
        "mean_s": statistics.mean(waited),
        "p99_s": float(np.percentile(waited, 99)),
        "apart": largest_difference(service, sent),
        "longest_prompt": max(len(i.prompt_ids) for i in inferences),
        "rates": {
            user: (100 * np.diff(service.until(user, steps)) / whole / STEP_S).round(1).tolist()
            for user in of
        },
        "visits": [
            (service.apart(at) - service.apart(at[:1])).round().tolist()
            for begins, ends in TRACES[case["trace"]]["other"][0]
            for at in [np.arange(begins * seconds, ends * seconds, STEP_S / 4)]
        ],
    }


def cases() -> list[dict[str, Any]]:
    return [{"trace": t, "variant": v} for t, v in itertools.product(TRACES, variants())]


def tables(found: Cases) -> str:
    rows = [
        ["trace", "variant"]
        + [heading for heading, _ in SHOWN.values()]
        + ["latency mean − fcfs's, s"]
    ]
    for case in found:
        [fcfs] = only(found, trace=case["trace"], variant="fcfs")
        cells = [formatted(shown(case, measure), form) for measure, (_, form) in SHOWN.items()]
        gap = "–" if case is fcfs else apart(fcfs, case, "mean_s", "{:.2f}")
        rows.append([case["trace"], case["variant"], *cells, gap])
    longest = max(seed["longest_prompt"] for case in found for seed in case["seeds"])
    limits = "; ".join(
        f"{name}: {' '.join(f'`--{key}={value}`' for key, value in settings.items())}"
        for name, settings in variants().items()
        if settings
    ).replace("_", "-")
    return "\n\n".join(
        [
            "Service is prompt tokens, and completion tokens twice, as VTC counts them; of "
            "capacity: of what `fcfs` serves while requests always wait; what is missing to 100 of "
            "both is idle. The greedy one wants all of it. `modest`: "
            f"{TOLD['modest']}. `returns`: {TOLD['returns']}. {limits}: "
            "limits are half of what is completed in a minute; who is refused does not ask again. "
            "While both always wait, VTC bounds the difference of service by "
            f"{bound(longest):,} tokens here.",
            markdown(rows, left=2),
        ]
    )


def figure(found: Cases, caption: str) -> Figure:
    """Who is served what over time, a column a variant and a row a trace; below it the difference
    of service within VTC's bound, and how long the other one waits.
    """
    columns = {
        "fcfs": "fcfs: who asks more gets more",
        "limit, tokens": "a limit: idle once it is used up",
        "fair": "fair: who asks less is not held up",
    }
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(14.4, 11), layout="constrained")
        grid = drawn.add_gridspec(3, 6, height_ratios=(1, 1, 1.3))
        for row, trace in enumerate(TRACES):
            for column, (variant, title) in enumerate(columns.items()):
                axis = drawn.add_subplot(grid[row, 2 * column : 2 * column + 2])
                [case] = only(found, trace=trace, variant=variant)
                _over_time(axis, case)
                axis.set_title(title if row == 0 else "", loc="left")
                if column == 0:
                    axis.set_ylabel(f"{TOLD[trace]}\n% of capacity")
        handles = axis.get_legend_handles_labels()
        visits, waited = drawn.add_subplot(grid[2, :3]), drawn.add_subplot(grid[2, 3:])
        _visits(visits, only(found, trace="returns"))
        visits.set_title("service of the greedy one less the other's")
        _latency(waited, found)
        waited.set_title("how long the other one waits")
        drawn.legend(*handles, loc="outside lower center", ncols=3)
        caption_of(drawn, caption)
    return drawn


def _over_time(axis: Axes, case: Case) -> None:
    """Means over seeds, one above the other; what is left up to 100% is idle."""
    of = {u: np.mean([s["rates"][u] for s in case["seeds"]], axis=0) for u in USERS}
    other, greedy = (np.append(of[user], of[user][-1:]) for user in ("other", "greedy"))
    top = np.minimum(other + greedy, 100)
    colours = {"the other one": PINK, "the greedy one": ORANGE, "idle": "#e6e6e6"}
    edges = STEP_S * np.arange(len(other))
    axis.stackplot(
        edges, other, top - other, 100 - top, labels=list(colours), colors=list(colours.values()),
        step="post",
    )  # fmt: skip
    axis.axhline(50, color="white", lw=1, ls=":")
    axis.set_xlim(0, edges[-1])
    axis.set_ylim(0, 100)
    axis.set_xlabel("seconds")


def _visits(axis: Axes, cases: Cases) -> None:
    """Since the other one came, and since it returned; means over seeds."""
    longest = max(seed["longest_prompt"] for case in cases for seed in case["seeds"])
    for case in cases:
        if case["variant"] == "limit, requests":
            continue
        for visit, line in zip(zip(*(seed["visits"] for seed in case["seeds"])), ("-", "--")):
            mean = np.mean([v[: min(map(len, visit))] for v in visit], axis=0)
            name = {"limit, tokens": "limit"}.get(case["variant"], case["variant"])
            axis.plot(
                STEP_S / 4 * np.arange(len(mean)), mean / 1e3, line, color=LOOKS[case["variant"]],
                label=f"{name}, {'first' if line == '-' else 'after its return'}", lw=2,
            )  # fmt: skip
    most = bound(longest) / 1e3
    axis.axhspan(-most, most, color=GREEN, alpha=0.15, lw=0, label="VTC's bound, if both wait")
    axis.set_ylim(top=1.7 * axis.get_ylim()[1])  # room for the legend
    axis.set_xlabel("seconds since the other one came")
    axis.set_ylabel("thousand tokens")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=10.5, loc="upper left", ncols=2)


def _latency(axis: Axes, found: Cases) -> None:
    names = list(LOOKS)
    for k, trace in enumerate(TRACES):
        for i, variant in enumerate(names):
            [case] = only(found, trace=trace, variant=variant)
            at = k + (i - (len(names) - 1) / 2) * 0.21
            known, p99 = shown(case, "mean_s"), shown(case, "p99_s")
            axis.bar(
                at, known.mean, 0.19, yerr=known.half or 0.0, ecolor="black",
                color=LOOKS[variant], label=variant if k == 0 else None,
            )  # fmt: skip
            label = "p99" if (k, i) == (0, 0) else None
            axis.plot([at - 0.1, at + 0.1], [p99.mean] * 2, "k-", lw=2, label=label)
    axis.set_xticks(range(len(TRACES)), [TOLD[trace] for trace in TRACES])
    axis.set_yscale("log")
    plain_log(axis.yaxis)
    axis.set_ylim(top=400)  # room for the legend
    axis.set_ylabel("its latency, s")
    axis.grid(alpha=0.25, axis="y")
    axis.legend(fontsize=10.5, loc="upper center", ncols=3)


PART = Part(
    part_of(
        "fair",
        "A greedy user beside another one",
        "Service over time by user, its difference, and the other one's latency",
    ),
    f"lengths {LENGTHS}, {ROWS} rows, as long as {{n}} requests take",
    13_000,
    {"traces": TRACES, "lengths": LENGTHS, "kv_blocks": BLOCKS},
    cases,
    task,
    tables,
    figure,
)
