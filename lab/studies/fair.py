"""Who is served in time beside others: requests with deadlines of their own, by order and with
shedding; and a user beside a greedy one, by fair shares and by limits.

Service is counted as in VTC (Sheng et al., OSDI 2024): prompt tokens, and completion tokens twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from client.drawing import PALETTE, Style
from client.traces import Request
from client.users import read_slo_mix
from client.workloads import Workload
from lab.studies import virtual
from lab.studies.study import Against, Case, Cases, Panel, Study, Table, grid, only, values
from lab.studies.virtual import VIRTUAL, Capacity, Seen, Settings
from scheduling.inference import Inference

ROWS = 8
PER_REQUEST = {"points": 3, "users": 13}  # requests of a trace for each of --requests, by table

# ---- deadlines

LENGTHS = "exponential:100:800"
MIX = ("0.3:interactive=ttft:200,tpot:50", "0.7:batch=ttft:2000")
CLASSES = read_slo_mix(MIX)[0]
INTERACTIVE, BATCH = CLASSES.values()
LOADS = (0.6, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5)
SHARE = 90.0  # % of the requests that meet their limits, up to a variant's capacity (DistServe's)
SHED: Settings = {"shed": True}
SHEDDING: dict[str, Settings] = {
    "fcfs": {},
    "fcfs, shed": SHED,
    "sjf": {"order": "sjf"},
    "edf": {"order": "edf"},
    "edf, shed": {"order": "edf", **SHED},
}


def deadlines(case: Case, n: int, seed: int) -> dict[str, Any]:
    capacity = virtual.capacity(ROWS, LENGTHS).requests
    workload = Workload(LENGTHS, seed=seed, prompts="ids", slo_mix=MIX)
    trace = workload.requests(n, f"poisson:{case['load'] * capacity:g}", scaled=True)
    settings = {"max_batch_size": ROWS, **SHEDDING[case["variant"]]}
    result = virtual.measures(virtual.server(settings), trace)
    of_class = result["by_class"]
    return {
        "good": 100 * result["goodput"] * result["wall_clock_s"] / float(trace.at[-1]) / capacity,
        "met": 100 * result["attainment"],
        **{name: 100 * each["attainment"] for name, each in of_class.items()},
        "batch_s": (of_class["batch"]["mean_e2el_ms"] or 0) / 1e3,
        "failed": 100 * result["failed"] / n,
    }


def with_capacities(cases: Cases) -> list[dict[str, Any]]:
    """Return the cases, and one for each variant with all loads: the load at which its share within
    limits falls to SHARE, on a line between two loads.
    """
    result = [dict(case) for case in cases]
    for variant in SHEDDING:
        points = only(cases, {"table": "points", "variant": variant})
        if len(points) == len(LOADS):
            seeds = zip(*(values(case, "met") for case in points))
            falling = [-np.minimum.accumulate(of_seed) for of_seed in seeds]
            found = [{"capacity": float(np.interp(-SHARE, each, LOADS))} for each in falling]
            result.append({"table": "capacity", "load": None, "variant": variant, "seeds": found})
    return result


# ---- users

SHORT, BLOCKS = "exponential:50:200", 136  # KV blocks, which eight of the longest requests fill
W_PROMPT, W_COMPLETION = 1, 2  # weight of a token
STEP_S = 2.0  # of a rate
USERS = ("greedy", "other")
LIMITED = ("fcfs", "limit, requests", "limit, tokens", "fair")
# of each user the stretches in which it sends, as shares of the run, and the load that it sends
Stretches = list[tuple[float, float]]
TRACES: dict[str, dict[str, tuple[Stretches, float]]] = {
    "modest": {"greedy": ([(0, 1)], 1.0), "other": ([(0, 1)], 0.2)},
    "returns": {"greedy": ([(0, 1)], 1.0), "other": ([(0, 1 / 3), (2 / 3, 1)], 0.6)},
}


def most() -> Capacity:
    return virtual.capacity(ROWS, SHORT, BLOCKS)


def settings_of(variant: str) -> Settings:
    """Return a variant's settings; a limit is a user's equal share of a minute's capacity."""
    share = 60 * most().requests / len(USERS)
    tokens = (most().prompt_tokens + most().tokens) / most().requests
    settings: dict[str, Settings] = {
        "limit, requests": {"user_requests_per_minute": round(share)},
        "limit, tokens": {"user_tokens_per_minute": round(share * tokens)},
        "fair": {"order": "fair"},
    }
    return settings.get(variant, {})


def trace_of(name: str, seconds: float, seed: int) -> list[Request]:
    """Return the requests of both users in so many seconds, by time."""
    sent: list[Request] = []
    for k, (user, (stretches, load)) in enumerate(TRACES[name].items()):
        rate = load * most().requests
        for j, (begins, ends) in enumerate(stretches):
            data = virtual.data_of(SHORT, 1000 * seed + 10 * k + j)
            n = round(rate * (ends - begins) * seconds)
            sent += [
                request.model_copy(update={"at": request.at + begins * seconds, "user": user})
                for request in data.requests(n, f"poisson:{rate:g}", scaled=True)
            ]
    return virtual.by_time(sent)


def service(seen: Seen) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the ends of iterations, and the weighted tokens that each user was served by then."""
    tokens = {user: np.zeros(1 + len(seen.records)) for user in USERS}
    for k, record in enumerate(seen.records, 1):
        for row in record.iteration.rows:
            prompt = 0 if row.decodes else row.n_tokens
            weighted = W_PROMPT * prompt + W_COMPLETION * row.samples
            tokens[row.inference.user or ""][k] += weighted
    at = np.array([0.0, *(record.started_at + record.seconds for record in seen.records)])
    return at, {user: each.cumsum() for user, each in tokens.items()}


def waits(inferences: Iterable[Inference]) -> Stretches:
    """Return the stretches in which any of them waited, by time."""
    stretches: Stretches = []
    for i in inferences:  # by arrival
        admitted = i.admitted_at or i.arrived_at
        if stretches and i.arrived_at <= stretches[-1][1]:
            stretches[-1] = stretches[-1][0], max(stretches[-1][1], admitted)
        else:
            stretches.append((i.arrived_at, admitted))
    return stretches


def users(case: Case, n: int, seed: int) -> dict[str, Any]:
    """Return measures of the time that n requests take."""
    seconds = n / most().requests
    full = W_PROMPT * most().prompt_tokens + W_COMPLETION * most().tokens  # a second
    settings = {"max_batch_size": ROWS, **virtual.pool(BLOCKS), **settings_of(case["variant"])}
    requests = trace_of(case["trace"], seconds, seed)
    outcomes, seen = virtual.served(settings, requests, jump=False)
    at, served = service(seen)
    by_arrival = sorted(seen.inferences, key=lambda inference: inference.arrived_at)
    stretches = [waits(i for i in by_arrival if i.user == user) for user in USERS]
    apart, more = 0.0, served["greedy"] - served["other"]
    for (a, b), (c, d) in itertools.product(*stretches):
        if max(a, c) < min(b, d):  # both waited
            first, last = np.searchsorted(at, [max(a, c), min(b, d)])
            apart = max(apart, float(np.ptp(more[first : last + 1])))
    is_greedy = np.array([request.user == "greedy" for request in requests])
    share = {u: float(np.interp(seconds, at, served[u])) * 100 / full / seconds for u in USERS}
    every = np.arange(0, seconds, STEP_S)
    rates = {u: 100 * np.diff(np.interp(every, at, served[u])) / full / STEP_S for u in USERS}
    return {
        **share,
        "both": sum(share.values()),
        "refused": 100 * float(outcomes.rows["refused"][is_greedy].mean()),
        **virtual.mean_and_p99(outcomes.answers_of(~is_greedy)),
        "apart": apart,
        "rates": {user: [round(float(rate), 1) for rate in rates[user]] for user in USERS},
    }


BOUND = 2 * W_COMPLETION * virtual.BLOCK * BLOCKS  # of a difference (VTC, theorem 4.4)


# ---- the study


def cases(n: int) -> list[dict[str, Any]]:
    points = grid(table=["points"], load=LOADS, variant=SHEDDING)(n)
    return points + grid(table=["users"], trace=TRACES, variant=LIMITED)(n)


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    of_table = deadlines if case["table"] == "points" else users
    return of_table(case, n * PER_REQUEST[case["table"]], seed)


OF_POINTS = {
    "good": ("goodput, % of capacity", "{:.1f}"),
    "met": ("within their limits, %", "{:.1f}"),
    "interactive": ("interactive: within their limits, %", "{:.1f}"),
    "batch": ("batch: within their limits, %", "{:.1f}"),
    "batch_s": ("batch: latency mean, s", "{:.2f}"),
    "failed": ("shed, %", "{:.1f}"),
}
OF_USERS = {
    "greedy": ("greedy user: % of capacity", "{:.1f}"),
    "other": ("other user: % of capacity", "{:.1f}"),
    "both": ("both users: % of capacity", "{:.1f}"),
    "refused": ("greedy user: refused, %", "{:.1f}"),
    "mean_s": ("other user: latency mean, s", "{:.2f}"),
    "p99_s": ("other user: latency p99, s", "{:.2f}"),
    "apart": ("largest difference while both wait, tokens", "{:,.0f}"),
}
CAPACITY = {"capacity": (f"load up to which {SHARE:.0f}% are within their limits", "{:.2f}")}
FCFS = {"variant": "fcfs"}
AT_CAPACITY, POINTS, OF_TWO = ({"table": table} for table in ("capacity", "points", "users"))
STUDY = Study(
    name="fair",
    title="Deadlines and fair shares",
    question="How many requests meet limits of their own, and how much service does a user get "
    "beside a greedy one?",
    source="a scheduler that plans by the limits of requests serves 2.2 times as many within them "
    "(SLOs-Serve, arXiv 2504.08784); the service of two users with waiting requests differs by at "
    "most 2 · max(longest prompt, 2 · tokens in the pool), and limits waste capacity (VTC, Sheng "
    "et al., OSDI 2024)",
    workload="traces of 3 × {n} requests with deadlines, and of two users as long as 13 × {n} "
    f"requests take; {{seeds}} seeds, {ROWS} rows, {VIRTUAL}",
    cases=cases,
    run=run,
    summarized=with_capacities,
    measures=OF_POINTS | CAPACITY | OF_USERS,
    text=f"""\
Capacity is what `fcfs` completes while requests always wait.

**Deadlines.** `--lengths {LENGTHS} --slo-mix {" ".join(MIX)}`: interactive requests have a limit of
{INTERACTIVE.ttft_ms:g} ms on the first token and of {INTERACTIVE.tpot_ms:g} ms per later token on
average, batch requests of {BATCH.ttft_ms:,g} ms on the first token. Goodput counts the requests
that met all their limits. `sjf` sorts by completion length and `edf` by deadline; `shed` refuses or
ends a request that can no longer meet its limits. `sjf` and `shed` know the true lengths, and `edf`
needs none.

**Users.** `--lengths {SHORT}`. Service counts prompt tokens once and completion tokens twice, as in
VTC. The greedy user sends requests for 100% of the capacity. Trace `modest`: the other user sends
for 20%. Trace `returns`: it sends for 60%, pauses in the second third of the time, and returns.
With `limit`, a user may use half of a minute's capacity in each minute; requests beyond that are
refused, and not sent again. `fair` is `--order fair`, for which VTC's bound is {BOUND:,}
weighted tokens here while both users have waiting requests.""",
    tables=[
        Table(("variant",), [*CAPACITY], [Against(FCFS, ratios=[*CAPACITY])], AT_CAPACITY,
              "Capacity within limits"),
        Table(("load", "variant"), [*OF_POINTS], [Against(FCFS, ["met"])], POINTS,
              "Deadlines by load"),
        Table(("trace", "variant"), [*OF_USERS], [Against(FCFS, ["mean_s"])], OF_TWO, "Two users"),
    ],
    figure="Goodput, and the share of each class within its limits, by load; service of both users "
    "over time, the other user's latency, and the difference of service",
    panels=[
        Panel("all requests", OF_POINTS["good"][0], "good", "load", "load", where=POINTS),
        *(
            Panel(f"{name}: first token in {limits.ttft_ms:,g} ms", "within limits, %", name,
                  "load", "load", where=POINTS) for name, limits in CLASSES.items()
        ),
        *(
            Panel(f"{trace}: {variant}", "service, % of capacity", "rates", xlabel="time, s",
                  where={**OF_TWO, "trace": trace, "variant": variant}, step=STEP_S)
            for trace, variant in itertools.product(TRACES, ("fcfs", "limit, tokens", "fair"))
        ),
        *(
            Panel(title, "weighted tokens" if measure == "apart" else "latency, s", measure,
                  "trace", where=OF_TWO, log=True)
            for measure, title in {
                "mean_s": "other user: mean latency", "p99_s": "other user: p99 latency",
                "apart": "difference while both wait",
            }.items()
        ),
    ],
    styles={
        name: Style(PALETTE[i], "--" if "shed" in name else "-", "o")
        for name, i in zip((*SHEDDING, *LIMITED[1:], *USERS), (0, 0, 1, 3, 3, 2, 4, 3, 1, 5))
    },
)  # fmt: skip
