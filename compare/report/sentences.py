"""What a report says in words of a run: whether it can be trusted, and what its numbers mean."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from client.machine import processor
from client.quoting import code, escape
from compare.runs import Run
from deploy.kinds import KINDS
from stats import CLIENT_LIMITED_MS


def sentences(run: Run) -> list[str]:
    """All that apply, the gravest first."""
    found = [
        simulated(run),
        partial(run),
        *failures(run),
        too_long(run.first["workload"], _errors(run)),
        *other_lengths(run),
        client_limited(run),
        busy(run.first),
    ]
    found += [sampled(run), identity(run), littles_law(run), seeds(run)]
    return [sentence for sentence in found if sentence]


def partial(run: Run) -> str | None:
    """What of the measuring that was asked for is missing, and why."""
    if not run.partial:
        return None
    reasons = dict.fromkeys(
        escape(summary["stopped"]) for summary in run.summaries if summary["stopped"]
    )
    parts = ["; ".join(reasons) or "interrupted before its end"]
    for name, results in run.variants.items():
        if results[-1]["partial"]:
            parts.append(f"{name} has {results[-1]['completed'] + results[-1]['failed']} requests")
    if missing := [name for name in run.first["asked"]["servers"] if name not in run.names]:
        parts.append(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    if run.missing_seeds:
        parts.append(
            f"seed {', '.join(map(str, run.missing_seeds))} of {len(run.first['asked']['seeds'])} "
            f"is missing or left out"
        )
    return f"**Partial**: {'; '.join(parts)}."


def failures(run: Run) -> list[str]:
    """Why requests failed, the three commonest reasons of each server."""
    found = []
    for name, results in run.variants.items():
        errors: dict[str, int] = {}
        for error, n in (item for result in results for item in result["errors"].items()):
            errors[error] = errors.get(error, 0) + n
        if errors:
            told = sorted(errors.items(), key=lambda item: -item[1])[:3]
            found.append(
                f"**Failed in {name}**: "
                + "; ".join(f"{n} × {escape(error.rstrip('.'))}" for error, n in told)
                + "."
            )
    return found


def _errors(run: Run) -> list[str]:
    return [error for results in run.variants.values() for r in results for error in r["errors"]]


def too_long(load: Mapping[str, Any], errors: Iterable[str]) -> str | None:
    """What helps where a server refused requests that the workload may have made too long.

    load: the workload, as a summary tells it.
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
    found = []
    for name, results in run.variants.items():
        if other := sum(result["other_length"] for result in results):
            of = sum(result["completed"] for result in results)
            found.append(f"**{name} computed another number of tokens than asked in {other} of "
                         f"{of} answers** (does it ignore "
                         "`ignore_eos`?): its latencies are of other work.")  # fmt: skip
    return found


def client_limited(run: Run) -> str | None:
    """Which servers' requests were sent late, and what their latency is from the schedule."""
    late = [
        name
        for name, results in run.variants.items()
        if any(result["client_limited"] for result in results)
    ]
    if not late:
        return None
    from_schedule = ", ".join(
        f"{name} {p99:.2f} s" for name in late if (p99 := _p99_from_schedule(run, name)) is not None
    )
    text = (
        f"**The client was late** in {', '.join(late)} (p99 of the schedule lag over "
        f"{CLIENT_LIMITED_MS:g} ms)"
    )
    return (
        f"{text}; from the schedule p99 latency is {from_schedule}."
        if from_schedule
        else f"{text}."
    )


def _p99_from_schedule(run: Run, name: str) -> float | None:
    known = [
        p99
        for result in run.variants[name]
        if (p99 := result["p99_e2el_from_schedule_ms"]) is not None
    ]
    return statistics.mean(known) / 1e3 if known else None


def busy(summary: Mapping[str, Any]) -> str | None:
    """That a machine was not left alone; virtual time does not care."""
    percent = summary["hardware"]["busy_before_percent"]
    return (
        f"Other processes used {percent:.0f}% of the processor before the run: its numbers are "
        f"suspect."
        if percent > 20 and not summary.get("simulated")
        else None
    )


def simulated(run: Run) -> str | None:
    """That nothing of a run was measured, and what its times come from."""
    told = run.first.get("simulated")  # earlier versions knew none
    if not told:
        return None
    said = (
        "**Simulated**: no server ran. The server's own scheduler served the trace in virtual "
        f"time, and each iteration took {costs_of(told)}."
    )
    return f"{said} Each variant: {escape(told['layout'])}." if told["layout"] else said


def costs_of(simulated: Mapping[str, Any]) -> str:
    """Where the times of a simulation come from, in words."""
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
    """Which numbers are of a sample of the requests."""
    if not (n := sample(run)):
        return None
    return (
        f"Gaps between tokens, points and distributions are of a sample of {n:,} requests, the "
        f"same of each variant; all else is of all."
    )


def sample(run: Run) -> int:
    """How many requests of each seed are kept, where that is not all; else 0."""
    found = [result.get("sample") or 0 for mine in run.variants.values() for result in mine]
    return max(found)  # earlier versions drew none


def identity(run: Run) -> str | None:
    """Whether the variants gave the same texts; they must for greedy answers in float32."""
    found = [summary["identical_outputs"] for summary in run.summaries]
    n, identical = (sum(same[key] for same in found) for key in ("requests", "identical"))
    if len([name for name in run.names if name not in run.first["also"]]) < 2 or not n:
        return None
    if n == identical:
        return f"All {n} requests that every variant answered got the same text in each."
    parted = sorted(share for same in found for share in same["parted_after"])
    sentence = (
        f"{identical} of {n} requests ({100 * identical / n:.0f}%) that every variant answered got "
        f"the same text in each; the "
        f"texts of the others part after {100 * parted[0]:.0f} to {100 * parted[-1]:.0f}% of their "
        f"length "
        f"(median {100 * statistics.median(parted):.0f}%)."
    )
    if run.first["config"]["dtype"] == "bfloat16":
        sentence += (
            " bfloat16 keeps 8 bits, so two tokens often have equal logits, and the shape "
            "of a batch decides between them."
        )
    return sentence


def littles_law(run: Run) -> str | None:
    """How far L, as the client counts it, is from λ · W with the server's W."""
    laws = [
        (name, law)
        for name, results in run.variants.items()
        for result in results
        if (law := result["littles_law"])
    ]
    if not laws:
        return None
    apart, name = max(
        ((law["in_flight"] / law["rate_x_latency"] - 1, name) for name, law in laws),
        key=lambda found: abs(found[0]),
    )
    return (
        "Little's law: requests in flight, counted by the client at random instants, and answered "
        "a second × mean latency at "
        f"the server differ by {100 * apart:+.1f}% at most ({name}).".replace("-", "−")
    )


def seeds(run: Run) -> str:
    n = len(run.summaries)
    if n == 1:
        return "One seed: no interval is claimed; `--repeats 5` gives one."
    return (
        f"Means over {n} seeds ± half of a 95% t interval. Variants ran the same traces, so their "
        f"differences are paired by seed; "
        "where a difference's interval spans zero, no difference is shown. (Of twenty differences "
        "that are none, one is shown.)"
    )


def deployed(summary: Mapping[str, Any]) -> str | None:
    """The replicas of each variant in words, and what is before them; None of a server alone."""
    if not (told := summary.get("deployment")):  # earlier versions knew none
        return None
    n, kind = told["replicas"], KINDS[told["front"]]
    return f"{n} replica{'s' * (n != 1)} behind {kind.in_words}, router {told['router']}"


def conditions(run: Run) -> str:
    """What latencies are of, and where the servers ran."""
    summary = run.first
    answers = (
        "streams"
        if summary["stream"]
        else "plain answers: a request-level batch is answered as a whole"
    )
    if not summary["started_here"]:
        n = summary.get("sharing", 1)  # earlier versions knew one
        ran = "The server" if n == 1 else f"The {n} servers, which got the requests in turn,"
        return (
            f"Latencies are of {answers}. {ran} ran apart; hardware and commit below are "
            f"the client's."
        )
    if summary.get("simulated"):
        return f"Latencies are of {answers}."
    on = deployed(summary) or "a server of its own"
    text = (
        f"Latencies are of {answers}. Servers ran one after another on the same machine, each on "
        f"{on}"
    )
    if summary["also"]:
        text += f"; {', '.join(summary['also'])} ran where it was"
    return f"{text}."
