"""Sentences of a report: can a run be trusted, what do its numbers mean, and how was it made?"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter

from client.analysis import APART, breaks_littles_law, overload, overload_unknown, overloaded
from client.bounds import cut_in_words, warm_up_in_words
from client.groups import described
from client.machine import processor
from client.quoting import code, escape, unescape
from client.results import KEYS, Json, Point, Result, share
from client.runs import SavedRun, differing
from client.summary import CLIENT_LIMITED_MS, resent_in_words
from client.wire import IN_WORDS
from compare import calibrate
from compare.report.foreseen import near_capacity
from compare.report.tables import cell_of
from compare.sweep import in_words
from config.settings import NOT_SIMULATED, varying_parts
from scheduling.policies import MODES

STATUS = re.compile(r"^(\d{3})(?= )")  # HTTP's status, at the beginning of an error
FEWEST_ANSWERED = 20  # requests of a server; Little's law holds in the long run


def sentences(run: SavedRun) -> list[str]:
    """Sentences that apply to a run, the gravest first: those in bold."""
    applying = [
        *near_capacity(run), simulated(run), partial(run), cut(run), *failures(run),
        *overloads(run), *other_lengths(run), client_limited(run), busy(run.first),
        resent_in_words(run.variants),
        warm_up_in_words(run.warm_up) if run.warm_up else None, sampled(run),
        identity(run), littles_law(run), seeds(run),
    ]  # fmt: skip
    return sorted(filter(None, applying), key=lambda sentence: not sentence.startswith("**"))


def plain(sentence: str) -> str:
    """Return a sentence for the terminal: without Markdown's marks."""
    return unescape(re.sub(r"(?<!\\)\*\*([^*`]+)\*\*", r"\1", sentence))


def partial(run: SavedRun) -> str | None:
    """Missing parts of the measuring that was asked for, and why."""
    if not run.partial:
        return None
    reasons = dict.fromkeys(escape(s["stopped"]) for s in run.summaries if s["stopped"])
    parts = ["; ".join(reasons) or "interrupted before its end"]
    for name, results in run.variants.items():
        if results[-1].partial:
            parts.append(f"{name} has {results[-1].ended} requests")
    asked = run.first["asked"]
    if missing := [name for name in asked["servers"] if name not in run.names]:
        parts.append(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    if run.missing_seeds:
        numbers = ", ".join(map(str, run.missing_seeds))
        parts.append(f"seed {numbers} of {len(asked['seeds'])} is missing or left out")
    return f"**Partial**: {'; '.join(parts)}."


def cut(run: SavedRun) -> str | None:
    """Return which replays ended at a bound, and what that does to their numbers."""
    each = [text for name, results in run.variants.items() if (text := cut_in_words(name, results))]
    if not each:
        return None
    return (
        f"**Cut**: {'; '.join(each)}. No measure counts these, though the slowest may be among "
        "them, so variants may differ by the requests that they answered."
    )


def failures(run: SavedRun) -> list[str]:
    """Reasons why requests failed, the three commonest of each server."""
    failed = []
    for name, results in run.variants.items():
        errors = sum((Counter(result.errors) for result in results), Counter[str]())
        commonest = ((n, STATUS.sub(r"\1:", e.rstrip("."))) for e, n in errors.most_common(3))
        if reasons := [f"{n:,} × {escape(reason)}" for n, reason in commonest]:
            failed.append(f"**Failed in {name}**: {'; '.join(reasons)}.")
    return failed


def overloads(run: SavedRun) -> list[str]:
    """Return what each overloaded server's numbers mean, and of which that is not known."""
    found = {name: overload(results) for name, results in run.variants.items()}
    said = [f"**{name}** was {clause}." for name, clause in found.items() if clause]
    return [*said, *filter(None, [overload_unknown(run.variants)])]


def other_lengths(run: SavedRun) -> list[str]:
    """Return a warning for each server that computed more or fewer tokens than were requested."""
    warnings = []
    for name, results in run.variants.items():
        other, completed = (
            sum(r.number(key) for r in results) for key in ("other_length", "completed")
        )
        if other:
            warnings.append(
                f"**{name} computed more or fewer tokens than requested in {other} of {completed} "
                f"answers** (does it ignore `ignore_eos`?): its latencies cannot be compared."
            )
    return warnings


def client_limited(run: SavedRun) -> str | None:
    """Servers whose requests were sent late, and their latency from the schedule."""
    late = []
    for name, results in run.variants.items():
        if any(result.client_limited for result in results):
            p99 = cell_of(KEYS["p99_e2el_from_schedule_ms"], results)
            late.append(f"{name} ({p99} s)")
    if not late:
        return None
    return (
        f"**The client was late**: at least one in a hundred of its sends lagged over "
        f"{CLIENT_LIMITED_MS:g} ms. Measure again on an idle machine or at a lower rate, or go by "
        f"p99 latency from the schedule: {', '.join(late)}."
    )


def busy(summary: Json) -> str | None:
    """Return a warning if other processes kept the machine busy, unless the run was simulated."""
    percent = summary["hardware"]["busy_before_percent"]
    if percent <= 20 or summary.get("simulated"):
        return None
    used = f"Other processes used {share(percent)}% of the processor before the run"
    return f"{used}: its numbers are suspect."


# what the study `fidelity` compares
ERRORS = {"capacity": "capacity", "p50": "median latency", "p99": "p99 of latency"}


def simulated(run: SavedRun) -> str | None:
    """Return a remark that the run was simulated, and where its times come from."""
    if not (facts := run.first.get("simulated")):
        return None
    costs, held = f"what the costs {code(facts['costs'])} say", ""
    if recording := facts.get("recording"):
        costs += f", fitted on {escape(recording)}"
    elif hardware := facts["hardware"]:
        engine = escape(processor(hardware, facts["engine"]))
        costs += f", fitted on {engine} (commit {facts['commit']}, {facts['date'][:10]})"
        held = " These costs were not held against real servers."
    elif estimate := facts.get("estimate"):
        costs += f": no machine was measured, and these are {escape(estimate)}"
    if errors := facts.get("fidelity"):
        off = ", ".join(f"{name} by {errors[k]:g}%" for k, name in ERRORS.items() if k in errors)
        held = f" Beside real servers these costs were off on average: {off} ({errors['page']})."
    layout = f" Each variant: {escape(facts['layout'])}." if facts["layout"] else ""
    doubts = "".join(f"**{escape(remark)}** " for remark in facts.get("remarks", ()))
    return (
        f"{doubts}**Simulated**: no server ran. The server's own scheduler served the trace in "
        f"virtual time, and each iteration took {costs}.{held}{layout}"
    )


def sampled(run: SavedRun) -> str | None:
    """Return a remark on the numbers that come from a sample of the requests."""
    if not (n := sample(run)):
        return None
    return (
        f"Gaps between tokens, points and distributions come from a sample of {n:,} requests, the "
        f"same in each variant; all other numbers count every request."
    )


def sample(run: SavedRun) -> int:
    """Requests of each seed that are kept, where that is not all; else 0."""
    return max(r.sample or 0 for results in run.variants.values() for r in results)


def identity(run: SavedRun) -> str | None:
    """Share of requests with the same text in all variants: all, but with `varying_parts`. None
    where texts show nothing: the fake model's are no model's.
    """
    if len(run.names) - len(run.first["also"]) < 2 or run.first["config"].get("model") == "fake":
        return None
    texts = [summary["identical_outputs"] for summary in run.summaries]
    n, identical = (sum(same[key] for same in texts) for key in ("requests", "identical"))
    if not n:
        return None
    if n == identical:
        return f"All {n:,} requests that every variant answered got the same text in each."
    parted = sorted(100 * part for same in texts for part in same["parted_after"])
    configs = (result.config for seed in run.results for result in seed.values())
    why = next(filter(None, map(varying_parts, configs)), None)
    return (
        f"{identical:,} of {n:,} requests ({share(100 * identical / n)}%) that every variant "
        f"answered got the same text in each; the other texts begin to differ after "
        f"{share(parted[0])} to {share(parted[-1])}% of their length "
        f"(median {share(statistics.median(parted))}%)." + (f" Why: {why}." if why else "")
    )


def littles_law(run: SavedRun) -> str | None:
    """Whether requests in flight, as the client counted them, fit the server's latencies."""
    judged = [
        (100 * (law["in_flight"] / law["rate_x_latency"] - 1), breaks_littles_law(result), name)
        for name, results in run.variants.items()
        for result in results
        if (law := result.littles_law) and result.completed >= FEWEST_ANSWERED
    ]
    if not judged:
        return None
    broken = [each for each in judged if each[1]]
    percent, _, name = max(broken or judged, key=lambda each: abs(each[0]))
    by = f"{percent:+.1f}".replace("-", "−")
    off = (
        f"requests that this client counted in flight are off by {by}% at most ({name}) from what "
        "the server's latencies say."
    )
    if not broken:
        why = " HTTP and chance can explain as much." if abs(percent) > 100 * APART else ""
        return f"Little's law: passed. The {off}{why}"
    where = ", ".join(dict.fromkeys(name for *_, name in broken))
    return (
        f"**Little's law failed** in {where}: the {off} One of the two is wrong, so trust neither: "
        "measure again on an idle machine, or with the client on another one."
    )


def seeds(run: SavedRun) -> str:
    n = len(run.summaries)
    if n == 1:
        return "One seed: no interval is claimed; `--repeats 5` gives one."
    return (
        f"Means over {n} seeds; ± in a report is half of a 95% t interval. Variants ran the same "
        f"traces, so their differences are paired by seed; where a difference's interval "
        f"spans zero, no difference is shown. (Where there is no difference, chance shows "
        f"one in twenty cases.)"
    )


def deployed(summary: Json) -> str | None:
    """Return the replicas of each variant in words; None for single servers."""
    if not (deployment := summary.get("deployment")):
        return None
    n, where = deployment["replicas"], "on Ray Serve"
    if deployment.get("front") == "proxy":  # in runs until 2026-11-27
        where = "behind HAProxy"
    return f"{n} replica{'s' * (n != 1)} {where}, router {deployment['router']}"


def conditions(run: SavedRun) -> str:
    """Conditions of a run: kind of answers, and place of the servers."""
    summary = run.first
    text = "Latencies were measured on streamed answers."
    if not summary["stream"]:
        modes = [MODES.get(r.config["mode"]) for r in run.results[0].values() if r.config]
        whole = any(mode and mode.request_level for mode in modes)
        why = ": a request-level batch is answered as a whole" if whole else ""
        text = f"Answers were not streamed{why}."
    if not summary["started_here"]:
        return f"{text} The server ran apart; hardware and commit below are the client's."
    if summary.get("simulated"):
        return text
    on = deployed(summary) or "a server of its own"
    text += f" Variants ran one after another on the same machine, each on {on}"
    if summary["also"]:
        text += f"; {', '.join(summary['also'])} ran already"
    return f"{text}."


# ---- how it was made

# facts of a workload
SHOWN = "lengths prompt_lengths prompts prefixes sessions priorities slo_mix adapters scale_tokens"


def marked(run: SavedRun) -> str:
    """Return the remark that follows the names of a simulated run."""
    if not (facts := run.first.get("simulated")):
        return ""
    return " (simulated, estimated)" if facts.get("estimate") else " (simulated)"


def facts(run: SavedRun) -> list[str]:
    """Return workload, settings, hardware, client, commit, date and command of a run."""
    summary, simulated = run.first, run.first.get("simulated")
    load, hardware, config = summary["workload"], summary["hardware"], summary["config"]
    given = [f"{name} {code(str(load[name]))}" for name in SHOWN.split() if load.get(name)]
    given.append(f"arrival {code(load['arrival'])}")
    if capacity := summary["capacity"]:
        given[-1] += (
            f": {capacity['load']:g} of the {capacity['output_throughput']:,.0f} tok/s that a "
            f"burst of {capacity['requests']} requests reached in {code(capacity['of'])} while "
            f"every row was busy"
        )
    seeds = ", ".join(str(s["seed"]) for s in run.summaries)
    where = "`trace.jsonl`" if load.get("saved", True) else "not saved: its flags draw it again"
    lines = [f"workload: {escape(described(load))}; {', '.join(given)}; seed {seeds} ({where})"]
    if config:
        apart = differing(run.results[0])
        left_out = {key for settings in apart.values() for key in settings}
        left_out |= NOT_SIMULATED if simulated else set()
        common = {k: v for k, v in config.items() if k not in left_out and v is not None}
        lines.append(f"settings: {_settings(common)}")
        for name, settings in apart.items():
            mode = settings["mode"]
            own = _settings({k: v for k, v in settings.items() if k != "mode"})
            if own or name != mode:
                lines.append(f"{name}: {', '.join(filter(None, (mode, own)))}")
    for name, url in summary["also"].items():
        asked = summary.get("asked_as", {}).get(name, {})  # older runs have none
        extra = asked.get("extra_body")
        lines.append(
            f"{name}: {escape(url)}, through OpenAI's {asked.get('path', 'API')} as a stream"
            + (f" with {code(json.dumps(extra))}" if extra else "")
            + (f" ({IN_WORDS})" if asked.get("in_words") else "")
            + "; its engine and hardware are not known here"
        )
    whose = "hardware" if summary["started_here"] else "the client's hardware"
    gpu = f"{escape(hardware['gpu'])}; " if hardware.get("gpu") else ""
    lines.append(
        f"{'simulated on' if simulated else whose}: {gpu}{escape(hardware['cpu'])}, "
        f"{hardware['cores']} cores, {hardware['memory_gb']:.0f} GB; {hardware['system']}; "
        f"Python {hardware['python']}, torch {hardware['torch']}"
    )
    if not simulated:
        lines.append(f"client: {calibrate.sentence(summary['calibration'])}")
    return [*lines, f"commit {summary['commit']}, {summary['date']}, {code(summary['command'])}"]


def setting(value: object) -> str:
    """Return a setting's value as a report shows it."""
    return "none" if value in ("", None, [], {}) else escape(value)


def _settings(settings: Json) -> str:
    return ", ".join(f"{name} {setting(value)}" for name, value in settings.items())


# ---- while it is measured


def point_line(name: str, point: Point) -> str:
    """A point of a sweep in a line, as it is measured."""
    latency, part = point.normalized_latency.p50, point.attainment
    parts = [
        f"{name:>8} at {point.rate:>6g} requests/s: {point.output_throughput:>7,.0f} tok/s",
        "no answer" if latency is None else f"{latency:,.1f} ms per token",
    ]
    if part is not None:
        parts.append(f"{share(100 * part)}% within limits")
    return f"{', '.join(parts)}; {in_words(point)}"


def result_line(name: str, result: Result) -> str:
    """A measurement in a line, as it ends."""
    ended = "interrupted" if result.partial else f"after {result.wall_clock_s:.1f} s"
    if result.cut:
        ended += f", cut at {result.cut['at']}"
    ended += ", overloaded" * bool(overloaded(result))
    return (
        f"{name:>8}: {result.completed:,} answered, {result.failed:,} failed, "
        f"{result.output_throughput:,.0f} tok/s, {ended}"
    )
