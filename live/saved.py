"""Rows × iterations of what was saved: a recording of a server, or a run of ./simulate.sh, which is
served again. Of a run of ./compare.sh, which keeps no rows, the recordings beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from client.load import Watch
from client.traces import Request, load_trace
from compare.runs import Run, RunError, load
from config import Config
from live.observer import Kept, about
from scheduling.scheduler import Scheduler
from simulate.costs import Costs, CostsError
from simulate.costs import load as load_costs
from simulate.replay import ReplayError, replay_file
from simulate.run import SimulatedServer


def histories(path: Path) -> tuple[dict[str, str], str]:
    """JSON of each server's history, by its name; and where the run has several seeds, of which one
    they are. Raises RunError.
    """
    if path.is_file():
        return recorded(path), ""
    run = load(path)
    simulated = run.first.get("simulated")
    return again(run) if simulated else measured(run), seed_shown(run)


def seed_shown(run: Run) -> str:
    """Of several seeds, which is shown."""
    n = len(run.summaries)
    return f"seed {run.first['seed']}, the first of {n}" if n > 1 else ""


def recorded(path: Path) -> dict[str, str]:
    """Of each recording in a file. Raises RunError."""
    found = _recordings(path, "not recorded", f"recorded: {path.name}")
    names = _told_apart([str(kept.history.about["name"]) for kept in found])
    return {name: kept.named(name) for name, kept in zip(names, found)}


def _recordings(path: Path, model: str, note: str) -> list[Kept]:
    found: list[Kept] = []

    def observe(scheduler: Scheduler, settings: Any) -> Kept:
        told = about(settings, model) | {"note": note}
        found.append(Kept(scheduler, told))
        return found[-1]

    try:
        replayed = replay_file(str(path), observe)
    except ReplayError as error:
        raise RunError(str(error)) from None
    if replayed.first_difference:
        raise RunError(f"{path} cannot be shown: {replayed}")
    return found


def measured(run: Run) -> dict[str, str]:
    """Of a run's servers, which were started with --record. Raises RunError."""
    recordings = {
        name: result["config"].get("record")
        for name, result in run.results[0].items()
        if result.get("config")
    }
    paths = dict.fromkeys(path for path in recordings.values() if path)
    if not paths or not all(Path(path).exists() for path in paths):
        raise RunError(
            f"{run.folder} has no recording of its servers, and a report keeps no rows; measure "
            f"again with --record {run.folder / 'calls.jsonl'}"
        )
    if run.missing_seeds:
        raise RunError(f"{run.folder} was interrupted, and recordings name no seed; measure again")
    found: dict[str, str] = {}
    for path in paths:  # of servers one after another; the last ones are this run's, seed by seed
        mine = [name for name, recording in recordings.items() if recording == path]
        note = _joined(f"recorded: {Path(path).name}", seed_shown(run))
        kept = _recordings(Path(path), str(run.first["config"]["model"]), note)
        kept = kept[-len(mine) * len(run.results) :][: len(mine)]
        if [each.history.about["mode"] for each in kept] != [
            run.results[0][name]["config"]["mode"] for name in mine
        ]:
            raise RunError(
                f"{path} does not end with the recordings of {', '.join(mine)}; measure again with "
                f"a --record of the run's own"
            )
        found |= {name: each.named(name) for name, each in zip(mine, kept)}
    return found


def again(run: Run) -> dict[str, str]:
    """Of a simulated run's servers: the same trace is served once more, to the same end. Raises
    RunError.
    """
    told, trace = run.first["simulated"], run.folders[0] / "trace.jsonl"
    if told["layout"]:
        raise RunError(f"{run.folder} has several replicas, and rows are shown of one server")
    if not trace.exists():
        raise RunError(f"{trace} is not there; simulate again, a trace that is short enough")
    try:
        costs = load_costs(told["costs"])
    except CostsError as error:
        raise RunError(str(error)) from None
    requests = load_trace(trace)
    note = _joined(seed_shown(run), f"commit {run.first['commit']}, {run.first['date']}")
    return {
        name: serve_again(
            name, Config(**result["config"]), costs, requests, note, bool(run.first["stream"])
        )
        for name, result in run.results[0].items()
    }


def serve_again(
    name: str,
    config: Config,
    costs: Costs,
    requests: Sequence[Request],
    note: str,
    stream: bool = False,
) -> str:
    """JSON of the history of a simulated server."""
    found: list[Kept] = []
    told = about(config, config.model_name) | {
        "simulated": f"simulated, costs {costs.name}",
        "note": note,
    }

    def observe(scheduler: Scheduler) -> Kept:
        found.append(Kept(scheduler, told, zero=0.0))
        return found[-1]

    server = SimulatedServer(name, config, costs, stream=stream, jump=False, observe=observe)
    server.replay(requests, math.inf, Watch())
    return found[0].named(name)


def _joined(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _told_apart(names: list[str]) -> list[str]:
    """Equal ones get a number."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} {seen[name]}")
    return found


def chosen(found: Mapping[str, str], names: list[str] | None) -> list[str]:
    """The histories of one or two names; unless they are named, static and dynamic, or the first
    two. Raises RunError.
    """
    known = ", ".join(found)
    if names is None:
        both = [name for name in ("static", "dynamic") if name in found]
        names = both if len(both) == 2 else list(found)[:2]
    if unknown := [name for name in names if name not in found]:
        raise RunError(f"there is no {unknown[0]!r}; name one or two of {known}")
    if len(names) > 2:
        raise RunError(f"a page shows one or two servers; name them with --of, of {known}")
    return [found[name] for name in names]
