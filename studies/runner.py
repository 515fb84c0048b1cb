"""What the studies in virtual time share: cases and their seeds, means and paired differences, and
how a study is written. Knows no torch and no scheduler.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing.pool
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from client.machine import command_line, stamp
from compare.analysis import Estimate, difference, estimate
from compare.report import drawing
from compare.report.tables import formatted

# what is served how, and as "seeds" what came of each seed's trace, by measure
Case = Mapping[str, Any]
Cases = Sequence[Case]


class Study(NamedTuple):
    """What is written of one, and where."""

    module: str  # which `python -m` runs
    name: str  # of its files
    title: str
    drawn: str  # its figure, in words


def values(case: Case, measure: str) -> list[float]:
    return [seed[measure] for seed in case["seeds"]]


def shown(case: Case, measure: str) -> Estimate:
    return estimate(values(case, measure))


def apart(base: Case, case: Case, measure: str, form: str) -> str:
    """The paired difference case − base, in words."""
    gap = difference(values(base, measure), values(case, measure))
    text = ("+" if gap.mean > 0 else "") + formatted(gap, form)
    is_zero = not any(digit in "123456789" for digit in form.format(gap.mean))
    return text if gap.shown and not is_zero else "none shown"


def times(base: Case, case: Case, measure: str) -> Estimate:
    """The paired ratio case ÷ base."""
    pairs = zip(values(base, measure), values(case, measure), strict=True)
    return estimate([mine / its for its, mine in pairs])


def only(cases: Cases, **what: Any) -> list[Case]:
    """Those of which all this is true."""
    return [case for case in cases if what.items() <= case.items()]


def parser_of(study: Study, description: str) -> argparse.ArgumentParser:
    """The options that all studies have."""
    parser = argparse.ArgumentParser(prog=f"python -m {study.module}", description=description)
    parser.add_argument("--seeds", type=int, default=5, help="traces of each (default: 5)")
    parser.add_argument("--processes", type=int, default=2, help="side by side (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("runs") / study.name, help="folder")
    return parser


def over_seeds(
    workers: multiprocessing.pool.Pool,
    serve: Callable[..., dict[str, Any]],
    tasks: Iterable[tuple[Any, ...]],
    seeds: int,
) -> list[list[dict[str, Any]]]:
    """Of each task what `serve(*task, seed)` says of every seed."""
    asked = [(*task, seed) for task in tasks for seed in range(seeds)]
    found = workers.starmap(serve, asked, chunksize=1)
    return [found[at : at + seeds] for at in range(0, len(found), seeds)]


def write(
    study: Study,
    folder: Path,
    told_of: str,
    body: str,
    figure: Figure | None,
    result: dict[str, Any],
) -> None:
    """Write the study's page, figure, if it has one, and numbers, with what they were made by."""
    command = command_line("python", ["-m", study.module, *sys.argv[1:]])
    whole = result | stamp() | {"command": command}
    made = f"`{command}`, commit {whole['commit']}, {whole['date']}"
    folder.mkdir(parents=True, exist_ok=True)
    page, names = f"# {study.title}\n\n{told_of}; {made}.\n\n{body}\n", f"{study.name}.md"
    if figure:
        drawing.save(figure, folder / f"{study.name}.png")
        page += f"\n![{study.drawn}]({study.name}.png)\n"
        names += f", {study.name}.png"
    (folder / f"{study.name}.md").write_text(page)
    (folder / f"{study.name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    print(f"{body}\n{names} and every seed's numbers: {folder}")
