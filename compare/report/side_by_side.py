"""The report of several runs: other commits, machines or settings, or other tools' runs."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from client.analysis import BLOCKS
from client.quoting import code, escape
from client.results import Json, Key
from client.runs import FIGURES, RunError, SavedRun, clear, is_run, load
from compare import calibrate, foreign
from compare.analysis import difference
from compare.foreign import Measured
from compare.report import figures, sentences, tables
from compare.report.report import distributions, document, latencies, write_files
from compare.report.sentences import marked
from stats import LIMITED

LINES = ("-", "--", ":", "-.")  # lines of runs, in figures
ABOUT: dict[str, Callable[[Json], str]] = {
    "commit": lambda s: escape(s["commit"]),
    "date": lambda s: escape(s["date"]),
    "hardware": lambda s: escape(f"{s['hardware']['cpu']}, {s['hardware']['cores']} cores"),
    "workload": lambda s: ", ".join(  # a trace's file stands for lengths and arrivals
        (
            f"{s['workload']['requests']:,} requests",
            *dict.fromkeys(code(s["workload"][word]) for word in ("lengths", "arrival")),
        )
    ),
    "command": lambda s: code(s["command"]),
}
SAME = "All replayed the same traces, so their differences are the servers' and the machines'."
OTHER = (
    "**The traces differ**: another load alone changes latencies; `--trace` replays one run's "
    "trace in another run."
)
WALL = ("wall_clock_s", "request_throughput", "output_throughput", "total_token_throughput")
NUMBERS = [  # numbers of servers that tools measured, each with a tool's definition that it goes by
    *((Key(name, form="{:,.2f}"), ("wall_clock_s",)) for name in WALL),
    *(
        (Key(f"{each}_{name}_ms", form="{:,.2f}"), (name, "percentiles")[: 1 + (each != "mean")])
        for name in foreign.LATENCIES
        for each in ("mean", "p50", "p99")
    ),
]
Columns = Mapping[str, np.ndarray]
LATE_S = 0.25  # requests that are sent further apart are of another trace
TICK_S = 1e-6  # added to each time: those of tokens that came at once are 0, which has no logarithm
PAIRED = (
    "Ratios to {first}, request by request and by one definition: the times to the first token and "
    "to the last one, and (last − first) / (n − 1). In brackets: a 95% interval over at most "
    f"{BLOCKS} stretches of the trace, for chance within these runs, and not from run to run."
)
UNPAIRED = (
    "Nothing is paired: no two files hold requests of the same lengths that were sent at the same "
    "instants. `vllm bench serve` saves them with `--save-detailed`, aiperf in a file beside its "
    "summary."
)
FIGURE = (
    "Lines: each request by one definition, to its last token. Hollow marks: median and p99 as the "
    "tool itself reports them."
)


def beside(paths: Sequence[Path], out: Path) -> str:
    """Write a report of runs, ours and other tools', side by side; return it. Raises RunError."""
    paths = [path.parent if path.name == "summary.json" else path for path in paths]
    runs = [load(path) if is_run(path) else foreign.read(path) for path in paths]
    places = [run.folder if isinstance(run, SavedRun) else run.path for run in runs]
    for i, place in enumerate(places):
        if place.resolve() in [other.resolve() for other in places[:i]]:
            raise RunError(f"{paths[i]} is given twice; leave one out")
        if place.resolve() == out.resolve():
            raise RunError(f"--out would replace {paths[i]}; name another folder")
    clear(out)
    ours = [run for run in runs if isinstance(run, SavedRun)]
    if len(ours) == len(runs):
        return compare_runs(ours, out)
    return compare_measured(
        [each for run in runs for each in (_measured(run) if isinstance(run, SavedRun) else [run])],
        out,
    )


def show(text: str, out: Path, console: Console) -> None:
    """Print a report of runs side by side, without figures and definitions."""
    text = re.sub(r"^!\[.*\n|^Lines: .*\n", "", text.split("\n## Definitions")[0], flags=re.M)
    for part in re.split(r"\n{2,}", text.strip()):
        if part.startswith("|"):
            console.print(_for_terminal(part))
        else:
            console.print(
                sentences.plain(part.lstrip("# ")), "", sep="\n", markup=False, highlight=False
            )
    console.print(f"report.html, report.md and figures: {out}", soft_wrap=True, highlight=False)


def _for_terminal(markdown: str) -> tables.Terminal:
    """Return a Markdown table as one for the terminal."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in markdown.splitlines()]
    head, kinds, *rows = ([cell.strip() for cell in line] for line in lines)
    texts = [
        [sentences.plain(re.sub(r"(`+)(.+?)\1", r"\2", c)) for c in row] for row in (head, *rows)
    ]
    return tables.Terminal(texts, kinds.count("---"))


def compare_runs(runs: Sequence[SavedRun], out: Path) -> str:
    """Write a report of runs of ours: what differs, and each variant in each. Return its text."""
    names = [escape(run.folder.resolve().name) for run in runs]
    if len(set(names)) < len(names):
        names = [f"{i}: {name}" for i, name in enumerate(names, 1)]
    named = {f"{name}{marked(run)}": run for name, run in zip(names, runs)}
    traces = [_traces(run) for run in runs]
    same = all(each == traces[0] for each in traces)
    remarks = [f"{label}: {' '.join(_remarks(run))}" for label, run in named.items()]
    lines, values = {}, {}
    for name in runs[0].names:
        for line, (label, run) in zip(itertools.cycle(LINES), named.items()):
            if all(name in each.names for each in runs):
                marked_name = tables.label(name, run.variants[name])
                lines[f"{marked_name}, {label}"] = (name, line)
                values[f"{marked_name}, {label}"] = distributions(run.answered(name))
    caption = " · ".join(f"{label}: commit {run.first['commit']}" for label, run in named.items())
    draw = partial(figures.distributions, values, caption, lines)
    text = document([
        f"# {' against '.join(named)}",
        "## What differs", tables.markdown(_differing(named), left=1 + len(runs)),
        SAME if same else OTHER, *_foreign_costs(named), *remarks,
        "## Variants",
        tables.runs_table({label: run.variants for label, run in named.items()}, paired=same),
        f"![{FIGURES['distributions']}](distributions.png)" if values else "",
    ])  # fmt: skip
    write_files(out, text, {"distributions": draw} if values else {})
    return text


def _traces(run: SavedRun) -> list[Any]:
    """The trace of each seed, or of one that was not saved what it is drawn from."""
    return [
        _text(folder / "trace.jsonl")
        if summary["workload"].get("saved", True)
        else (summary["seed"], summary["workload"])
        for folder, summary in zip(run.folders, run.summaries)
    ]


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise RunError(
            f"cannot read {path}: {error}; copy the whole folder, or measure again"
        ) from None


def _differing(runs: Mapping[str, SavedRun]) -> list[list[str]]:
    """A table of facts about the runs, and of the settings in which they differ."""
    first = [run.first for run in runs.values()]
    rows = [["", *runs], *([what, *map(of, first)] for what, of in ABOUT.items())]
    configs = [summary["config"] for summary in first]
    for name in dict.fromkeys(name for config in configs for name in config):
        settings = [sentences.setting(config.get(name, tables.NONE)) for config in configs]
        if len(set(settings)) > 1:
            rows.append([escape(name), *settings])
    return rows


def _foreign_costs(runs: Mapping[str, SavedRun]) -> list[str]:
    """Warn of each simulation whose costs are not of a measured run's processor."""
    cpus = {name: r.first["hardware"]["cpu"] for name, r in runs.items() if not marked(r)}
    warnings = []
    for name, run in runs.items():
        fitted = (run.first.get("simulated") or {}).get("hardware")
        if fitted and (others := [other for other, cpu in cpus.items() if cpu != fitted["cpu"]]):
            warnings.append(
                f"**{name} has another machine's costs**: they were fitted on "
                f"{escape(fitted['cpu'])}, and {', '.join(others)} ran on "
                f"{escape(cpus[others[0]])}; fit them there with "
                "`python -m simulate.measure_costs`."
            )
    return warnings


def _remarks(run: SavedRun) -> list[str]:
    """Conditions of a run, after the reasons not to trust it."""
    remarks = [sentences.simulated(run), sentences.partial(run), *sentences.failures(run)]
    remarks += [sentences.client_limited(run), sentences.conditions(run)]
    if not run.first.get("simulated"):
        remarks.append(calibrate.sentence(run.first["calibration"]))
    return [sentence for sentence in remarks if sentence]


def _measured(run: SavedRun) -> list[Measured]:
    """Return each server of a run of ours as those of other tools are."""
    summary = run.first
    ours, machine = summary["started_here"], ABOUT["hardware"](summary)
    facts = {
        "tool": f"effective-batching{marked(run)}, commit {summary['commit']}",
        "server's machine" if ours else "client": machine,
        "model": summary["config"].get("model") or ", ".join(summary["also"]),
        "server": ", ".join(summary["also"].values()),
        "answers": "streams" if summary["stream"] else "plain",
        "tokens counted by": foreign.SERVER,
        "arrival": summary["workload"]["arrival"],
        "date": summary["date"],
    }
    return [
        Measured(
            name if ours else "client.py", run.folder, None, facts,
            [result[name] for result in run.results if name in result], run.answered(name),
            [remark for remark in (sentences.partial(run), sentences.cut(run)) if remark],
        )
        for name in run.names
    ]  # fmt: skip


def compare_measured(runs: Sequence[Measured], out: Path) -> str:
    """Write a report of servers that different tools measured; return its text.

    What differs comes first; then each tool's own numbers, marked where it defines them otherwise
    than we do; then ratios by one definition, where the requests are the same.
    """
    names = [run.name for run in runs]
    numbered = [f"{i}: {n}" if names.count(n) > 1 else n for i, n in enumerate(names, 1)]
    named = {escape(name): run for name, run in zip(numbered, runs)}
    columns = {name: _columns(run) for name, run in named.items() if run.requests}
    stamps = ("sent_at", "first_token_at", "last_token_at", "last_token_at", "completion_tokens")
    values: dict[str, Columns] = {name: {} for name in named}
    for name, of in columns.items():  # to the last token, since not all know when an answer ended
        values[name] = latencies(*(of[stamp] for stamp in stamps))
    reported = {name: run.results[0] for name, run in named.items() if len(run.results) == 1}
    caption = " · ".join(run.facts["tool"] for run in runs)
    draw = partial(figures.distributions, values, caption, reported=reported)
    text = document([
        f"# {' against '.join(named)}",
        "## What differs", *_facts(named),
        *(f"{name}: {remark}" for name, run in named.items() for remark in run.remarks),
        "## What each tool reports", *_numbers(named),
        "## The same requests, by one definition", *_ratios(columns, values),
        f"![{FIGURES['distributions']}](distributions.png)", FIGURE,
    ])  # fmt: skip
    write_files(out, text, {"distributions": draw})
    return text


def _facts(runs: Mapping[str, Measured]) -> list[str]:
    """A table of the facts that differ or that not every tool records, and a line of the others."""
    facts = []
    for run in runs.values():
        completed, failed, prompt, completion = (
            sum(result.number(key) for result in run.results)
            for key in ("completed", "failed", "total_input_tokens", "total_output_tokens")
        )
        counted = {
            "requests": f"{completed:.0f} answered, {failed:.0f} failed",
            "tokens of a prompt": f"{prompt / (completed or 1):.1f}",
            "tokens of a completion": f"{completion / (completed or 1):.1f}",
        }
        facts.append({**run.facts, **counted})
    rows, same = [["", *runs]], []
    for what in dict.fromkeys(itertools.chain.from_iterable(facts)):
        cells = [escape(each.get(what) or "not recorded") for each in facts]
        if len(set(cells)) > 1:
            rows.append([what, *cells])
        else:
            same.append(f"{what} {cells[0]}")
    return [
        tables.markdown(rows, left=1 + len(runs)),
        f"The same in all: {'; '.join(same)}." if same else "",
    ]


def _numbers(runs: Mapping[str, Measured]) -> list[str]:
    """A table of each tool's own numbers, and notes on those that it defines otherwise."""
    notes: dict[str, str] = {}  # {note: its letter}

    def cell(run: Measured, key: Key, aspects: Sequence[str]) -> str:
        text, tool = tables.cell_of(key, run.results), run.tool
        if tool and text != tables.NONE:
            for aspect in (each for each in aspects if each in tool.differs):
                own = tool.names.get(aspect, aspect)
                note = f"{tool.name}, {code(own)}: {tool.differs[aspect]}"
                text += f" ({notes.setdefault(note, chr(ord('a') + len(notes)))})"
        return text

    rows = [["", *runs]]
    for key, aspects in NUMBERS:
        cells = [cell(run, key, aspects) for run in runs.values()]
        if set(cells) != {tables.NONE}:
            rows.append([code(key.name), *cells])
    lines = [f"- ({letter}) {note}." for note, letter in notes.items()]
    return [tables.markdown(rows), "\n".join(lines)]


def _columns(run: Measured) -> Columns:
    """Return requests as columns, sorted alike in all runs; instants since the first."""
    columns = {name: np.array([r[name] for r in run.requests], float) for name in foreign.REQUEST}
    start = columns["sent_at"].min()
    order = np.lexsort([columns[n] for n in ("sent_at", "completion_tokens", "prompt_tokens")])
    return {
        name: column[order] - (start if name.endswith("_at") else 0)
        for name, column in columns.items()
    }


def _same_requests(first: Columns, second: Columns) -> bool:
    """Return whether two runs sent requests of the same lengths at the same instants."""
    if len(first["sent_at"]) != len(second["sent_at"]):
        return False
    apart = {name: np.abs(first[name] - second[name]).max() for name in first}
    return not (apart["prompt_tokens"] or apart["completion_tokens"] or apart["sent_at"] > LATE_S)


def _ratios(columns: Mapping[str, Columns], values: Mapping[str, Columns]) -> list[str]:
    """A table of ratios to the first run with intervals, of those with the same requests."""
    first, *others = columns or [""]
    same = [name for name in others if _same_requests(columns[first], columns[name])]
    if not same:
        return [UNPAIRED]
    by_instant = np.argsort(columns[first]["sent_at"])
    rows = [["", *same]]
    for measure in LIMITED.values():
        of_first, *of_others = (values[name][measure.name][by_instant] for name in (first, *same))
        ratios = [_ratio(*_logs(of_first, of_other)) for of_other in of_others]
        if set(ratios) != {tables.NONE}:
            rows.append([measure.title, *ratios])
    return [tables.markdown(rows), PAIRED.format(first=first)]


def _logs(first: np.ndarray, second: np.ndarray) -> Sequence[list[float]]:
    """Return logarithms of two runs' means, over stretches of the requests that both timed."""
    known = ~np.isnan(first + second)
    if not known.any():
        return [math.nan], [math.nan]
    n = min(BLOCKS, int(known.sum()))
    return [
        [math.log(block.mean() + TICK_S) for block in np.array_split(each[known], n)]
        for each in (first, second)
    ]


def _ratio(first: Sequence[float], second: Sequence[float]) -> str:
    """The ratio of two runs with its interval, from logarithms of each stretch of the trace."""
    by = difference(first, second)
    if math.isnan(by.mean):
        return tables.NONE
    if by.half is None:  # one stretch alone
        return f"× {math.exp(by.mean):.2f}"
    ratio, low, high = (math.exp(by.mean + sign * (by.half or 0.0)) for sign in (0, -1, 1))
    text = f"× {ratio:.2f} ({low:.2f} to {high:.2f})"
    return text if by.shown else f"no difference shown ({text})"
