"""Ours and its peers in turn, on the same requests and weights: tok/s, and their ratios.

    python -m benchmarks.peers --model FOLDER_124M --model FOLDER_355M --out results/peers
        [--pairs 5] [--peers-python PATH] [--vllm-python PATH]

FOLDER: made by benchmarks.peers.checkpoint. A case is a model, a number of rows (a burst of 64, and
one) and a kind of numbers; in each of its rounds every engine runs once, one after another, since
only neighbours in time compare. `peers.json` is saved after each case, and `peers.md` at the end.
"""

from __future__ import annotations

import re
import shlex
import statistics
import subprocess
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import permutations, product
from pathlib import Path
from typing import Any

from benchmarks.harness import Benchmark, alternate, ratios, run
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
        "--pairs": (5, "rounds of a case"),
        "--peers-python": (sys.executable, "interpreter that has OpenVINO and CTranslate2"),
        "--vllm-python": (sys.executable, "interpreter that has vLLM"),
    },
)
OURS, PEERS = f"benchmarks.burst --threads {THREADS}", "benchmarks.peers.engines"
METHOD = (
    "Medians of the rounds (least to most); ratio: ours ÷ peer, within a round. In a round all "
    "run one after another, each in a process of its own, on the same weights and requests "
    "(`benchmarks/workload.py`: 6,904 completion tokens in 64 requests at once; one row is "
    "request 0 alone), greedy, and are warm before their clock starts."
)


def kinds(native: bool) -> dict[str, dict[str, str]]:
    """The words after `python -m` of each engine, by kind of numbers and engine. Where bfloat16 is
    not native, peers run in float32.
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


def is_ours(name: str) -> bool:
    return name.startswith("ours")


def without_paths(text: str, options: Namespace) -> str:
    """A text without the places of models and interpreters, which mean nothing elsewhere."""
    for model in options.model:
        text = text.replace(str(model), model.name)
    for python in (options.peers_python, options.vllm_python, sys.executable):
        text = text.replace(python, "PYTHON")
    return text


def throughput(command: str) -> tuple[float, str]:
    """Run a command; return its first "123.4 tok/s", and that line. Raises ConfigError."""
    try:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True)
    except OSError as error:
        raise ConfigError(str(error)) from None
    output = done.stdout + done.stderr
    line = re.search(r".*?([\d,]+(?:\.\d+)?) tok/s", output)
    if done.returncode or not line:
        raise ConfigError(
            f"{command} ended with {done.returncode} and printed no tok/s: …{output[-500:]}"
        )
    return float(line[1].replace(",", "")), line[0]


def measure(name: str, words: str, model: Path, rows: int, options: Namespace) -> dict[str, Any]:
    """The throughput of an engine, or its error."""
    peers_python = options.vllm_python if "vllm" in words else options.peers_python
    python = sys.executable if is_ours(name) else peers_python
    command = shlex.join([python, "-m", *words.split(), "--model", str(model), "--n", str(rows)])
    result: dict[str, Any] = {
        "runner": name,
        "command": without_paths(command, options),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    try:
        result["tokens_per_s"], result["printed"] = throughput(command)
        print(f"  {name:50} {result['tokens_per_s']:9,.1f} tok/s", flush=True)
    except ConfigError as error:
        result["error"] = without_paths(str(error), options).strip().splitlines()[-1]
        print(f"  {name:50} failed: {error}", flush=True)
    return result


def rounds_of(model: Path, rows: int, kind: str, options: Namespace) -> list[dict[str, Any]]:
    """The rounds of a case. An engine that failed is not started again."""
    engines, failed = kinds(native_bfloat16())[kind], dict[str, Any]()

    def turn(name: str) -> dict[str, Any]:
        result = failed.get(name) or measure(name, engines[name], model, rows, options)
        if "error" in result:
            failed[name] = result
        return result

    runs = alternate(engines, turn, options.pairs)
    case = {"model": model.name, "rows": rows, "kind": kind}
    return [case | {"runs": list(turns)} for turns in zip(*runs.values())]


def span(values: Sequence[float], form: str) -> str:
    """The median, and the range."""
    middle, low, high = map(form.format, (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def table(rounds: Sequence[Mapping[str, Any]]) -> str:
    """A line for each of ours beside each of its peers, of the rounds in which both ran."""
    speeds_of = defaultdict(list)
    for turn in rounds:
        speeds = {r["runner"]: r["tokens_per_s"] for r in turn["runs"] if "error" not in r}
        for ours, peer in permutations(speeds, 2):
            if is_ours(ours) and not is_ours(peer):
                pair = turn["model"], str(turn["rows"]), ours, peer
                speeds_of[pair].append((speeds[ours], speeds[peer]))
    lines = [["model", "rows", "ours", "peer", "ours, tok/s", "peer, tok/s", "ratio", "rounds"]]
    for pair, speeds_by_round in speeds_of.items():
        first, second = zip(*speeds_by_round)
        ratio = span(ratios(first, second), "{:.2f}").replace(" ", "** ", 1)
        cells = [span(first, "{:,.1f}"), span(second, "{:,.1f}"), f"**{ratio}"]
        lines.append([*pair, *cells, str(len(speeds_by_round))])
    return markdown(lines, left=4)


def write(result: Mapping[str, Any], folder: Path) -> None:
    """Write peers.md, and peers.json once more."""
    hardware, runs = result["hardware"], [r for turn in result["rounds"] for r in turn["runs"]]
    versions = {  # "OpenVINO GenAI 2026.4.1, int8: 64 requests, …"
        r["printed"].split(",")[0]: None
        for r in runs
        if "error" not in r and not is_ours(r["runner"])
    }
    native = "" if result["native_bfloat16"] else "not "
    setup = (
        f"{processor(hardware, {'threads': THREADS})}, {hardware['memory_gb']} GB, bfloat16 "
        f"{native}native; torch {hardware['torch']}, {', '.join(versions)}"
    )
    body = f"{table(result['rounds'])}\n\n{METHOD}"
    if errors := {f"- {r['runner']}: {r['error']}": None for r in runs if "error" in r}:
        body += "\n\nFailed, and left out:\n\n" + "\n".join(errors)
    BENCHMARK.write(folder, "Ours and its peers", setup, body, result)


def main() -> None:
    parser = BENCHMARK.parser()
    parser.add_argument("--model", type=Path, action="append", required=True, help="folder; again")
    options = parser.parse_args()
    for model in options.model:
        if not (model / "config.json").is_file():
            raise ConfigError(
                f"{model} is no model; make it by python -m benchmarks.peers.checkpoint"
            )
    native = native_bfloat16()
    result = BENCHMARK.record() | {"native_bfloat16": native, "rounds": []}
    result["command"] = without_paths(result["command"], options)
    options.out.mkdir(parents=True, exist_ok=True)
    for model, rows, kind in product(options.model, ROWS, kinds(native)):
        print(f"{model.name}, {rows} rows, {kind}: {options.pairs} rounds")
        result["rounds"] += rounds_of(model, rows, kind, options)
        save_json(options.out / "peers.json", result)
    write(result, options.out)


if __name__ == "__main__":
    run(main)
