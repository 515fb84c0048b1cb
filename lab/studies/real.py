"""Costs of kernels beside what others measured: runs of vLLM on GPUs, foreseen without being fitted
to them.

One number was fitted, `simulate.kernels.SLOWER`, to the seconds of one run in which rows alone
decoded. Data and their licences: lab/studies/measured/README.md.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from client.traces import Request
from lab.studies.study import Cases, Study, Table
from lab.studies.virtual import server
from simulate.costs import Costs, Work, load
from simulate.kernels import SLOWER
from simulate.loop import PS
from simulate.served_model import UTILIZATION, ServedModel

FOLDER = Path(__file__).with_name("measured")
FITTED = "rtx-pro-6000-llama-3.1-8b"
ENGINES = (FITTED, "rtx-pro-6000-qwen3-32b-tp2")  # measured without HTTP
OF_ENGINES = {"max_batch_size": 128, "token_budget": 2048}
WAVES = 10  # requests of a closed loop, in multiples of its concurrency: as InferenceMAX sends
LEAST_TOKENS_PER_S = 50  # of a second in which enough is decoded to know its iterations
TTFT, TPOT, LATENCY = "ttft", "tpot", "latency"


def rows_of(name: str) -> list[dict[str, float]]:
    """Return the rows of a file of numbers."""
    with (FOLDER / name).open(encoding="utf-8", newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def silicon() -> list[dict[str, str]]:
    with (FOLDER / "silicon.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def cases(n: int) -> list[dict[str, Any]]:
    """Return a case for each file of one run, and for each of the costs in silicon.csv."""
    loops = dict.fromkeys(row["costs"] for row in silicon())
    return [{"costs": name, "http": "no"} for name in ENGINES] + [
        {"costs": name, "http": "yes"} for name in loops
    ]


def served(costs: Costs, requests: Sequence[Request], **settings: Any) -> Mapping[str, np.ndarray]:
    """Return each request's seconds, as vLLM's defaults and these settings foresee them."""
    model = ServedModel(**costs.source["served"])
    settings = {**model.settings(), **settings}
    settings |= model.fill_in(settings, UTILIZATION)
    target = server(settings, costs, stream=True)
    target.config = target.config.model_copy(update={"ahead": True})
    answers = target.replay(requests).answers
    ttft = answers["first_token_at"] - answers["sent_at"]
    latency = answers["last_token_at"] - answers["sent_at"]
    return _times(ttft, latency, answers["completion_tokens"])


def _times(ttft: np.ndarray, latency: np.ndarray, tokens: np.ndarray) -> dict[str, np.ndarray]:
    return {TTFT: ttft, TPOT: (latency - ttft) / np.maximum(1, tokens - 1), LATENCY: latency}


def run(case: Mapping[str, Any], n: int, seed: int) -> dict[str, Any]:
    """Return the errors of what is foreseen, in percent of what was measured."""
    costs = load(case["costs"])
    if case["http"] == "no":
        return {"runs": 1, **_of_requests(replace(costs, request=0), rows_of(f"{costs.name}.csv"))}
    rows = [row for row in silicon() if row["costs"] == case["costs"]]
    errors = [_of_loop(costs, row) for row in rows]
    found: dict[str, Any] = {"runs": len(rows), "latencies": [each[LATENCY] for each in errors]}
    for measure in (TTFT, TPOT, LATENCY, "throughput"):
        of_rows = np.array([each[measure] for each in errors])
        found[measure] = float(of_rows.mean())
        found[f"{measure}_absolute"] = float(np.abs(of_rows).mean())
    return found


def _of_requests(costs: Costs, rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    requests = [
        Request(
            id=i,
            at=row["queued_s"],
            prompt_ids=[0] * int(row["prompt_tokens"]),
            num_tokens=int(row["completion_tokens"]),
        )
        for i, row in enumerate(rows)
    ]
    column = {key: np.array([row[key] for row in rows]) for key in rows[0]}
    begun, first, last = (column[f"{k}_s"] for k in ("queued", "first_token", "last_token"))
    real = _times(first - begun, last - begun, column["completion_tokens"])
    foreseen = served(costs, requests, **OF_ENGINES)
    found = {}
    for name, measured in real.items():
        found[name] = _percent(foreseen[name].mean(), measured.mean())
        found[f"{name}_absolute"] = abs(found[name])
        found[f"{name}_p99"] = _percent(*(np.percentile(x, 99) for x in (foreseen[name], measured)))
    ends = [float((at + times[LATENCY]).max()) for at, times in ((begun, foreseen), (begun, real))]
    found["throughput"] = _percent(ends[1], ends[0])
    return found | {"throughput_absolute": abs(found["throughput"])}


def _of_loop(costs: Costs, row: Mapping[str, str]) -> dict[str, float]:
    """Return errors of means, of a closed loop."""
    users, shortest, rng = int(row["concurrency"]), float(row["shortest"]), np.random.default_rng(0)
    most = np.array([int(row["prompt_tokens"]), int(row["completion_tokens"])])
    lengths = rng.integers((shortest * most).astype(int), most + 1, (WAVES * users, 2)).tolist()
    requests = [
        Request(id=i, at=0.0, users=users, prompt_ids=[0] * prompt, num_tokens=tokens)
        for i, (prompt, tokens) in enumerate(lengths)
    ]
    foreseen, tokens = served(costs, requests), np.mean(lengths, axis=0)[1]
    ttft, tpot = float(row["ttft_ms"]) / 1e3, float(row["tpot_ms"]) / 1e3
    latency = ttft + tpot * (tokens - 1)
    means = [float(foreseen[name].mean()) for name in (TTFT, TPOT, LATENCY)]
    errors = dict(zip((TTFT, TPOT, LATENCY), map(_percent, means, (ttft, tpot, latency))))
    return errors | {"throughput": _percent(latency, means[2])}  # Little's law


def _percent(foreseen: float, measured: float) -> float:
    return 100 * (foreseen / measured - 1)


def factors() -> list[float]:
    """Return for each second of the fitted run in which rows alone decoded how long an iteration
    took, in parts of its kernels' time.
    """
    costs, rows = load(FITTED), rows_of(f"{FITTED}.csv")
    column = {key: np.array([row[key] for row in rows]) for key in rows[0]}
    begun, first, last = (column[f"{k}_s"] for k in ("scheduled", "first_token", "last_token"))
    seconds = rows_of(f"{FITTED}-seconds.csv")

    def apart(offset: float) -> float:
        """Return how far rows are from the logged ones, if the log began so much later."""
        at = [second["s"] + offset for second in seconds]
        running = [int(((begun <= t) & (last > t)).sum()) for t in at]
        return sum(abs(n - second["running"]) for n, second in zip(running, seconds))

    offset = min(np.arange(-2, 2, 0.02), key=apart)
    found = []
    for second in seconds:
        if second["prompt_tokens"] or second["completion_tokens"] < LEAST_TOKENS_PER_S:
            continue
        n, context = [], []
        for t in second["s"] + offset - np.linspace(1, 0, 101):
            here = (first <= t) & (last > t)
            share = (t - first[here]) / (last[here] - first[here])
            tokens = column["prompt_tokens"][here] + share * column["completion_tokens"][here]
            n.append(int(here.sum()))
            context.append(float(tokens.sum()))
        rows_then = float(np.mean(n))
        size = max(1, round(rows_then))
        kernels = costs.of_work(Work(size, size, round(np.mean(context)), 0, 0)) / PS / SLOWER
        found.append(rows_then / second["completion_tokens"] / kernels)
    return found


def text(of: Cases) -> str:
    parts = factors()
    low, middle, high = np.percentile(parts, (5, 50, 95))
    over_http = np.array([each for case in of for each in case["seeds"][0].get("latencies", ())])
    percent = 100 * (100 / (100 + over_http) - 1)  # measured ÷ foreseen − 1
    spread = ", ".join(f"{each:+.1f}" for each in np.percentile(percent, (5, 50, 95)))
    return (
        f"The factor was fitted to {len(parts)} seconds in which rows alone decoded in one of "
        f"these runs (`{FITTED}`): an iteration took {middle:.3f} of its kernels' time (p5 "
        f"{low:.2f}, p95 {high:.2f}). Nothing else was fitted to. Errors are foreseen ÷ measured "
        "− 1 in percent of "
        "means; |…| is the mean of absolute errors over the runs of a row. A row without HTTP is "
        "one run. The others are closed loops over HTTP with vLLM's defaults, since settings are "
        "not stated: of `vllm bench serve` as InferenceX runs it, with lengths drawn between 0.8 "
        "and 1 times the stated ones (its random range ratio), and for Qwen3-32B of one length, so "
        "that requests come in waves and their TTFT says little. Over all "
        f"{len(over_http)} of these the mean of |latency| is {np.abs(over_http).mean():.1f}; "
        f"p5, p50 and p95 of measured ÷ foreseen − 1 are {spread}."
    )


MEASURES = {
    "runs": ("runs", "{:.0f}"),
    LATENCY: ("latency", "{:+.1f}"),
    f"{LATENCY}_absolute": ("|latency|", "{:.1f}"),
    TTFT: ("TTFT", "{:+.1f}"),
    f"{TTFT}_absolute": ("|TTFT|", "{:.1f}"),
    TPOT: ("TPOT", "{:+.1f}"),
    f"{TPOT}_absolute": ("|TPOT|", "{:.1f}"),
    "throughput": ("throughput", "{:+.1f}"),
    "throughput_absolute": ("|throughput|", "{:.1f}"),
}

STUDY = Study(
    name="real",
    title="Kernels' costs and real servers",
    question="How near do simulations with NVIDIA's kernels come to vLLM on GPUs that others "
    "measured?",
    workload="runs of others, each once",
    requests=0,
    seeds=1,
    cases=cases,
    run=run,
    measures=MEASURES,
    text=text,
    tables=[Table(("costs", "http"))],
)
