"""Who goes first, and with whom: orders of `dynamic`, batches of similar lengths beside closed
forms, and urgent requests.

A batch of B rows of uniform lengths uses mean(g) / E[max of B draws of g] of them. k bins of equal
mass complete (B/(B+1)) / ((k−1)/2k + B/(k(B+1))) times as much (Guldogan et al., 2024).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from client.drawing import PALETTE, Style
from lab.studies import virtual
from lab.studies.study import Against, Case, Panel, Study, Table
from lab.studies.virtual import VIRTUAL, Settings


class Part(NamedTuple):
    """Traces of one kind, and the servers that get them."""

    lengths: str
    kv_blocks: int | None  # None: enough for all rows
    rows: Sequence[int]
    loads: Sequence[float | None]  # shares of the capacity of `fcfs`; None: all come at once
    variants: Mapping[str, Settings]
    of: int | None = None  # rows of that capacity; None: as many as the server has
    requests: float = 1.0  # of a trace, beside those of --requests


BINS, TIMEOUT_MS = (2, 4, 8), 500
EXACT = ("fcfs", "hrrn", "mlfq", "sjf", "srpt")
ORDERS: dict[str, Settings] = {
    **{order: {"order": order} for order in EXACT},
    "sjf, at most 2 s": {"order": "sjf", "max_wait_s": 2.0},
    **{
        f"{order}, σ {sigma:g}": {"order": order, "length_predictor": f"noisy:{sigma:g}"}
        for order, sigma in itertools.product(("sjf", "srpt"), (0.7, 1.5))
    },
}
BINNED: dict[str, Settings] = {
    "static": {"mode": "static"},
    **{f"multibin, {k} bins": {"mode": "multibin", "bins": k} for k in BINS},
}
BATCHES: dict[str, Settings] = {
    **BINNED,
    "multibin, 8 bins, σ 0.7": {"mode": "multibin", "bins": 8, "length_predictor": "noisy:0.7"},
    "static, sjf": {"mode": "static", "order": "sjf", "prefill_weight": 0},  # by length, as bins
    "dynamic": {},
}
DEMAND = {"kv_reservation": "demand"}
LEVELS = {"order": "priority", "priority_levels": 2, "default_priority_level": 2}
LEVELLED: dict[str, Settings] = {
    "fcfs": {},
    "fcfs, demand": DEMAND,
    "priority": LEVELS,
    "priority, demand": LEVELS | DEMAND,
    **{
        f"priority, late ones {action}ed": LEVELS
        | {"queue_policy": f"2:timeout_ms={TIMEOUT_MS},action={action}"}
        for action in ("delay", "reject")
    },
}
LONG_TAIL = "lognormal:40:1.2:900"  # the longest tenth has 45% of the tokens
ALL = 20_000  # KV blocks, more than all requests need, since paused ones keep their blocks
PARTS = {
    "grid": Part(LONG_TAIL, ALL, (4, 8, 32), (0.5, 0.9, 1.2), ORDERS),
    "rows": Part(LONG_TAIL, ALL, (8, 12, 16, 24, 32), (1.2,), {o: ORDERS[o] for o in EXACT}, 8),
    "batches": Part("uniform:1:200", None, (8, 32), (None,), BATCHES, requests=4.096),
    # blocks of eight requests of mean length bind, and not rows
    "urgent": Part("exponential:100:800", 64, (64,), (0.5, 0.8, 1.0, 1.2, 1.5), LEVELLED),
}


def cases(n: int) -> list[dict[str, Any]]:
    """Return the cases. `of`: row limit; the load is a share of the capacity at that limit."""
    return [
        {"table": table, "rows": rows, "of": part.of or rows, "load": load, "variant": variant}
        for table, part in PARTS.items()
        for rows, load, variant in itertools.product(part.rows, part.loads, part.variants)
    ]


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    """Serve a trace, a tenth of whose requests are urgent. Useful rows, and throughput while full,
    are of the time in which every row is taken, as if requests kept coming.
    """
    part, rows = PARTS[case["table"]], case["rows"]
    arrival, n = "burst", round(part.requests * n)
    if case["load"]:
        capacity = virtual.capacity(case["of"], part.lengths, part.kv_blocks)
        arrival = f"poisson:{case['load'] * capacity:g}"
    drawn = virtual.data_of(part.lengths, seed).requests(n, arrival, scaled=True)
    urgent = np.zeros(n, bool)
    urgent[np.random.default_rng([seed, 7]).choice(n, round(n / 10), replace=False)] = True
    requests = [r.model_copy(update={"priority": int(urgent[r.id])}) for r in drawn]
    settings = {"max_batch_size": rows, **virtual.pool(part.kv_blocks)}
    settings |= part.variants[case["variant"]]
    if not case["load"]:
        settings["token_budget"] = 10**5
    if "bins" in settings:  # a bin that does not fill would otherwise starve
        settings |= {"batch_size_target": rows, "max_batch_delay_ms": 10_000.0}
    outcomes, seen = virtual.served(settings, requests)
    answers, last = outcomes.answers, requests[-1].at
    by_length = answers.e2e_s[np.argsort(answers["completion_tokens"], kind="stable")]
    full = [record for record in seen.records if record.iteration.running == rows]
    computed = sum(record.n * len(record.iteration.rows) for record in full)
    live = sum(record.n * record.rows["live"] for record in full)
    times = {i: i.interruptions.preemptions for i in seen.inferences}
    return {
        **virtual.mean_and_p99(answers),
        "median_s": float(np.median(answers.e2e_s)),
        "shortest_s": float(by_length[: n // 4].mean()),
        "longest_s": float(by_length[-(n // 4) :].mean()),
        "wait_s": float(answers.e2e_s.max()),
        "answered": float((answers["ended_at"] <= last).sum()) / last if last else None,
        "throughput": virtual.throughput(outcomes),
        **virtual.mean_and_p99(outcomes.answers_of(urgent), "urgent_"),
        **virtual.mean_and_p99(outcomes.answers_of(~urgent), "others_"),
        "refused": 100 * (1 - len(answers) / n),
        "preempted_urgent": statistics.mean(k for i, k in times.items() if urgent[i.id]),
        "preempted_others": statistics.mean(k for i, k in times.items() if not urgent[i.id]),
        "useful": 100 * live / computed if full else None,
        "closed_form": closed_form(case["variant"], rows, n),
        "full": live / sum(record.seconds for record in full) if full else None,
    }


def gain(rows: int, bins: float) -> float:
    """Return the throughput of so many bins ÷ that of one, in batches of so many rows."""
    of_one = rows / (rows + 1)
    return of_one / ((bins - 1) / (2 * bins) + of_one / bins)


def closed_form(variant: str, rows: int, n: int) -> float | None:
    """Return useful rows in %, of n requests; None where there is no closed form. A burst that is
    sorted as a whole has as many bins as batches.
    """
    settings = BATCHES.get(variant, {"length_predictor": ""})
    if "length_predictor" in settings:
        return None
    if "mode" not in settings:
        return 100.0
    bins = n / rows if "order" in settings else settings.get("bins", 1)
    return 100 * (rows + 1) / (2 * rows) * gain(rows, bins)


def order_of(case: Case) -> str:
    return str(case["variant"]).split(", σ")[0]


def sigma_of(case: Case) -> float:
    return float(case["variant"].partition("σ ")[2] or 0)


def bins_of(case: Case) -> int:
    return int(BATCHES[case["variant"]].get("bins", 1))


def rows_of(case: Case) -> str:
    return f"batches of {case['rows']}"


MEASURES = {
    "mean_s": ("latency mean, s", "{:.2f}"),
    "median_s": ("latency median, s", "{:.2f}"),
    "p99_s": ("latency p99, s", "{:.2f}"),
    "shortest_s": ("shortest quarter: latency mean, s", "{:.2f}"),
    "longest_s": ("longest quarter: latency mean, s", "{:.2f}"),
    "answered": ("answers/s until the last arrival", "{:.1f}"),
    "throughput": ("throughput, tok/s", "{:,.0f}"),
    "useful": ("useful rows, %", "{:.1f}"),
    "closed_form": ("closed form, %", "{:.1f}"),
    "full": ("throughput, tok/s", "{:,.0f}"),
    "urgent_mean_s": ("urgent: latency mean, s", "{:.3f}"),
    "urgent_p99_s": ("urgent: latency p99, s", "{:.2f}"),
    "others_mean_s": ("others: latency mean, s", "{:.2f}"),
    "others_p99_s": ("others: latency p99, s", "{:.2f}"),
    "wait_s": ("longest latency, s", "{:.2f}"),
    "refused": ("refused, %", "{:.1f}"),
    "preempted_urgent": ("preemptions per urgent request", "{:.2f}"),
    "preempted_others": ("preemptions per other request", "{:.2f}"),
}
OF_ORDERS, OF_BATCHES, OF_URGENT = [*MEASURES][:7], [*MEASURES][7:10], [*MEASURES][10:]
BY = ("rows", "load", "variant")
FCFS, STATIC = {"variant": "fcfs"}, {"variant": "static"}
VS_FCFS = [Against(FCFS, ("mean_s", "p99_s", "longest_s"), ("mean_s", "answered"))]
VS_STATIC = [Against(STATIC, ratios=("full", "closed_form"))]
GAPS = ("urgent_mean_s", "others_mean_s", "wait_s")
GRID, MORE, FORMED, LEVEL = ({"table": table} for table in PARTS)
HERE = {**GRID, "rows": 8, "load": 1.2}  # where rows bind
STUDY = Study(
    name="orders",
    title="Orders of the waiting requests",
    question="Which requests does an order of the waiting requests make faster, and which slower, "
    "and what do batches of similar lengths gain?",
    source="the shortest request first lowers mean latency by 30 to 40% (SSJF, Qiu et al., 2024), "
    "skip-join MLFQ without knowing lengths (FastServe, arXiv 2305.05920); k bins of lengths "
    "complete up to 70% more than one (Multi-Bin Batching, arXiv 2412.04504); urgent requests do "
    "not wait, delayed ones may starve (Triton), and preemption helps the urgent ones (vLLM)",
    workload=f"{{n}} requests, of a burst four times as many, {{seeds}} seeds, {VIRTUAL}",
    cases=cases,
    run=run,
    measures=MEASURES,
    tables=[
        Table(BY, OF_ORDERS, VS_FCFS, GRID, "By row limit and load", f"""\
`--lengths {LONG_TAIL}`, KV blocks for all. docs/policies.md explains the orders. Load is the rate
of requests ÷ what `fcfs` completes with as many rows while requests always wait. Shortest and
longest quarter: of the requests, by completion tokens. σ: lengths are predicted with a log-normal
error of this sigma; without σ they are exact. At a load above 1 the queue grows until the last
arrival, so latencies there depend on the number of requests."""),
        Table(BY, OF_ORDERS, VS_FCFS, MORE, "More rows, arrivals as for 8 rows"),
        Table(("rows", "variant"), OF_BATCHES, VS_STATIC, FORMED, "Batches", f"""\
A burst, `--lengths {PARTS["batches"].lengths}`. A batch of B rows runs until its longest request is
finished, so requests of similar lengths leave fewer rows idle. `multibin` makes each batch from one
bin of lengths; σ 0.7: of predicted lengths. Numbers are of the time in which all rows are taken.

The closed forms are for uniform lengths g: `static` uses mean(g) / E[max of B draws of g] of its
rows, and k bins complete (B/(B+1)) / ((k−1)/2k + B/(k(B+1))) times as much as one. `static, sjf`
sorts the whole burst, so it has as many bins as batches."""),
        Table(BY[1:], OF_URGENT, [Against(FCFS, GAPS)], LEVEL, "Urgent requests", f"""\
`--lengths {PARTS["urgent"].lengths}`, KV blocks of eight requests of mean length. A tenth of the
requests is urgent and has level 1 of `--order priority`, the others level 2. With `demand`,
requests take KV blocks as they fill; without it, all of their blocks before they run. A request of
level 2 is late once it has waited {TIMEOUT_MS} ms: it goes behind all others (`delayed`), or is
refused (`rejected`). Latencies are of the requests that were answered."""),
    ],
    figure="Mean latency by order, load and row limit; short and long requests; batches of similar "
    "lengths, with their closed forms; urgent requests and the others by load",
    panels=[
        *(
            Panel(f"{n} rows", "latency mean ÷ fcfs's", "mean_s", "load", "load", base=FCFS,
                  where={**GRID, "rows": n, "variant": EXACT}) for n in PARTS["grid"].rows
        ),
        Panel("by error of predicted lengths", "latency mean, s", "mean_s", sigma_of, "σ", order_of,
              HERE),
        Panel("latency by length", "latency, s", ("shortest_s", "longest_s", "p99_s"),
              where={**HERE, "variant": EXACT}, log=True),
        Panel("by rows, same arrivals", "latency mean, s", "mean_s", "rows", "rows", where=MORE),
        Panel("bins of known lengths", "useful rows ÷ static's", "useful", bins_of, "bins", rows_of,
              {**FORMED, "variant": tuple(BINNED)}, STATIC, "closed_form"),
        Panel("batches", "throughput ÷ static's", "full", "variant", "", rows_of, FORMED, STATIC),
        Panel("batches", "useful rows, %", "useful", "variant", "", rows_of, FORMED,
              expected="closed_form"),
        *(
            Panel(title, "latency, s", measure, "load", "load", where=LEVEL, log=True)
            for title, measure in zip(("urgent: mean", "others: mean", "longest of all"), GAPS)
        ),
    ],
    styles={
        name: Style(PALETTE[i], "--" if "fcfs" in name else "-", "o")
        for name, i in zip(
            (*EXACT, "sjf, at most 2 s", "batches of 8", "batches of 32", *[*LEVELLED][1:]),
            (0, 2, 3, 1, 5, 4, 2, 1, 0, 1, 3, 5, 2),
        )
    },
)  # fmt: skip
