"""Histories of saved runs: of a recording, of a run of ./simulate.sh, which is served again, and of
a run of ./compare.sh by its recordings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from client.runs import Run, RunError, load
from client.traces import Request, load_trace
from config import Config
from config.left import used
from scheduling import user_policies
from scheduling.scheduler import Scheduler
from server.live.observer import RunObserver, about
from simulate import vllm as vllm_recording
from simulate.costs import Costs, CostsError
from simulate.costs import load as load_costs
from simulate.replay import ReplayError, replay_file
from simulate.run import SimulatedServer


def histories(path: Path) -> tuple[dict[str, str], str]:
    """Return each server's history as JSON, and which of several seeds. Raises RunError."""
    if vllm_recording.is_recording(path):
        return {vllm_recording.NAME: vllm_recording.history(path)}, ""
    if path.is_file():
        return recorded(path), ""
    run = load(path)
    simulated = run.first.get("simulated")
    return again(run) if simulated else measured(run), shown_seed(run)


def shown_seed(run: Run) -> str:
    n = len(run.summaries)
    return f"seed {run.first['seed']}, the first of {n}" if n > 1 else ""


def recorded(path: Path) -> dict[str, str]:
    """Return the histories of a file's recordings; equal names get a number. Raises RunError."""
    seen = Counter[str]()
    texts = {}
    for kept in _recordings(path, "not recorded", f"recorded: {path.name}"):
        name = str(kept.history.about["name"])
        seen[name] += 1
        name = name if seen[name] == 1 else f"{name} {seen[name]}"
        texts[name] = kept.json(name)
    return texts


def _recordings(path: Path, model: str, note: str) -> list[RunObserver]:
    recordings: list[RunObserver] = []

    def observe(scheduler: Scheduler, settings: Any) -> RunObserver:
        recordings.append(RunObserver(scheduler, about(settings, model) | {"note": note}))
        return recordings[-1]

    try:
        replayed = replay_file(str(path), observe)
    except ReplayError as error:
        raise RunError(str(error)) from None
    if replayed.first_difference:
        raise RunError(f"{path} cannot be shown: {replayed}")
    return recordings


def measured(run: Run) -> dict[str, str]:
    """Return the histories of servers that were started with --record. Raises RunError."""
    results = run.results[0]
    configs = {name: result["config"] for name, result in results.items() if result.get("config")}
    path_of = {name: config.get("record") for name, config in configs.items()}
    paths = dict.fromkeys(path for path in path_of.values() if path)
    if not paths or not all(Path(path).exists() for path in paths):
        raise RunError(
            f"{run.folder} has no recording of its servers, and a report keeps no rows; measure "
            f"again with --record {run.folder / 'calls.jsonl'}"
        )
    if run.missing_seeds:
        raise RunError(f"{run.folder} was interrupted, and recordings name no seed; measure again")
    texts: dict[str, str] = {}
    for path in paths:  # of servers one after another; the last ones are this run's, seed by seed
        names = [name for name in path_of if path_of[name] == path]
        note = ", ".join(filter(None, (f"recorded: {Path(path).name}", shown_seed(run))))
        recordings = _recordings(Path(path), str(run.first["config"]["model"]), note)
        recordings = recordings[-len(names) * len(run.results) :][: len(names)]
        modes = [kept.history.about["mode"] for kept in recordings]
        if modes != [configs[name]["mode"] for name in names]:
            raise RunError(
                f"{path} does not end with the recordings of {', '.join(names)}; measure again "
                f"with a --record of the run's own"
            )
        texts |= {name: kept.json(name) for name, kept in zip(names, recordings)}
    return texts


def again(run: Run) -> dict[str, str]:
    """Return a simulated run's histories by serving its trace again. Raises RunError."""
    simulated, trace = run.first["simulated"], run.folders[0] / "trace.jsonl"
    if simulated["layout"]:
        raise RunError(f"{run.folder} has several replicas, and rows are shown of one server")
    if not trace.exists():
        raise RunError(f"{trace} is not there; simulate again, a trace that is short enough")
    try:
        costs = load_costs(simulated["costs"])
    except CostsError as error:
        raise RunError(str(error)) from None
    given = [result.get("config") or {} for result in run.results[0].values()]
    named = (str(each.get(key)) for each in given for key in ("mode", "order"))
    if absent := user_policies.absent(named):
        raise RunError(f"{run.folder}: {absent}")
    for name, each in zip(run.results[0], given):
        if sentence := used(each):
            raise RunError(f"{name} of {run.folder} cannot be served again: {sentence}")
    try:
        requests = load_trace(trace)
        configs = {name: Config(**each) for name, each in zip(run.results[0], given)}
    except (TypeError, ValueError) as error:
        why = " ".join(str(error).split())[:300]
        raise RunError(f"{run.folder} cannot be served again ({why}); simulate it again") from None
    commit = f"commit {run.first['commit']}, {run.first['date']}"
    note = ", ".join(filter(None, (shown_seed(run), commit)))
    stream = bool(run.first["stream"])
    return {
        name: serve_again(name, config, costs, requests, note, stream)
        for name, config in configs.items()
    }


def serve_again(
    name: str, config: Config, costs: Costs, requests: Sequence[Request], note: str, stream: bool
) -> str:
    """Serve a trace by a simulated server; return its history, as JSON."""
    observers: list[RunObserver] = []
    facts = about(config, config.model_name)
    facts |= {"simulated": f"simulated, costs {costs.name}", "note": note}

    def observe(scheduler: Scheduler) -> RunObserver:
        observers.append(RunObserver(scheduler, facts, zero=0.0))
        return observers[-1]

    server = SimulatedServer(name, config, costs, stream=stream, jump=False, observe=observe)
    server.replay(requests)
    return observers[0].json(name)


def chosen(texts: Mapping[str, str], names: list[str] | None) -> list[str]:
    """Return one or two histories, by default static's and dynamic's. Raises RunError."""
    known = ", ".join(texts)
    if names is None:
        both = [name for name in ("static", "dynamic") if name in texts]
        names = both if len(both) == 2 else list(texts)[:2]
    if unknown := [name for name in names if name not in texts]:
        raise RunError(f"there is no {unknown[0]!r}; name one or two of {known}")
    if len(names) > 2:
        raise RunError(f"a page shows one or two servers; name them with --of, of {known}")
    return [texts[name] for name in names]
