"""What authors of proposals claim, and whether it holds on the arena's traces.

A claim is a ratio of one measure to another policy's, on one trace: which one, and how much is
enough, stands here before anything is run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from compare.analysis import Estimate
from compare.report.tables import NONE, formatted, markdown
from lab.studies.league import BASE, QUESTIONS, Cell, asked, cells_of, short
from lab.studies.study import Case, Cases, only, ratio

FIRST, WHOLE = "dynamic --prefill first", "dynamic --kv-reservation whole"
LOAD = 1.1
PROPOSALS = "lab/proposals/"
ONE_AT_ONCE = f"{PROPOSALS}prompts_at_once.py:PromptsAtOnce --prompts-at-once 1"
# whether a ratio is at most what is claimed, by its 95% interval
HOLDS, IN_PART, NOT_HERE, CANNOT_TELL = (
    "holds", "holds in part", "does not hold here", "cannot tell",
)  # fmt: skip
RULE = (
    f"*{HOLDS}*: the whole interval reaches what is claimed. *{IN_PART}*: it does not, but all of "
    f"it is below 1. *{NOT_HERE}*: no part of it reaches the claim. *{CANNOT_TELL}*: it holds both "
    "the claim and 1."
)


class Claim(NamedTuple):
    """A claim of a proposal. enough: the ratio of the measure to that of `against`, at most."""

    policy: str
    source: str
    about: str  # who goes first, how prompts are cut, or who is preempted
    words: str
    measure: str
    trace: str
    enough: float
    against: str = BASE


WHO, CUT, VICTIM = "who goes first", "how prompts are cut", "who is preempted"
OF_FILE = "{}{}.py:{}".format
EFFECTS = ["helps most", "costs most", f"longest wait at {LOAD:g}"]
CLAIMS = [
    Claim("least_computed", "vLLM 54644, 53723, 38080", VICTIM,
          "half of the recomputation is saved", "recomputed", "oversubscribed", 0.5),
    Claim(OF_FILE(PROPOSALS, "cost_aware_victim", "CostAwareVictim"), "vLLM 56897", VICTIM,
          "less recomputation (5%)", "recomputed", "oversubscribed", 0.95),
    Claim(OF_FILE(PROPOSALS, "most_left_victim", "MostLeftVictim"), "vLLM 36980", VICTIM,
          "who is about to end is not evicted: mean latency (5%)", "latency_ms", "oversubscribed",
          0.95),
    Claim(OF_FILE(PROPOSALS, "least_preempted_victim", "LeastPreemptedVictim"), "vLLM 51574",
          VICTIM, "nobody is preempted for ever: most preemptions of a request (5%)",
          "most_preempted", "oversubscribed", 0.95),
    Claim(WHOLE, "TensorRT-LLM 16827", VICTIM,
          "without eviction makespan is shorter, by 1 ÷ 1.68", "makespan_s", "jobs", 0.594),
    Claim(OF_FILE(PROPOSALS, "paired_lengths", "PairedLengths"), "vLLM 55265", WHO,
          "makespan −7.3% where memory bounds the batch", "makespan_s", "jobs", 0.927),
    Claim(OF_FILE(PROPOSALS, "longest_job", "LongestJob"), "vllm-ascend 12240", WHO,
          "several jobs end sooner (5%)", "makespan_s", "jobs", 0.95),
    Claim(OF_FILE(PROPOSALS, "preflow", "Preflow"), "vllm-ascend 16360", WHO,
          "first tokens of short prompts (5%)", "short_ms", "long-prompts", 0.95),
    Claim(OF_FILE(PROPOSALS, "laps", "Laps"), "vllm-ascend 10285", WHO,
          "first tokens of short prompts (5%)", "short_ms", "long-prompts", 0.95),
    Claim(OF_FILE(PROPOSALS, "decode_after_prompts", "DecodeAfterPrompts"),
          "SGLang 32775, 34058", CUT, "rows that decode do not starve: half the p99 gap", "gap_ms",
          "starved", 0.5, FIRST),
    Claim(OF_FILE(PROPOSALS, "pause_new_prompts", "PauseNewPrompts"), "SGLang 35017", CUT,
          "rows that decode do not starve: half the p99 gap", "gap_ms", "starved", 0.5, FIRST),
    Claim(OF_FILE(PROPOSALS, "prompts_at_once", "PromptsAtOnce"), "SGLang 34623, vLLM 55256", CUT,
          "a long prompt lets others start: first tokens of short prompts (5%)", "short_ms",
          "starved", 0.95, ONE_AT_ONCE),
    Claim(OF_FILE(PROPOSALS, "fair_prefill", "FairPrefill"), "local-inference-lab 664", CUT,
          "prompts have 0.4 of the time (to 0.02, of prompts first's 1)", "prompt_share",
          "starved", 0.42, FIRST),
]  # fmt: skip


def verdict(found: Estimate, enough: float) -> str:
    """Return whether a ratio is at most what is enough, which is below 1."""
    half = found.half or 0.0
    best, worst = found.mean - half, found.mean + half
    if worst <= enough:
        return HOLDS
    if worst < 1:
        return IN_PART
    return NOT_HERE if best > enough else CANNOT_TELL


def judged(claim: Claim, policy: str, cases: Cases) -> tuple[str, str] | None:
    """Return a claim's verdict for a policy, and the ratio; None if its cases were not run."""
    here = [case for case in cases if case["trace"] == claim.trace and case["load"] == LOAD]
    of = {case["policy"]: case for case in here}
    if policy not in of or claim.against not in of:
        return None
    found = ratio(of[claim.against], of[policy], claim.measure)
    return verdict(found, claim.enough), formatted(found, "{:.2f}")


def effects(policy: str, cases: Cases) -> list[str]:
    """Return where a policy helps most, what it costs most, and its longest wait: each beside
    vLLM's default.
    """
    cells: list[tuple[float, str, Cell]] = []
    for question in QUESTIONS:
        for load in sorted({case["load"] for case in asked(question, cases)}):
            at_load = only(asked(question, cases), {"load": load})
            for trace, cell in cells_of(question, at_load).get(policy, {}).items():
                where = f"{question.title.lower()} on `{trace}` at {load:g}: {cell.text}"
                cells.append((cell.gain / question.full, where, cell))
    shown = [each for each in cells if each[2].verdict]
    best = max((e for e in shown if e[2].verdict > 0), default=None, key=lambda e: e[0])
    worst = min((e for e in shown if e[2].verdict < 0), default=None, key=lambda e: e[0])
    waits = [ratio(base, case, "wait_ms").mean for base, case in _pairs(policy, cases)]
    longest = f"{math.exp(sum(map(math.log, waits)) / len(waits)):.2f}" if waits else NONE
    return [best[1] if best else NONE, worst[1] if worst else NONE, longest]


def _pairs(policy: str, cases: Cases) -> list[tuple[Case, Case]]:
    at_load = only(cases, {"load": LOAD})
    bases = {case["trace"]: case for case in only(at_load, {"policy": BASE})}
    return [
        (bases[case["trace"]], case)
        for case in only(at_load, {"policy": policy})
        if min(seed["wait_ms"] for seed in bases[case["trace"]]["seeds"]) > 0
    ]


def tables(cases: Cases) -> str:
    """Return a table of verdicts for each part of the scheduler, and one of the policies without a
    claim that can be judged here.
    """
    policies = [each for each in dict.fromkeys(case["policy"] for case in cases) if each != BASE]
    parts: dict[str, list[list[str]]] = {}
    left = dict.fromkeys(policies)
    for claim in CLAIMS:
        for policy in policies:
            tried = policy.startswith(f"{claim.policy} ") and policy != claim.against
            if policy != claim.policy and not tried:
                continue
            if found := judged(claim, policy, cases):
                left.pop(policy, None)
                line = [f"`{short(policy)}` ({claim.source})", claim.words, *found]
                parts.setdefault(claim.about, []).append([*line, *effects(policy, cases)])
    shown = ["## What is claimed, and what was found", RULE]
    head = ["proposal", "claim", "verdict", "ratio", *EFFECTS]
    for about, lines in parts.items():
        shown += [f"### {about[0].upper()}{about[1:]}", markdown([head, *lines], left=3)]
    rest = {f"`{short(policy)}`": effects(policy, cases) for policy in left}
    lines = [[policy, *row] for policy, row in rest.items() if {*row[:2]} != {NONE}]
    if lines:
        shown += ["### Without a claim that these traces can show"]
        shown += [markdown([["", *EFFECTS], *lines])]
    alike = ", ".join(policy for policy, row in rest.items() if {*row[:2]} == {NONE})
    return "\n\n".join([*shown, *([f"No difference shown anywhere: {alike}."] if alike else [])])


def against(policies: Sequence[str]) -> list[str]:
    """Return what must run besides, so that the claims of these policies can be judged."""
    return [claim.against for claim in CLAIMS if claim.policy in policies]
