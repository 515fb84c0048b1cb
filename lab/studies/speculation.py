"""Speculative decoding by rows: what draft tokens are worth, from one row to 64, on real engines.

Forced: the server's scheduler and engine without HTTP, with draft tokens that are accepted as often
as is stated. Texts: `demo` with its own drafts. Live: `demo` over HTTP, at loads of its capacity.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Iterable
from typing import Any

import torch

from client.load import Watch
from client.machine import ROOT
from client.measure import Target, measure, warm_up
from client.traces import Request
from client.wire import Plain
from compare.report.tables import NONE, markdown
from compare.servers import server
from config import Config, build
from generate.forced import ForcedAcceptance
from generate.loading import load_generator
from generate.weights import locate
from lab.studies.runner import FinishedRuns
from lab.studies.study import Against, Case, Cases, Panel, Study, Table, mean, only, values
from scheduling.building import build_scheduler
from scheduling.inference import Generator, Inference
from scheduling.planning import rows_to_draft
from scheduling.sampling import Sampling
from server.serving import Server

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "demo": ("demo", {"model": "demo"}),
    "gpt2": ("GPT-2 124M", {"model": "gpt2", "weights": "random"}),
    "gpt2-medium": ("GPT-2 355M", {"model": "gpt2-medium", "weights": "random"}),
}
SHARED = {"dtype": "bfloat16", "tokenizer": "bytes"}  # of the larger ones
ROWS = dict.fromkeys(MODELS, (1, 2, 4, 8, 16, 32, 64)) | {"gpt2-medium": (1, 4, 16, 64)}
DRAFTS, RATES = (1, 2, 4, 8), (0.0, 0.3, 0.6, 0.9)
LIMITS = {"max_batch_size": 64, "token_budget": 640}
PROMPT, LONGEST = 8, 900  # tokens
# rows of all iterations of a case together, so that demo's short ones are enough
COMPUTED = {"demo": 1500, "gpt2": 96, "gpt2-medium": 48}
QUOTED, PROSE, RANDOM = "quoted", "prose", "random ids"
TEXTS, SOURCES = (QUOTED, PROSE, RANDOM), ("ngram", "model:demo-draft")
LENGTH = 128  # completion tokens of a text
LOADS = (0.2, 0.4, 0.6, 0.8, 1.1)
LIVE = {"model": "demo", "max_batch_size": 8}


def cases(n: int) -> list[dict[str, Any]]:
    forced = [
        {"table": "forced", "model": model, "rows": rows, "speculate": k, "rate": rate}
        for model in MODELS
        for rows in ROWS[model]
        for k, rate in [(0, None), *itertools.product(DRAFTS, RATES)]
    ]
    texts = [
        {"table": "texts", "text": text, "rows": rows, "draft": source, "speculate": k}
        for text, rows in itertools.product(TEXTS, (1, 8, 32))
        for source, k in [("none", 0), *((source, 4) for source in SOURCES)]
    ]
    live = [
        {"table": "live", "load": load, "speculate": k}
        for load, k in itertools.product(LOADS, (0, 4))
    ]
    return forced + texts + live


def config_of(speculate: int, draft: str, **settings: Any) -> Config:
    drafting = {"speculate": speculate, "draft": draft} if speculate else {}
    return build("dynamic", settings | drafting, {})


# ---- forced


@functools.cache
def engine(model: str) -> tuple[Config, Generator]:
    own = MODELS[model][1]
    config = config_of(0, "", **LIMITS, **own, **(SHARED if model != "demo" else {}))
    return config, load_generator(config, locate(config), 257)


def forced(case: Case, seed: int) -> dict[str, Any]:
    """Return tokens a second of rows that decode, over some iterations."""
    (config, plain), rates = engine(case["model"]), [case["rate"] or 0.0]
    torch.set_num_threads(config.threads)
    rows, accepting = case["rows"], ForcedAcceptance(plain.generate, rates)
    most = 1 + case["speculate"]  # tokens of a row in an iteration
    n = min(max(6, COMPUTED[case["model"]] // rows), LONGEST // most)
    scheduler = build_scheduler(config.model_copy(update={"speculate": case["speculate"]}))
    draw = random.Random(seed)
    asked = [
        Inference(
            draw.choices(range(256), k=PROMPT), 1 + (n + 2) * most, Sampling(seed=97 * seed + i)
        )
        for i in range(rows)
    ]
    scheduler.enqueue(asked, 0.0)

    def iterate(drafts: bool) -> None:
        if drafts and scheduler.speculation is not None:
            rows = rows_to_draft(scheduler, time.perf_counter())
            scheduler.speculation.draft(rows, accepting)
        now = time.perf_counter()
        iteration, _ = scheduler.schedule(now)
        scheduler.apply(iteration, accepting.generate(iteration), now)

    while len(scheduler.running) < rows or not all(i.decodes for i in scheduler.running.values()):
        iterate(drafts=False)
    iterate(drafts=True)  # the first one of a kind is slower
    before, start = scheduler.completion_tokens, time.perf_counter()
    for _ in range(n):
        iterate(drafts=True)
    seconds = time.perf_counter() - start
    assert len(scheduler.running) == rows, "each still decodes"
    return {"output_throughput": (scheduler.completion_tokens - before) / seconds}


def expected(rate: float, k: int) -> float:
    """Return the tokens of a row that verifies k draft tokens, each accepted with this chance if
    all before it were (Leviathan et al., 2023, equation 1).
    """
    return sum(rate**place for place in range(k + 1))


# ---- texts


def prompt(text: str, seed: int) -> list[int]:
    """Return a prompt of about 250 bytes of documentation that `demo` has not seen; quoted: a part
    of it, and its beginning again.
    """
    draw, whole = random.Random(seed), (ROOT / "lab" / "training" / "held_out.txt").read_bytes()
    if text == RANDOM:
        return [draw.randrange(256) for _ in range(250)]
    at = draw.randrange(len(whole) - 250)
    return list(whole[at : at + 200] * (1 + (text == QUOTED))) + list(whole[at : at + 50])


def texts(case: Case, seed: int) -> dict[str, Any]:
    """Return tokens a second of a burst, and the share of draft tokens that were accepted."""
    rows, text = case["rows"], case["text"]
    serving = Server(config_of(case["speculate"], case["draft"], model="demo", max_batch_size=32))
    serving.manager.wait_until_loaded()
    sampling = Sampling(1.0 if text == RANDOM else 0.0, seed=seed)
    asked = [Inference(prompt(text, 1000 * seed + i), LENGTH, sampling) for i in range(rows)]
    start = time.perf_counter()
    serving.manager.enqueue(asked)
    for inference in asked:
        inference.done.wait()
    seconds = time.perf_counter() - start
    serving.close()
    return {"output_throughput": rows * LENGTH / seconds, "acceptance": _acceptance(asked)}


def _acceptance(asked: Iterable[Inference]) -> float | None:
    verified = sum(inference.drafts.verified for inference in asked)
    return sum(inference.drafts.accepted for inference in asked) / verified if verified else None


# ---- live


def trace(n: int, seed: int, rate: float | None) -> list[Request]:
    """Return requests at so many a second; None: all at once."""
    draw, at, requests = random.Random(seed), 0.0, []
    for i in range(n):
        at += draw.expovariate(rate) if rate else 0.0
        tokens = min(400, 16 + int(draw.expovariate(1 / 100)))
        ids = prompt(PROSE, 1000 * seed + i)
        requests.append(Request(id=i, at=at, prompt_ids=ids, num_tokens=tokens))
    return requests


def live(case: Case, n: int, seed: int) -> dict[str, Any]:
    result = served(trace(n, seed, case["load"] * capacity(n)), speculate=case["speculate"])
    return {name: result[name] for name in OF_LIVE}


@functools.cache
def capacity(n: int) -> float:
    """Return the requests a second that are completed without speculation when all come at once."""
    return n / float(served(trace(n, 1, None))["wall_clock_s"])


def served(requests: list[Request], **settings: int) -> dict[str, Any]:
    """Return the measures of a trace that a fresh server gets."""
    with server("dynamic", LIVE | settings) as url:
        target = Target("live", url, Plain())
        warm_up(target)
        return measure(target, requests, {}, 600.0, Watch())[0]


OF_LIVE = {
    "output_throughput": ("throughput, tok/s", "{:,.0f}"),
    "mean_e2el_ms": ("latency mean, ms", "{:,.1f}"),
    "p99_e2el_ms": ("latency p99, ms", "{:,.0f}"),
}


def run(case: Case, n: int, seed: int, kept: FinishedRuns) -> dict[str, Any]:
    if case["table"] == "forced":
        return forced(case, seed)
    return texts(case, seed) if case["table"] == "texts" else live(case, n, seed)


def with_closed_form(cases: Cases) -> list[dict[str, Any]]:
    """Add gains: tokens a second ÷ those without speculation; and what the formula says: expected
    tokens, times the ratio of iterations' times, which is the gain of drafts that are all rejected.
    """
    result = []
    for case in cases:
        if case["table"] == "forced" and case["speculate"]:
            keys = {key: case[key] for key in ("table", "model", "rows")}
            [plain] = only(cases, keys | {"speculate": 0})
            [rejected] = only(cases, keys | {"speculate": case["speculate"], "rate": 0.0})
            factor = expected(case["rate"], case["speculate"])
            speeds = [values(each, "output_throughput") for each in (case, plain, rejected)]
            seeds = [
                seed | {"gain": own / base, "closed_form": factor * none / base}
                for seed, own, base, none in zip(case["seeds"], *speeds)
            ]
            case = {**case, "seeds": seeds}
        result.append(dict(case))
    return result


def break_even(cases: Cases, model: str, rate: float, k: int) -> str:
    """Return the rows up to which draft tokens raise the tokens a second, with the interval in
    which the gain's own reaches 1: on a straight line over the logarithm of rows.
    """
    keys = {"table": "forced", "model": model, "rate": rate, "speculate": k}
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


def name_of(case: Case) -> str:
    return f"{case['speculate']} at {case['rate']:.0%}"


def gain_panel(model: str, rate: float) -> Panel:
    return Panel(
        f"{MODELS[model][0]}, {rate:.0%} accepted",
        "throughput ÷ without drafts",
        "gain",
        "rows",
        "rows",
        line=lambda case: f"{case['speculate']} draft tokens",
        where={"table": "forced", "model": model, "rate": rate},
        expected="closed_form",
        log=True,
    )


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
            ("load", "speculate"), list(OF_LIVE), [Against(OF_PLAIN, ratios=[*OF_LIVE])],
            {"table": "live"}, "demo over HTTP, by load",
            "Load is the rate of requests ÷ what the server completes of a burst without draft "
            "tokens. 8 rows; prompts are documentation.",
        ),
        Table(
            ("text", "rows", "draft", "speculate"), ["output_throughput", "acceptance"],
            [Against({"draft": "none", **OF_PLAIN}, ratios=["output_throughput"])],
            {"table": "texts"}, "demo with its own draft tokens, by text",
            "quoted: a prompt that repeats a part of itself. Drafts: `ngram` copies what followed "
            "the same tokens earlier, `model:demo-draft` is a smaller model. A burst, without "
            "HTTP.",
        ),
        Table(
            ("model", "rows", "speculate", "rate"), ["gain", "closed_form"], [],
            {"table": "forced", "speculate": DRAFTS},
            "Throughput where a set share of draft tokens is accepted",
            "Real iterations verify draft tokens, of which the share `rate` is accepted by force. "
            "Expected: the formula of the claim, with the measured times of iterations.",
        ),
    ],
    figure="Throughput ÷ that without draft tokens against rows, by the number of draft tokens and "
    "their acceptance (dotted: expected)",
    panels=[gain_panel(model, rate) for rate in RATES[2:] for model in MODELS],
)  # fmt: skip
