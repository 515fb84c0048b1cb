"""Run a study's cases, go on where a run was stopped, and write its page, figure and numbers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from client import drawing, saving
from client.machine import ROOT, command_line, stamp
from config.reading import parse, read_lines
from config.settings import ConfigError
from lab.studies.study import Case, Cases, Study, tables
from lab.studies.study import figure as draw
from simulate.jobs import as_worker

CODE = (
    "batching.py", "model.py", "stats.py", "client", "compare", "config", "generate", "scheduling",
    "server", "lab/studies/virtual.py",
)  # fmt: skip
SUFFIXES = (".py", ".cpp", ".h")
NUMBERS = (
    "Numbers are means over seeds ± half of their 95% interval. Differences and ratios are paired "
    'by seed, and "none shown" means that the interval of a difference holds 0.\n\n'
)
CaseRun = tuple[Case, int, int]  # a case, requests of its trace, and the trace's seed


class FinishedRuns:
    """Results of finished runs, a line each in a file, so that a stopped study goes on."""

    def __init__(self, path: Path, code: str):
        self.path, self._code = path, code
        self._results: dict[str, dict[str, Any]] = {}
        try:
            for row in map(parse, read_lines(path) if path.exists() else ()):
                if row["code"] == code:
                    self._results[_key(row["run"])] = row["result"]
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path} has a line that is no finished run ({error!r}); remove it"
            ) from None

    def __contains__(self, run: CaseRun) -> bool:
        return _key(run) in self._results

    def __getitem__(self, run: CaseRun) -> dict[str, Any]:
        return self._results[_key(run)]

    def add(self, run: CaseRun, result: Mapping[str, Any]) -> None:
        line = json.dumps({"run": run, "code": self._code, "result": result})
        before = self.path.read_bytes() if self.path.exists() else b""
        saving.write(self.path, before + line.encode() + b"\n")
        self._results[_key(run)] = json.loads(line)["result"]


def _key(run: Sequence[Any]) -> str:
    return json.dumps(run, sort_keys=True)


def code(study: Study) -> str:
    """Return a digest of the code that the study's numbers depend on; runs of real servers stay
    valid when the simulator changes.
    """
    digest = hashlib.sha256()
    for name in (f"lab/studies/{study.name}.py", *CODE, *(() if study.servers else ("simulate",))):
        path = ROOT / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in SUFFIXES and file.exists():
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def measured(
    study: Study,
    cases: Cases,
    n: int,
    seeds: int,
    kept: FinishedRuns,
    processes: int = 1,
    minutes: float = float("inf"),
) -> list[dict[str, Any]]:
    """Make the runs that are missing, and return the cases with the measures of each finished seed.

    All cases of a seed are run before the next seed, so that a stopped study has equally many seeds
    of each case.
    """
    runs = [(case, n, seed) for seed in range(seeds) for case in cases]
    missing = [run for run in runs if run not in kept]
    end = time.monotonic() + 60 * minutes
    try:
        for k, (run, result) in enumerate(_results(study, missing, kept, processes, end), 1):
            kept.add(run, result)
            case = " · ".join(str(value) for value in run[0].values())
            print(f"{k} of {len(missing)}: {case}, seed {run[2]}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
    whole = [s for s in range(seeds) if all((case, n, s) in kept for case in cases)]
    return [{**case, "seeds": [kept[case, n, seed] for seed in whole]} for case in cases]


def _results(
    study: Study, runs: Sequence[CaseRun], kept: FinishedRuns, processes: int, end: float
) -> Iterator[tuple[CaseRun, dict[str, Any]]]:
    """Yield each run with its result, until the time is over."""
    with contextlib.ExitStack() as stack:
        results: Iterator[dict[str, Any]]
        if processes > 1 and not study.servers:
            pool = stack.enter_context(multiprocessing.Pool(processes, as_worker, [signal.SIG_DFL]))
            results = pool.imap(functools.partial(_call, study.run), runs)
        else:
            given = (kept,) if study.servers else ()
            results = (study.run(*run, *given) for run in runs)
        for run in runs:
            if time.monotonic() > end:
                return
            yield run, next(results)


def _call(run: Callable[..., dict[str, Any]], arguments: CaseRun) -> dict[str, Any]:
    return run(*arguments)


def write(
    study: Study, folder: Path, result: Mapping[str, Any], program: str = "lab.studies"
) -> None:
    """Write a study's page, its figure, and its numbers with the commit, date and command that made
    them.

    result: `cases`, `requests`, `seeds` and the study's options. program: the module that runs.
    """
    if "commit" not in result:
        command = command_line("python", ["-m", program, *sys.argv[1:]])
        result = {**result, **stamp(), "command": command}
    caption = study.workload.format(**{"n": f"{result['requests']:,}", **result})
    caption = caption[0].upper() + caption[1:]
    claim = f"Claim: {study.source}.\n\n" if study.source else ""
    body = claim + (NUMBERS if study.tables else "") + tables(study, result["cases"])
    made = f"`{result['command']}`, commit {result['commit']}, {result['date']}"
    page = f"# {study.title}\n\n{study.question}\n\n{caption}. Made by {made}.\n\n{body}\n"
    print(f"{body}\n")  # first, lest it is lost where no file can be written
    saving.write(folder / f"{study.name}.json", json.dumps(result, indent=1) + "\n")
    draws = study.drawn or functools.partial(draw, study)
    if drawn := draws(result["cases"], caption.replace("`", "")):
        drawing.save(drawn, folder / f"{study.name}.png")
        page += f"\n![{study.figure}]({study.name}.png)\n"
    saving.write(folder / f"{study.name}.md", page)
    print(f"{study.name}.md and every seed's numbers: {folder}")
