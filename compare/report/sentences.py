"""Sentences of a report: whether a run can be trusted, and what its numbers mean."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from compare.machine import processor
from compare.quoting import code, escape
from compare.runs import Run
from compare.summary import CLIENT_LIMITED_MS
from deploy.kinds import KINDS


def sentences(run: Run) -> list[str]:
    """Sentences that apply to a run, the gravest first."""
    errors = [error for results in run.variants.values() for r in results for error in r["errors"]]
    applying = [
        simulated(run),
        partial(run),
        *failures(run),
        too_long(run.first["workload"], errors),
        *other_lengths(run),
        client_limited(run),
        busy(run.first),
        sampled(run),
        identity(run),
        littles_law(run),
        seeds(run),
    ]
    return [sentence for sentence in applying if sentence]


def partial(run: Run) -> str | None:
    """Missing parts of the measuring that was asked for, and why."""
    if not run.partial:
        return None
    reasons = dict.fromkeys(escape(s["stopped"]) for s in run.summaries if s["stopped"])
    parts = ["; ".join(reasons) or "interrupted before its end"]
    for name, results in run.variants.items():
        if results[-1]["partial"]:
            parts.append(f"{name} has {results[-1]['completed'] + results[-1]['failed']} requests")
    asked = run.first["asked"]
    if missing := [name for name in asked["servers"] if name not in run.names]:
        parts.append(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    if run.missing_seeds:
        numbers = ", ".join(map(str, run.missing_seeds))
        parts.append(f"seed {numbers} of {len(asked['seeds'])} is missing or left out")
    return f"**Partial**: {'; '.join(parts)}."


def failures(run: Run) -> list[str]:
    """Reasons why requests failed, the three commonest of each server."""
    reasons_by_server = []
    for name, results in run.variants.items():
        errors: Counter[str] = Counter()
        for result in results:
            errors.update(result["errors"])
        reasons = [f"{n} × {escape(e.rstrip('.'))}" for e, n in errors.most_common(3)]
        if reasons:
            reasons_by_server.append(f"**Failed in {name}**: {'; '.join(reasons)}.")
    return reasons_by_server


def too_long(load: Mapping[str, Any], errors: Iterable[str]) -> str | None:
    """A remedy where a server refused requests that the workload may have made too long.

    load: the workload of a summary.
    """
    if not any(error.startswith("400 ") for error in errors):
        return None
    if scale := load.get("scale"):
        return (
            f"Each block of the trace became {scale} tokens: if its requests are longer than the "
            f"server's context, a smaller --scale makes them fit."
        )
    if load.get("conversations"):
        return (
            "Each later turn repeats the conversation so far: if that outgrows the server's "
            "context, fewer turns or shorter --lengths make it fit."
        )
    return None


def other_lengths(run: Run) -> list[str]:
    """Servers that computed other tokens than asked: their latencies are of other work."""
    warnings = []
    for name, results in run.variants.items():
        other, all_ = (sum(r[key] for r in results) for key in ("other_length", "completed"))
        if other:
            warnings.append(
                f"**{name} computed another number of tokens than asked in {other} of {all_} "
                f"answers** (does it ignore `ignore_eos`?): its latencies are of other work."
            )
    return warnings


def client_limited(run: Run) -> str | None:
    """Servers whose requests were sent late, and their latency from the schedule."""
    late, latencies = [], []
    for name, results in run.variants.items():
        if any(result["client_limited"] for result in results):
            late.append(name)
            p99 = [ms for r in results if (ms := r["p99_e2el_from_schedule_ms"]) is not None]
            latencies += [f"{name} {statistics.mean(p99) / 1e3:.2f} s"] if p99 else []
    if not late:
        return None
    schedule = f"; from the schedule p99 latency is {', '.join(latencies)}" if latencies else ""
    return (
        f"**The client was late** in {', '.join(late)} (p99 of the schedule lag over "
        f"{CLIENT_LIMITED_MS:g} ms){schedule}."
    )


def busy(summary: Mapping[str, Any]) -> str | None:
    """A warning of a machine that was not left alone; virtual time does not care."""
    percent = summary["hardware"]["busy_before_percent"]
    if percent <= 20 or summary.get("simulated"):
        return None
    return (
        f"Other processes used {percent:.0f}% of the processor before the run: its numbers are "
        f"suspect."
    )


def simulated(run: Run) -> str | None:
    """A remark that nothing of a run was measured, and the source of its times."""
    facts = run.first.get("simulated")
    if not facts:
        return None
    text = (
        "**Simulated**: no server ran. The server's own scheduler served the trace in virtual "
        f"time, and each iteration took {costs_of(facts)}."
    )
    return f"{text} Each variant: {escape(facts['layout'])}." if facts["layout"] else text


def costs_of(simulated: Mapping[str, Any]) -> str:
    """The source of a simulation's times, in words."""
    if not (hardware := simulated["hardware"]):
        if simulated["costs"] == "fake":
            return "what the fake engine's stated line says, with nothing around it"
        return f"what the costs {code(simulated['costs'])} state"
    return (
        f"what the costs {code(simulated['costs'])} say, fitted on "
        f"{escape(processor(hardware, simulated['engine']))} (commit {simulated['commit']}, "
        f"{simulated['date'][:10]})"
    )


def sampled(run: Run) -> str | None:
    """A remark on numbers that are of a sample of the requests."""
    if not (n := sample(run)):
        return None
    return (
        f"Gaps between tokens, points and distributions are of a sample of {n:,} requests, the "
        f"same of each variant; all else is of all."
    )


def sample(run: Run) -> int:
    """Requests of each seed that are kept, where that is not all; else 0."""
    return max(r.get("sample") or 0 for results in run.variants.values() for r in results)


def identity(run: Run) -> str | None:
    """Share of requests with the same text in all variants; all, for greedy answers in float32."""
    texts = [summary["identical_outputs"] for summary in run.summaries]
    n, identical = (sum(same[key] for same in texts) for key in ("requests", "identical"))
    if len([name for name in run.names if name not in run.first["also"]]) < 2 or not n:
        return None
    if n == identical:
        return f"All {n} requests that every variant answered got the same text in each."
    parted = sorted(100 * share for same in texts for share in same["parted_after"])
    sentence = (
        f"{identical} of {n} requests ({100 * identical / n:.0f}%) that every variant answered got "
        f"the same text in each; the texts of the others part after {parted[0]:.0f} to "
        f"{parted[-1]:.0f}% of their length (median {statistics.median(parted):.0f}%)."
    )
    if run.first["config"]["dtype"] == "bfloat16":
        sentence += (
            " bfloat16 keeps 8 bits, so two tokens often have equal logits, and the shape "
            "of a batch decides between them."
        )
    return sentence


def littles_law(run: Run) -> str | None:
    """The largest difference between L, as the client counts it, and λ · W with the server's W."""
    differences = [
        (100 * (law["in_flight"] / law["rate_x_latency"] - 1), name)
        for name, results in run.variants.items()
        for result in results
        if (law := result["littles_law"])
    ]
    if not differences:
        return None
    percent, name = max(differences, key=lambda difference: abs(difference[0]))
    return (
        "Little's law: requests in flight, counted by the client at random instants, and answered "
        "a second × mean latency at "
        f"the server differ by {percent:+.1f}% at most ({name}).".replace("-", "−")
    )


def seeds(run: Run) -> str:
    n = len(run.summaries)
    if n == 1:
        return "One seed: no interval is claimed; `--repeats 5` gives one."
    return (
        f"Means over {n} seeds ± half of a 95% t interval. Variants ran the same traces, so their "
        f"differences are paired by seed; where a difference's interval spans zero, no difference "
        f"is shown. (Of twenty differences that are none, one is shown.)"
    )


def deployed(summary: Mapping[str, Any]) -> str | None:
    """The replicas of each variant in words, and what is before them; None of a server alone."""
    if not (deployment := summary.get("deployment")):
        return None
    n, kind = deployment["replicas"], KINDS[deployment["front"]]
    return f"{n} replica{'s' * (n != 1)} behind {kind.in_words}, router {deployment['router']}"


def conditions(run: Run) -> str:
    """Conditions of a run: kind of answers, and place of the servers."""
    summary, n = run.first, run.first.get("sharing", 1)
    text = "Latencies are of streams."
    if not summary["stream"]:
        text = "Latencies are of plain answers: a request-level batch is answered as a whole."
    if not summary["started_here"]:
        ran = "The server" if n == 1 else f"The {n} servers, which got the requests in turn,"
        return f"{text} {ran} ran apart; hardware and commit below are the client's."
    if summary.get("simulated"):
        return text
    on = deployed(summary) or "a server of its own"
    text += f" Servers ran one after another on the same machine, each on {on}"
    if summary["also"]:
        text += f"; {', '.join(summary['also'])} ran where it was"
    return f"{text}."
