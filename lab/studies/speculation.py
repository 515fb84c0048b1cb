"""Speculative decoding by rows: what draft tokens are worth, from one row to 64, on real engines.

Forced: scheduler and engine without HTTP, with draft tokens that are accepted as often as stated.
Texts: `demo` with its own drafts. Live: `demo` at loads of its capacity.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from typing import Any

from client.load import Watch
from client.machine import ROOT
from client.measure import Target, measure, warm_up
from client.traces import Request
from client.wire import Plain
from compare.report.tables import NONE, markdown
from compare.servers import server
from generate.forced import ForcedAcceptance
from lab.studies import virtual
from lab.studies.engines import engine, iterate
from lab.studies.runner import FinishedRuns
from lab.studies.study import Against, Case, Cases, Panel, Study, Table, grid, mean, only, values
from scheduling.building import build_scheduler
from scheduling.inference import Inference
from scheduling.planning import rows_to_draft
from scheduling.sampling import Sampling

BFLOAT16 = {"weights": "random", "dtype": "bfloat16", "tokenizer": "bytes"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "demo": ("demo", {}),
    "gpt2": ("GPT-2 124M", BFLOAT16),
    "gpt2-medium": ("GPT-2 355M", BFLOAT16),
}
ROWS = dict.fromkeys(MODELS, (1, 2, 4, 8, 16, 32, 64)) | {"gpt2-medium": (1, 4, 16, 64)}
DRAFTS, RATES = (1, 2, 4, 8), (0.0, 0.3, 0.6, 0.9)
PROMPT, LONGEST = 8, 900  # tokens
# rows of all iterations of a case together, so that demo's short ones are enough
COMPUTED = {"demo": 1500, "gpt2": 96, "gpt2-medium": 48}
QUOTED, PROSE, RANDOM = "quoted", "prose", "random ids"
LENGTH = 128  # completion tokens of a text
LOADS = (0.2, 0.4, 0.6, 0.8, 1.1)
FORCED, TEXTS, LIVE = ({"table": table} for table in ("forced", "texts", "live"))


def cases(n: int) -> list[dict[str, Any]]:
    return [
        *(
            {**FORCED, "model": model, "rows": rows, "speculate": k, "rate": rate}
            for model in MODELS
            for rows in ROWS[model]
            for k, rate in [(0, None), *itertools.product(DRAFTS, RATES)]
        ),
        *(
            {
                **TEXTS,
                "text": text,
                "rows": rows,
                "draft": draft,
                "speculate": 4 * (draft != "none"),
            }
            for text, rows in itertools.product((QUOTED, PROSE, RANDOM), (1, 8, 32))
            for draft in ("none", "ngram", "model:demo-draft")
        ),
        *grid(table=["live"], load=LOADS, speculate=(0, 4))(n),
    ]


def run(case: Case, n: int, seed: int, kept: FinishedRuns) -> dict[str, Any]:
    if case["table"] == "forced":
        return {"output_throughput": forced(case, seed)}
    settings = {"speculate": case["speculate"]}
    if case["table"] == "live":
        result = served(trace(n, seed, case["load"] * capacity(n)), max_batch_size=8, **settings)
        return {name: result[name] for name in OF_LIVE}
    if case["speculate"]:
        settings["draft"] = case["draft"]
    of_all: dict[str, Any] = {
        "at": 0.0,
        "num_tokens": LENGTH,
        "temperature": float(case["text"] == RANDOM),
    }
    ids = [prompt(case["text"], 1000 * seed + i) for i in range(case["rows"])]
    at_once = [Request(id=i, prompt_ids=each, seed=seed, **of_all) for i, each in enumerate(ids)]
    result = served(at_once, max_batch_size=32, **settings)
    return {name: result[name] for name in ("output_throughput", "acceptance")}


def forced(case: Case, seed: int) -> float:
    """Return tokens per second of rows that decode, over some iterations."""
    rows, model = case["rows"], case["model"]
    limits = {"max_batch_size": 64, "token_budget": 640}
    config, plain = engine(model=model, **MODELS[model][1], **limits)
    accepting = ForcedAcceptance(plain.generate, [case["rate"] or 0.0])
    most = 1 + case["speculate"]  # tokens of a row in an iteration
    n = min(max(6, COMPUTED[model] // rows), LONGEST // most)
    scheduler = build_scheduler(config.model_copy(update={"speculate": case["speculate"]}))
    ids, length = random.Random(seed), 1 + (n + 2) * most
    prompts = [ids.choices(range(256), k=PROMPT) for _ in range(rows)]
    asked = [Inference(p, length, Sampling(seed=97 * seed + i)) for i, p in enumerate(prompts)]
    scheduler.enqueue(asked, 0.0)
    while len(scheduler.running) < rows or not all(i.decodes for i in scheduler.running.values()):
        iterate(scheduler, accepting)
    for k in range(1 + n):
        if k == 1:  # the first one of a kind is slower
            before, start = scheduler.completion_tokens, time.perf_counter()
        if scheduler.speculation is not None:
            wanted = rows_to_draft(scheduler, time.perf_counter())
            scheduler.speculation.draft(wanted, accepting)
        iterate(scheduler, accepting)
    seconds = time.perf_counter() - start
    assert len(scheduler.running) == rows, "each still decodes"
    return (scheduler.completion_tokens - before) / seconds


def prompt(text: str, seed: int) -> list[int]:
    """Return a prompt of about 250 bytes of documentation that `demo` has not seen; quoted: a part
    of it, and its beginning again.
    """
    draw, whole = random.Random(seed), (ROOT / "lab" / "training" / "held_out.txt").read_bytes()
    if text == RANDOM:
        return [draw.randrange(256) for _ in range(250)]
    at = draw.randrange(len(whole) - 250)
    return list(whole[at : at + 200] * (1 + (text == QUOTED))) + list(whole[at : at + 50])


def trace(n: int, seed: int, rate: float | None) -> list[Request]:
    """Return requests at so many per second; None: all at once."""
    draw, at, requests = random.Random(seed), 0.0, []
    for i in range(n):
        at += draw.expovariate(rate) if rate else 0.0
        tokens = min(400, 16 + int(draw.expovariate(1 / 100)))
        ids = prompt(PROSE, 1000 * seed + i)
        requests.append(Request(id=i, at=at, prompt_ids=ids, num_tokens=tokens))
    return requests


@functools.cache
def capacity(n: int) -> float:
    """Return the requests per second that are completed without speculation in a burst."""
    return n / float(served(trace(n, 1, None), max_batch_size=8)["wall_clock_s"])


def served(requests: list[Request], **settings: Any) -> dict[str, Any]:
    """Return the measures of a trace that a fresh server of `demo` gets."""
    with server("dynamic", {"model": "demo", **settings}) as url:
        target = Target("live", url, Plain())
        warm_up(target)
        return measure(target, requests, {}, 600.0, Watch())[0]


def with_closed_form(cases: Cases) -> list[dict[str, Any]]:
    """Add gains: tokens per second ÷ those without speculation; and what the formula says: expected
    tokens, times the ratio of iterations' times, which is the gain of drafts that are all rejected.
    """
    result = [dict(case) for case in cases]
    for case in result:
        if not only([case], {**FORCED, "speculate": DRAFTS}):
            continue
        keys = {key: case[key] for key in ("table", "model", "rows")}
        [plain] = only(cases, keys | {"speculate": 0})
        [rejected] = only(cases, keys | {"speculate": case["speculate"], "rate": 0.0})
        # tokens of a row, by Leviathan et al. (2023), equation 1
        factor = sum(case["rate"] ** place for place in range(case["speculate"] + 1))
        speeds = [values(each, "output_throughput") for each in (case, plain, rejected)]
        case["seeds"] = [
            seed | {"gain": own / base, "closed_form": factor * none / base}
            for seed, own, base, none in zip(case["seeds"], *speeds)
        ]
    return result


def break_even(cases: Cases, model: str, rate: float, k: int) -> str:
    """Return the rows up to which draft tokens raise the tokens per second, with the interval in
    which the gain's own reaches 1: on a straight line over the logarithm of rows.
    """
    keys = {**FORCED, "model": model, "rate": rate, "speculate": k}
    gains = [(case["rows"], mean(case, "gain")) for case in only(cases, keys)]
    if not gains:
        return NONE

    def crossing(sign: float) -> str:
        above = [(rows, gain.mean + sign * (gain.half or 0.0)) for rows, gain in gains]
        for (few, high), (many, low) in itertools.pairwise(above):
            if high >= 1 > low:
                return f"{few * (many / few) ** ((high - 1) / (high - low)):.1f}"
        return "> 64" if above[-1][1] >= 1 else "none"

    return f"{crossing(0)} ({crossing(-1)} to {crossing(1)})"


def verdict(cases: Cases) -> str:
    rows = [["model", "draft tokens", *(f"{rate:.0%} accepted" for rate in RATES[1:])]]
    for (model, (name, _)), k in itertools.product(MODELS.items(), DRAFTS):
        rows.append([name, str(k), *(break_even(cases, model, rate, k) for rate in RATES[1:])])
    return (
        "The number of rows up to which draft tokens raise throughput, by the share of them that "
        "is accepted (with its 95% interval):\n\n"
        f"{markdown(rows, left=1)}"
    )


OF_LIVE = {
    name: virtual.OF_TRACE[name] for name in ("output_throughput", "mean_e2el_ms", "p99_e2el_ms")
}
OF_PLAIN = {"speculate": 0}
STUDY = Study(
    name="speculation",
    title="Speculative decoding by the number of rows",
    question="Up to how many rows do draft tokens raise throughput?",
    source="with K draft tokens, each accepted with probability a, a row has (1 − a^(K+1)) ÷ (1 − "
    "a) tokens per iteration (Leviathan et al., ICML 2023); a server is up to 2.8 times as fast at "
    "low load, and 1.4 to 1.8 times as slow at high load (vLLM, 2024)",
    workload="{seeds} seeds, real engines on 2 cores; GPT-2 with random weights in bfloat16; {n} "
    "requests over HTTP",
    requests=150,
    seeds=3,
    cases=cases,
    bases=("speculate=0", "rate=None", "rate=0.0"),
    run=run,
    servers=True,
    summarized=with_closed_form,
    measures={
        **OF_LIVE,
        "gain": ("throughput ÷ without drafts", "{:.2f}"),
        "closed_form": ("expected", "{:.2f}"),
        "acceptance": ("accepted draft tokens", "{:.0%}"),
    },
    text=verdict,
    tables=[
        Table(
            ("load", "speculate"), [*OF_LIVE], [Against(OF_PLAIN, ratios=[*OF_LIVE])],
            LIVE, "demo over HTTP, by load",
            "Load is the rate of requests ÷ what the server completes of a burst without draft "
            "tokens. 8 rows; prompts are documentation.",
        ),
        Table(
            ("text", "rows", "draft", "speculate"), ["output_throughput", "acceptance"],
            [Against({"draft": "none", **OF_PLAIN}, ratios=["output_throughput"])],
            TEXTS, "demo with its own draft tokens, by text",
            "quoted: a prompt that repeats a part of itself. Drafts: `ngram` copies what followed "
            "the same tokens earlier, `model:demo-draft` is a smaller model. A burst over "
            "HTTP.",
        ),
        Table(
            ("model", "rows", "speculate", "rate"), ["gain", "closed_form"], [],
            {**FORCED, "speculate": DRAFTS},
            "Throughput where a set share of draft tokens is accepted",
            "Real iterations verify draft tokens, of which the share `rate` is accepted by force. "
            "Expected: the formula of the claim, with the measured times of iterations.",
        ),
    ],
    figure="Throughput ÷ that without draft tokens against rows, by the number of draft tokens and "
    "their acceptance (dotted: expected)",
    panels=[
        Panel(f"{name}, {rate:.0%} accepted", "throughput ÷ without drafts", "gain", "rows", "rows",
              lambda case: f"{case['speculate']} draft tokens",
              {**FORCED, "model": model, "rate": rate}, expected="closed_form", log=True)
        for rate in RATES[2:] for model, (name, _) in MODELS.items()
    ],
)  # fmt: skip
