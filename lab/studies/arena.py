"""The arena: orders and proposals for vLLM's scheduler, beside vLLM's default on the same traces.

A trace mixes kinds of requests; a load is a share of what the default completes of that trace.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from client import traces
from client.outcomes import Outcomes
from client.summary import meet
from client.traces import Request
from client.workloads import Workload
from compare.variants import parse_variants
from config.settings import flag, meaningful
from lab.studies import claims, league, virtual
from lab.studies.study import Case, Cases, Study, grid
from lab.studies.virtual import CAPACITY_SEED, Settings, while_waiting
from scheduling.policies import MODES, VICTIMS
from scheduling.user_policies import SOURCES
from simulate.costs import load

LOADS = (0.6, 0.85, 1.1)
MEMORY = {"overload", "oversubscribed"}  # traces on which rows are preempted
BURST, FAST = 240, 1e5  # requests that show a capacity, and their rate: kinds stay mixed
ROWS = 8
VLLM: Settings = {  # vLLM's default is `fcfs` with these
    "kv_reservation": "demand",
    "watermark": 0,
    "budget_counts": "all",
    "token_budget": 2048,
    "prefix_caching": "",
    "max_batch_size": ROWS,
    "kv_cache": f"{ROWS * 64}blocks",  # the longest request in every row
}
OURS = (
    "sjf", "srpt", "hrrn", "prefix", "fair", "mlfq", "edf", "priority --priority-levels 2",
    "dynamic --budget-counts prefill", "dynamic --prefill first",
    "dynamic --kv-reservation whole", "least_computed", "most_computed",
)  # fmt: skip


LIMITS = {"slo_ttft_ms": 1000.0, "slo_tpot_ms": 50.0}  # those that goodput counts by


class Kind(NamedTuple):
    """Requests of one kind."""

    lengths: str
    prompts: Mapping[str, Any]  # fields of the `Workload`
    share: float = 1.0  # of the trace's requests
    has: Mapping[str, Any] = LIMITS  # fields of each `Request`


class Trace(NamedTuple):
    """A workload of the arena. settings: of the server, where they are not VLLM's."""

    words: str
    kinds: Sequence[Kind]
    arrival: str = "poisson:{:g}"
    settings: Mapping[str, Any] = {}


def prompts_of(tokens: int) -> dict[str, str]:
    """Return prompts of about so many tokens, few of which are alike."""
    return {"prefixes": f"5000:{tokens}:0"}


IDS = {"prompts": "ids"}
CHAT = Kind("exponential:30:150", prompts_of(48))
BURSTY = [Kind("exponential:60:400", prompts_of(192))], "gamma:{:g}:3"
SECOND_BUDGET = "overload-budget-128"
ONCE = {SECOND_BUDGET, "oversubscribed", "starved", "jobs"}  # traces of the highest load alone
# a third of ROWS, of requests whose prompts have 300 to 700 tokens and whose answers 200 to 500
A_THIRD = {"kv_cache": "160blocks", "max_model_len": 1200, "model": "fake"}
FEW_BLOCKS = {"kv_cache": "64blocks"}
TRACES = {
    "chat": Trace("short questions and answers", [CHAT]),
    "long-prompts": Trace(
        "a quarter of the requests asks about 700 tokens of text, the others chat",
        [Kind("exponential:20:100", prompts_of(700), 0.25), CHAT._replace(share=0.75)],
    ),
    "prefixes": Trace(
        "64 system prompts of 256 tokens, some popular; the KV blocks hold a third of them",
        [Kind("exponential:25:120", {"prefixes": "64:256:1"})],
        settings={"kv_cache": "400blocks"},
    ),
    "conversations": Trace(
        "four turns each, half a second after the last answer, and KV blocks for the past of all",
        [Kind("exponential:30:90", {"sessions": "4:0.5"})],
        settings={"kv_cache": "2048blocks"},
    ),
    "heavy-tails": Trace(
        "as chat, but the longest tenth of the answers has half of all tokens",
        [CHAT._replace(lengths="lognormal:12:1.4:700")],
    ),
    "greedy-users": Trace(
        "two users send nine tenths of the requests, a modest one the last tenth",
        [
            CHAT._replace(share=share, has=LIMITS | {"user": user})
            for user, share in {"greedy": 0.45, "greedy_too": 0.45, "modest": 0.1}.items()
        ],
    ),
    "slo-classes": Trace(
        "seven of ten requests are interactive (a first token in 0.5 s), the others a job's (20 s)",
        [
            CHAT._replace(share=0.7, has=LIMITS | {"slo_ttft_ms": 500.0, "priority": 1}),
            Kind(
                "exponential:60:300", prompts_of(320), 0.3, {"slo_ttft_ms": 20_000.0, "priority": 2}
            ),
        ],
    ),
    "overload": Trace("bursts, on KV blocks for a few requests", *BURSTY, FEW_BLOCKS),
    SECOND_BUDGET: Trace(
        "the same with a small token budget, which can hide what an order does",
        *BURSTY,
        FEW_BLOCKS | {"token_budget": 128},
    ),
    "oversubscribed": Trace(
        "long prompts and long answers, on KV blocks for a third of the rows",
        [Kind("uniform:200:500", {"prompt_lengths": "uniform:300:700"} | IDS)],
        settings=A_THIRD,
    ),
    "starved": Trace(
        "long prompts with answers of 8 tokens in a steady stream beside long answers, on a token "
        "budget of 256",
        [
            Kind("uniform:8:8", {"prompt_lengths": "uniform:700:900"} | IDS, 0.75),
            Kind("uniform:150:250", {"prompt_lengths": "uniform:20:60"} | IDS, 0.25),
        ],
        settings={"token_budget": 256},
    ),
    "jobs": Trace(
        "three jobs of 200, 60 and 15 tokens per answer, all at once, on KV blocks for a few rows",
        [
            Kind(f"uniform:{n - 5}:{n + 5}", {"prompt_lengths": "uniform:40:80"} | IDS, share,
                 LIMITS | {"user": f"job of {n}"})
            for n, share in {15: 0.5, 60: 0.3, 200: 0.2}.items()
        ],
        arrival="burst",
        settings=FEW_BLOCKS,
    ),
}  # fmt: skip


def requests_of(trace: Trace, rate: float, n: int, seed: int) -> list[Request]:
    """Return about n requests of all kinds by time, `rate` a second in all."""
    drawn: list[Request] = []
    for k, kind in enumerate(trace.kinds):
        data = Workload(kind.lengths, seed=1000 * seed + k, **kind.prompts)
        turns = int(kind.prompts.get("sessions", "1:").split(":")[0])
        arrival = trace.arrival.format(kind.share * rate / turns)
        of_kind = data.requests(round(kind.share * n), arrival, scaled=True)
        drawn += [request.model_copy(update=dict(kind.has)) for request in of_kind]
    # turns of conversations name others by their ids
    return drawn if len(trace.kinds) == 1 else virtual.by_time(drawn)


def words_of(policy: str) -> str:
    """Return the words of a variant of a policy, which may be an order, a victim or a mode."""
    name = policy.split()[0]
    kind = "" if name in MODES else f"dynamic --{'victim' if name in VICTIMS else 'order'} "
    return f"{kind}{policy}"


def serve(
    policy: str, trace: Trace, costs: str, requests: Sequence[Request]
) -> tuple[Outcomes, virtual.Seen]:
    """Serve a trace by a policy with vLLM's settings. policy: an order, a victim or a mode, with
    settings that it needs. Raises ConfigError for a policy that is none.
    """
    mode, *own = words_of(policy).split()
    shared = {name: value for name, value in VLLM.items() if meaningful(name, mode)}
    if "whole" in own:
        del shared["watermark"]
    flags = [f"{flag(name)} {value}" for name, value in {**shared, **trace.settings}.items()]
    words = " ".join([mode, *flags, *own])
    [variant] = parse_variants([f"policy={words}"]).values()
    settings = {"mode": variant.mode, **variant.flags}
    return virtual.served(settings, requests, costs=load(costs), stream=True)


@functools.cache
def capacity(name: str, costs: str) -> float:
    """Return the requests per second that vLLM's default completes while requests always wait."""
    burst = requests_of(TRACES[name], FAST, BURST, CAPACITY_SEED)
    outcomes, _ = serve(league.BASE, TRACES[name], costs, burst)
    return while_waiting(outcomes.answers.times_at_server)


def cases(n: int, costs: str, policies: str) -> list[dict[str, Any]]:
    """Return the cases, those of vLLM's default among them. policies: separated by commas; "ours"
    stands for OURS. file: first digits of a file's SHA-256, so that a changed one is run again.
    """
    files = {source.word: source.sha256 for source in SOURCES.values()}
    chosen = policies.replace("ours", ",".join(OURS)).split(",")
    names = dict.fromkeys([league.BASE, *chosen, *claims.against(chosen)])
    return [
        case | {"file": files.get(case["policy"].split()[0], "")}
        for case in grid(trace=TRACES, load=LOADS, policy=names, costs=[costs])(n)
        if case["trace"] not in ONCE or case["load"] == LOADS[-1]
    ]


def of_memory(seen: virtual.Seen) -> dict[str, float]:
    """Return what preemptions did: tokens computed again, in % of all, preemptions per request, and
    of the request that was preempted most.
    """
    interrupted = [inference.interruptions for inference in seen.inferences]
    again = sum(each.recomputed_tokens for each in interrupted)
    once = sum(len(each.prompt_ids) + len(each.tokens) - 1 for each in seen.inferences)
    counts = [each.preemptions for each in interrupted]
    return {
        "recomputed": 100 * again / (once + again),
        "preemptions": sum(counts) / len(counts),
        "most_preempted": max(counts),
    }


def of_prompts(seen: virtual.Seen) -> dict[str, float]:
    """Return the share of the time, in %, that iterations with prompts took, while rows that decode
    and prompts both waited.
    """
    spent = {True: 0.0, False: 0.0}
    for record in seen.records:
        iteration = record.iteration
        prompts = sum(not row.decodes for row in iteration.rows)
        both = iteration.running > prompts and (prompts or iteration.running > len(iteration.rows))
        if both or (iteration.waiting and iteration.running < ROWS):
            spent[prompts > 0] += record.seconds
    return {"prompt_share": 100 * spent[True] / max(1e-9, sum(spent.values()))}


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    """Return the measures of a trace, in ms and % of its requests."""
    trace = TRACES[case["trace"]]
    rate = case["load"] * capacity(case["trace"], case["costs"])
    requests = requests_of(trace, rate, n, seed)
    outcomes, seen = serve(case["policy"], trace, case["costs"], requests)
    answers = outcomes.answers
    queued, preempted, paused = map(answers.reported, ("queue_s", "preempted_s", "paused_s"))
    answered = np.flatnonzero(outcomes["answered"])
    good = meet(answers, traces.Trace.of(requests).limits_ms(answered, {})).sum()
    modest = np.array([request.user == "modest" for request in requests])
    values = {
        "ttft_ms": 1e3 * answers.ttft_s.mean(),
        "gap_ms": 1e3 * np.percentile(answers.gaps, 99),
        "good": 100 * good / len(requests),
        "wait_ms": 1e3 * (queued + preempted + paused).max(),
        "latency_ms": 1e3 * answers.e2e_s.mean(),
        "preempted": 100 * (preempted > 0).mean(),
        "unanswered": 100 * (1 - len(answers) / len(requests)),
    }
    if modest.any():
        values["modest_ms"] = 1e3 * outcomes.only(modest).answers.ttft_s.mean()
    if case["trace"] in MEMORY:
        values |= of_memory(seen)
    if case["trace"] == "jobs":
        values["makespan_s"] = float(outcomes.ended["ended_at"].max())
    prompts = np.array([len(request.ids) for request in requests])
    if len(set(prompts // 100)) > 1:
        short = outcomes.only(prompts <= np.median(prompts)).answers
        values["short_ms"] = 1e3 * short.ttft_s.mean()
    values |= of_prompts(seen) if case["trace"] == "starved" else {}
    return {name: float(f"{value:.5g}") for name, value in values.items()}


def page(cases: Cases) -> str:
    words = {name: trace.words for name, trace in TRACES.items()}
    return f"{claims.tables(cases)}\n\n{league.page(cases, words)}"


STUDY = Study(
    name="arena",
    title="The arena",
    question="Which policies are better than vLLM's default, by which measure, and on which "
    "traces?",
    workload=f"about {{n}} requests of each trace, at loads of {', '.join(map(str, LOADS))}, "
    f"{{seeds}} seeds, {ROWS} rows, virtual time with `--costs {{costs}}`",
    requests=120,
    cases=cases,
    bases=(f"policy={league.BASE}", "file="),
    run=run,
    measures={},
    text=page,
    tables=(),
    drawn=league.figure,
    figure="Each policy compared with vLLM's default, by question, trace and load",
    options={
        "costs": ("gpt2", "iteration times, as simulate.sh's"),
        "policies": ("ours", "separated by commas"),
    },
)
