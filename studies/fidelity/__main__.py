"""The simulator held against real servers.

    python -m studies.fidelity [--part fake|demo] [--minutes N] [--seeds 4] [--out DIR]

Held-out traces, each by a fresh server twice, and by a simulated one at the costs of
`python -m benchmarks.costs` on the same machine. What is done is kept in DIR/fidelity.jsonl: the
same command goes on where it was stopped, and only other code of the server or its client begins
anew. A seed counts once all its repeats are done.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from client.calls import ServerError
from simulate.costs import Costs, CostsError, load
from studies.fidelity import judging, pages, running
from studies.fidelity.tasks import PARTS, START_S, Case, Task, tasks
from studies.runner import Study, write

STUDY = Study("studies.fidelity", "fidelity", "The simulator beside real servers", pages.DRAWN)
QUANTILES = (10, 50, 90, 99)  # that the figure shows
Cell = tuple[Case, float | None]


def ask(units: Sequence[Sequence[Task]], rows: running.Rows, minutes: float | None) -> None:
    """What is left of the tasks, until so many minutes are over. Raises ServerError."""
    left = [mine for unit in units if (mine := [task for task in unit if task not in rows])]
    need_s = sum(START_S + sum(task.seconds for task in unit) for unit in left)
    print(f"{sum(map(len, left))} tasks, about {need_s / 60:.0f} minutes", flush=True)
    end = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
    for unit in left:
        if time.monotonic() > end:
            break
        case, seed, repeat, *_ = unit[0]
        print(f"{' · '.join(case)} · seed {seed} · run {repeat + 1}:", end="", flush=True)
        for task in running.serve(unit, rows):
            print(" burst" if task.load is None else f" {task.load:g}", end="", flush=True)
        print(flush=True)


def found(
    units: Sequence[Sequence[Task]], rows: running.Rows, costs: Mapping[str, Costs], processes: int
) -> list[dict[str, Any]]:
    """Of each case and load how the simulated server does beside the real one."""
    cells: dict[Cell, dict[int, list[Task]]] = {}
    for repeats in repeated(units):
        if all(task in rows for task in repeats):
            case, seed, _, load, _ = repeats[0]
            cells.setdefault((case, load), {})[seed] = repeats
    firsts = [repeats[0] for seeds in cells.values() for repeats in seeds.values()]
    with multiprocessing.Pool(processes) as workers:
        asked = [(task, rows[task], costs[task.case.part]) for task in firsts]
        simulated = dict(zip(firsts, workers.starmap(running.simulated, asked, chunksize=1)))
    return [
        case_of(
            cell,
            {seed: [rows[task] for task in repeats] for seed, repeats in seeds.items()},
            {seed: simulated[repeats[0]] for seed, repeats in seeds.items()},
        )
        for cell, seeds in cells.items()
    ]


def repeated(units: Iterable[Sequence[Task]]) -> Iterable[list[Task]]:
    """The repeats of each trace together."""
    found: dict[Task, list[Task]] = {}
    for task in itertools.chain.from_iterable(units):
        found.setdefault(task._replace(repeat=0), []).append(task)
    return found.values()


def case_of(
    cell: Cell,
    measured: Mapping[int, Sequence[running.Row]],
    simulated: Mapping[int, running.Row],
) -> dict[str, Any]:
    case, load = cell
    real = [row for rows in measured.values() for row in rows]
    sides = {"measured": real, "simulated": list(simulated.values())}
    return case._asdict() | {
        "load": load,
        "rate": real[0]["rate"],
        "requests": len(real[0]["e2e_s"]),
        "seeds": len(measured),
        "repeats": len(real) // len(measured),
        "commits": sorted({row["commit"] for row in real if "commit" in row}),
        "failed": {name: sum(row["failed"] for row in rows) for name, rows in sides.items()},
        "errors": {
            name: error.told() for name, error in judging.errors(load, measured, simulated).items()
        },
        "quantiles_s": {
            name: np.percentile(np.concatenate([row["e2e_s"] for row in rows]), QUANTILES).tolist()
            for name, rows in sides.items()
        },
        "made_of": {name: judging.made_of(rows) for name, rows in sides.items()},
    }


def costs_of(parts: Sequence[str], name: str | None) -> dict[str, Costs]:
    """Raises CostsError."""
    return {part: load(name or PARTS[part].costs) for part in parts}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m {STUDY.module}", description="The simulator held against real servers."
    )
    parser.add_argument("--part", choices=PARTS, help="one of them (default: all)")
    parser.add_argument(
        "--minutes", type=float, metavar="N", help="after which no other server is asked"
    )
    parser.add_argument("--seeds", type=int, default=4, help="traces of each (default: 4)")
    parser.add_argument(
        "--repeats", type=int, default=2, help="real runs of each trace (default: 2)"
    )
    parser.add_argument(
        "--costs",
        metavar="NAME",
        help="as ./simulate.sh has them, with --part (default: those of the part's own name)",
    )
    parser.add_argument("--processes", type=int, default=2, help="that simulate (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("runs") / STUDY.name, help="folder")
    options = parser.parse_args()
    if options.costs and not options.part:
        parser.error("--costs are of one model; give --part, too")
    parts = [options.part] if options.part else list(PARTS)
    try:
        costs = costs_of(parts, options.costs)
    except CostsError as error:
        parser.error(str(error))
    rows = running.Rows(options.out / f"{STUDY.name}.jsonl")
    units = list(tasks(parts, options.seeds, options.repeats))
    try:
        ask(units, rows, options.minutes)
    except ServerError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on", flush=True)
    cells = found(units, rows, costs, options.processes)
    if not cells:
        sys.exit("no trace has been repeated yet; the same command goes on")
    told_of = (
        f"{options.repeats} real runs of each trace and one in virtual time, up to "
        f"{options.seeds} traces a case, on the machine that the costs were measured on"
    )
    used = {
        part: {"costs": mine.name}
        | {name: mine.source.get(name) for name in ("commit", "date", "hardware", "residuals")}
        for part, mine in costs.items()
    }
    result = {"costs": used, "cases": cells}
    write(STUDY, options.out, told_of, pages.body(cells), pages.figure(cells, told_of), result)


if __name__ == "__main__":
    main()
