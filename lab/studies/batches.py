"""Batches of similar lengths beside closed forms: `static`, sorted and in bins, and `dynamic`, on a
queue that is never empty.

Lengths are uniform. A batch of B rows then uses mean(g) / E[max of B draws of g] of them; k bins of
equal mass complete (B/(B+1)) / ((k−1)/2k + B/(k(B+1))) times as much (Guldogan et al., 2024).
"""

from __future__ import annotations

from typing import Any

from client.drawing import PALETTE, Look
from lab.studies import virtual
from lab.studies.study import Against, Case, Panel, Study, Table, grid
from lab.studies.virtual import VIRTUAL, Settings
from scheduling.records import IterationRecord

LENGTHS = "uniform:1:200"
ROWS, BINS = (8, 32), (2, 4, 8)
PATIENCE_MS = 10_000.0  # delay of a bin that does not fill, which would otherwise starve
NOISY = {"bins": BINS[-1], "length_predictor": "noisy:0.7"}
VARIANTS: dict[str, tuple[str, Settings]] = {
    "static": ("static", {}),
    **{f"multibin, {k} bins": ("multibin", {"bins": k}) for k in BINS},
    f"multibin, {BINS[-1]} bins, σ 0.7": ("multibin", NOISY),
    "static, sjf": ("static", {"order": "sjf", "prefill_weight": 0}),  # by length, as bins
    "dynamic": ("dynamic", {}),
}


def gain(rows: int, bins: float) -> float:
    """Return the throughput of so many bins ÷ that of one, in batches of so many rows."""
    of_one = rows / (rows + 1)
    return of_one / ((bins - 1) / (2 * bins) + of_one / bins)


def closed_form(variant: str, rows: int, n: int) -> float | None:
    """Return useful rows in %, of n requests; None where there is no closed form. A burst that is
    sorted as a whole has as many bins as batches.
    """
    mode, settings = VARIANTS[variant]
    if mode == "dynamic":
        return 100.0
    if "length_predictor" in settings:
        return None
    bins = n / rows if "order" in settings else settings.get("bins", 1)
    return 100 * (rows + 1) / (2 * rows) * gain(rows, bins)


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    """Serve a burst; measure while every row is taken, as if requests kept coming."""
    mode, settings = VARIANTS[case["variant"]]
    settings = {"max_batch_size": case["rows"], "token_budget": 10**5, **settings}
    if mode == "multibin":
        settings |= {"batch_size_target": case["rows"], "max_batch_delay_ms": PATIENCE_MS}
    burst = virtual.data_of(LENGTHS, seed).requests(n, "burst", scaled=True)
    seconds = 0.0
    live = computed = 0

    def observe(record: IterationRecord) -> None:
        nonlocal seconds, live, computed
        if record.iteration.running == case["rows"]:
            seconds += record.seconds
            live += record.rows["live"]
            computed += len(record.iteration.rows)

    virtual.serve(mode, settings, burst, observe)
    return {
        "useful": 100 * live / computed,
        "closed_form": closed_form(case["variant"], case["rows"], n),
        "throughput": live / seconds,
    }


def bins_of(case: Case) -> int:
    return int(VARIANTS[case["variant"]][1].get("bins", 1))


def rows_of(case: Case) -> str:
    return f"batches of {case['rows']}"


STATIC = {"variant": "static"}
BINNED = {"variant": tuple(VARIANTS)[: len(BINS) + 1]}
STUDY = Study(
    name="batches",
    title="Batches of similar lengths",
    question="How much more does `static` complete if the requests of a batch have similar "
    "lengths?",
    source="k bins complete up to 70% more than one bin, and the most that is possible as k grows "
    "(Multi-Bin Batching, arXiv 2412.04504)",
    workload=f"a burst of {{n}} requests, `--lengths {LENGTHS}`, {{seeds}} seeds, {VIRTUAL}",
    requests=4096,
    cases=grid(rows=ROWS, variant=VARIANTS),
    run=run,
    measures={
        "useful": ("useful rows, %", "{:.1f}"),
        "closed_form": ("closed form, %", "{:.1f}"),
        "throughput": ("throughput, tok/s", "{:,.0f}"),
    },
    text="""\
A batch of B rows runs until its longest request is finished, so requests of similar lengths leave
fewer rows idle. `multibin` makes each batch from one bin of lengths. σ 0.7: bins go by predicted
lengths, which are the true ones times a log-normal error. Numbers are of the time in which all rows
are taken. An iteration takes as long with idle rows as with useful ones, so throughput rises as
useful rows do, apart from prefill.

The closed forms are for uniform lengths g: `static` uses mean(g) / E[max of B draws of g] of its
rows, and k bins complete (B/(B+1)) / ((k−1)/2k + B/(k(B+1))) times as much as one. `static, sjf`
sorts the whole burst, so it has as many bins as batches.""",
    tables=[
        Table(("rows", "variant"), against=[Against(STATIC, ratios=("throughput", "closed_form"))])
    ],
    figure="Useful rows and throughput by the number of bins, with the closed forms",
    panels=[
        Panel("bins of known lengths", "useful rows ÷ static's", "useful", bins_of, "bins", rows_of,
              BINNED, STATIC, "closed_form"),
        Panel("throughput", "throughput ÷ static's", "throughput", "variant", line=rows_of,
              base=STATIC),
        Panel("useful rows", "useful rows, %", "useful", "variant", line=rows_of,
              expected="closed_form"),
    ],
    looks={f"batches of {n}": Look(PALETTE[2 - k], "-", "o") for k, n in enumerate(ROWS)},
)  # fmt: skip
