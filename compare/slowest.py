"""Why were these requests slow? The slowest ones of a saved run, each with a bar of its parts and
its neighbours (`scheduling.latency`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from client.results import Json, Result
from client.runs import RunError, SavedRun
from compare.report.sections import number_of_replicas
from scheduling.latency import Times, neighbours
from stats import times_from

WIDTH = 48  # columns of the longest bar
SHOWN = {  # a part's letter, colour and word, in the order of a bar
    "client": ("c", "bright_black", "client"),
    "first": ("f", "yellow", "first token"),  # where a server reports no parts
    "answer": ("a", "white", "answer"),  # where its first token was not seen
    "batch": ("w", "yellow", "waited"),
    "blocks": ("b", "red", "waited for blocks"),
    "prefill": ("p", "cyan", "prefill"),
    "decode": ("d", "green", "decode"),
    "preempted": ("x", "magenta", "preempted"),
    "recompute": ("r", "bright_magenta", "computed again"),
    "paused": ("s", "blue", "paused"),
    "held": ("h", "bright_blue", "held"),
}
INDENT = 7 * " "
JOINT = "\N{NO-BREAK SPACE}"  # no line ends between a number and its unit
LEAST_S = 5e-7  # a part's seconds; less is rounding


class Slow(NamedTuple):
    """A request of NAME.json and where its time went: seconds by part of SHOWN, which sum to its
    latency. seed: which one, if there are several. beside: `latency.neighbours`; empty where they
    are not known.
    """

    record: Json
    seed: str
    latency_s: float
    parts: dict[str, float]
    beside: Json


def show(run: SavedRun, n: int, console: Console) -> None:
    """Print the n slowest requests of each server. Raises RunError if the run has no parts."""
    of_servers = {name: slowest(run, name, n) for name in run.names}
    seen = {part for found in of_servers.values() for each in found for part in each.parts}
    legend = [Text(f"{how[0]} {how[2]}", how[1]) for part, how in SHOWN.items() if part in seen]
    console.print(Text("   ").join(legend))
    for name, found in of_servers.items():
        records = [each for r in run.results if name in r for each in _counted(r[name])]
        sent, failed = len(records), sum("text" not in each for each in records)
        more = f" ({failed:,} failed, and are not among them)" if failed else ""
        console.print(f"\n{name}: the {len(found):,} slowest of {sent:,} requests{more}")
        for each in found:
            console.print(Text("\n") + _bar(each, longest_s=found[0].latency_s))
            for line in _words(each):
                for part in textwrap.wrap(line, console.width - len(INDENT)):
                    console.print(f"{INDENT}{part.replace(JOINT, ' ')}", highlight=False)


def slowest(run: SavedRun, name: str, n: int) -> list[Slow]:
    """Return a server's slowest answered requests, of all seeds. Raises RunError."""
    records = [
        (record["answered_at"] - record["sent_at"], i, record)
        for i, result in enumerate(run.results)
        for record in _counted(result.get(name, Result()))
        if "text" in record
    ]
    records.sort(key=lambda each: each[0], reverse=True)
    return [_slow(run, i, name, record, latency_s) for latency_s, i, record in records[:n]]


def _counted(result: Result) -> list[Json]:
    """Return the requests of a server that its measures count: those after its warm-up."""
    return [each for each in result.requests if not each.get("warm_up")]


def _slow(run: SavedRun, i: int, name: str, record: Json, latency_s: float) -> Slow:
    result, timings = run.results[i][name], record["timings"]
    seed = f"seed {run.summaries[i]['seed']}, " if len(run.summaries) > 1 else ""
    if timings is None:
        if record["first_token_at"] is None:
            return Slow(record, seed, latency_s, {"answer": latency_s}, {})
        first_s = record["first_token_at"] - record["sent_at"]
        parts = {"first": first_s, "decode": latency_s - first_s}
        return Slow(record, seed, latency_s, parts, {})
    if "parts" not in timings:
        raise RunError(f"{run.folder} was measured before answers had `parts`; measure it again")
    parts = {"client": latency_s - timings["e2e_s"], **timings["parts"]}
    beside = {}
    if number_of_replicas(result) == 1:
        times = {each["id"]: _times(each) for each in result.requests if each.get("timings")}
        beside = neighbours(record["id"], times)
    return Slow(record, seed, latency_s, parts, beside)


def _times(record: Json) -> Times:
    times = times_from(record["timings"], record["timings"]["arrived_at"])
    times.prompt_tokens = record["prompt_tokens"]
    return times


def _bar(slow: Slow, longest_s: float) -> Text:
    latency = _duration(slow.latency_s).replace(JOINT, " ")
    bar, begun = Text(f"{slow.record['id']:>6} {latency:>8} "), 0.0
    for part, (letter, colour, _) in SHOWN.items():
        ended = begun + slow.parts.get(part, 0.0)
        cells = round(ended / longest_s * WIDTH) - round(begun / longest_s * WIDTH)
        bar.append(letter * cells, colour)
        begun = ended
    return bar


def _words(slow: Slow) -> Iterator[str]:
    """Yield the parts of a request, and its neighbours."""
    record, beside = slow.record, slow.beside
    words = [
        f"{word} {_duration(seconds)}"
        + (f" beside {beside['mean_rows']:.3g} rows" if beside and part == "decode" else "")
        for part, (_, _, word) in SHOWN.items()
        if (seconds := slow.parts.get(part, 0.0)) > LEAST_S
    ]
    tokens = f"{record['prompt_tokens']:,} + {record['completion_tokens']:,} tokens"
    yield f"{slow.seed}{tokens}: {', '.join(words)}"
    if beside:
        longest = ", ".join(map(str, beside["longest_beside"]))
        then = f", longest {longest}" if longest else ""
        waited = f"{beside['ran_before']:,} ran while it waited"
        yield f"{waited}, {beside['ran_beside']:,} beside it{then}"
    if beside and (prompts := beside["long_prompts"]):
        longest = ", ".join(f"{tokens:,} of {id}" for id, tokens in prompts.items())
        yield f"longest prompts meanwhile, tokens: {longest}"


def _duration(seconds: float) -> str:
    number, unit = (f"{seconds:.2f}", "s") if seconds >= 1 else (f"{1e3 * seconds:.3g}", "ms")
    return f"{number}{JOINT}{unit}"
