"""Show the rows of a saved run, iteration by iteration, without a server.

python -m simulate.saved_page FILE

RUN           RUN/live.html, of static and dynamic, or the first two, and a link in the run's
              report. A simulated run is served again, a measured one replayed by its recordings
CALLS.jsonl   CALLS.html, of the recording that a server's --record wrote
VLLM.jsonl    the same of a recording of vLLM; --vllm shows it beside a run
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from client.calls import ServerError
from client.draws import WorkloadError
from client.runs import LIVE, RunError, SavedRun, load, refuse_overwriting
from client.saving import write
from client.stopping import fail
from client.traces import Request, load_trace
from compare.report import report
from config.config import Config
from config.flags import Parser, refuse_unknown, refuse_unknown_settings
from config.settings import ConfigError
from scheduling import user_policies
from scheduling.scheduler import Scheduler
from server.live import page
from server.live.observer import RunObserver, about
from simulate.costs import Costs, CostsError
from simulate.costs import load as load_costs
from simulate.replay import ReplayError, replay_file
from simulate.server import SimulatedServer
from simulate.vllm.history import NAME, history
from simulate.vllm.recording import is_recording

MOST_BYTES = 30_000_000  # the largest page that a browser still opens quickly


def main() -> None:
    parser = Parser(
        prog="python -m simulate.saved_page",
        description="The rows of a saved run, iteration by iteration, as one page.",
    )
    over = "replace a page that is there (else refused, unless in a run)"
    add = parser.add_argument
    add("run", type=Path, help="a folder of simulate.sh or compare.sh --record, or a recording")
    add("--vllm", type=Path, metavar="FILE", help="show this recording of vLLM beside one server")
    add("--of", metavar="NAME[,NAME]", help="one or two of its servers (default: static,dynamic)")
    add("--out", type=Path, help="the page (default: in a run's folder, or beside a recording)")
    add("--overwrite", action="store_true", help=over)
    try:
        arguments, unknown = parser.parse_known_args()
        refuse_unknown(parser, unknown)
        run: Path = arguments.run
        texts, seed = histories(run)
        names = arguments.of and arguments.of.split(",")
        if arguments.vllm:
            texts, names = beside(texts, names, arguments.vllm), None
        out = arguments.out or (run.with_suffix(".html") if run.is_file() else None)
        # what is made in a run's folder is made anew
        refuse_overwriting([out] if out else [], arguments.overwrite)
        write_page(run, chosen(texts, names), out)
    except (ConfigError, RunError, ServerError, WorkloadError) as error:
        fail(error)
    if seed:
        print(f"{run}: shown is {seed}", file=sys.stderr)


def histories(path: Path) -> tuple[dict[str, str], str]:
    """Return each server's history as JSON, and which of several seeds. Raises RunError."""
    if is_recording(path):
        return {NAME: history(path)}, ""
    if path.is_file():
        return recorded(path), ""
    run = load(path)
    n, first = len(run.summaries), run.first
    seed = f"seed {first['seed']}, the first of {n}" if n > 1 else ""
    return (again if first.get("simulated") else measured)(run, seed), seed


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


def measured(run: SavedRun, seed: str) -> dict[str, str]:
    """Return the histories of servers that were started with --record. Raises RunError."""
    results = run.results[0]
    configs = {name: result.config for name, result in results.items() if result.config}
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
    for path in paths:  # servers one after another; the last ones are this run's, seed by seed
        names = [name for name in path_of if path_of[name] == path]
        note = ", ".join(filter(None, (f"recorded: {Path(path).name}", seed)))
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


def again(run: SavedRun, seed: str) -> dict[str, str]:
    """Return a simulated run's histories by serving its trace again. Raises RunError."""
    first, trace = run.first, run.folders[0] / "trace.jsonl"
    if first["simulated"]["layout"]:
        raise RunError(f"{run.folder} has several replicas, and rows are shown of one server")
    if not trace.exists():
        raise RunError(f"{trace} is not there; simulate again, a trace that is short enough")
    given = {name: result.config for name, result in run.results[0].items()}
    if absent := user_policies.absent(given.values()):
        raise RunError(f"{run.folder}: {absent}")
    try:
        for name, each in given.items():
            refuse_unknown_settings(f"{name} of {run.folder}", each)
        costs, requests = load_costs(first["simulated"]["costs"]), load_trace(trace)
        configs = {name: Config(**each) for name, each in given.items()}
    except (ConfigError, CostsError) as error:
        raise RunError(str(error)) from None
    except (TypeError, ValueError) as error:
        why = " ".join(str(error).split())[:300]
        raise RunError(f"{run.folder} cannot be served again ({why}); simulate it again") from None
    note = ", ".join(filter(None, (seed, f"commit {first['commit']}, {first['date']}")))
    stream = bool(first["stream"])
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


def beside(texts: Mapping[str, str], names: list[str] | None, log: Path) -> dict[str, str]:
    """Return one server's history and vLLM's; both first requests come at once. Raises RunError."""
    if names is None:
        names = ["dynamic"] if "dynamic" in texts else list(texts)[:1]
    if len(names) > 1:
        raise RunError("beside --vllm a page shows one server; name one with --of")
    [text] = chosen(texts, names)
    first = min((arrived_at for _, arrived_at, *_ in json.loads(text)["requests"]), default=0.0)
    name = NAME if NAME not in names else f"{NAME} 2"
    return {names[0]: text, name: history(log, first)}


def chosen(texts: Mapping[str, str], names: list[str] | None) -> list[str]:
    """Return one or two histories, by default static's and dynamic's. Raises RunError."""
    if names is None:
        both = [name for name in ("static", "dynamic") if name in texts]
        names = both if len(both) == 2 else list(texts)[:2]
    if unknown := [name for name in names if name not in texts]:
        raise RunError(f"there is no {unknown[0]!r}; name one or two of {', '.join(texts)}")
    if len(names) > 2:
        known = ", ".join(texts)
        raise RunError(f"a page shows one or two servers; name them with --of, of {known}")
    return [texts[name] for name in names]


def write_page(run: Path, texts: list[str], out: Path | None) -> None:
    """Write the page, and its link in the report beside it. Raises RunError and Unwritten."""
    if (size := sum(map(len, texts))) > MOST_BYTES:
        raise RunError(
            f"the page of {run} would have {size / 1e6:.0f} MB, too much for a browser; take a "
            f"shorter run, or one server with --of"
        )
    out = out or run / LIVE
    write(out, page.saved(texts))
    if out == run / LIVE:
        report.write(load(run))  # which links it
    print(out)


if __name__ == "__main__":
    main()
