"""What other simulators published of real runs of vLLM, and what is foreseen here of the same runs.

The file has no licence, so that it is not here; it belongs to github.com/inference-sim/
sim-to-real-accuracy-validation, commit 7f3b27022dcd575958a2f0c7b2373afece64c655:

    python -m lab.studies.published error_records.csv   # its results_iter36/error_records.csv

Only runs are taken whose model and GPUs have costs in results/costs.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from client.traces import Request
from compare.report.tables import markdown
from lab.studies import real
from simulate.costs import Costs, load


class Load(NamedTuple):
    """Tokens of a prompt that its group has in common, its own, those of a completion, and stages
    of requests per second and seconds.
    """

    common: int
    own: int
    completion: int
    stages: Sequence[tuple[float, float]]


# of inference-sim/inference-sim (Apache-2.0), commit f90a1e3a, testdata/trained_physics_iter29.json
LOADS = {
    "general": Load(100, 447, 248, [(8, 600), (20, 600)]),
    "general-lite": Load(100, 447, 248, [(2.5, 600), (6, 600)]),
    "codegen": Load(100, 466, 247, [(5, 600), (10, 600)]),
    "roleplay": Load(150, 600, 251, [(6, 1200)]),
    "reasoning": Load(100, 934, 1448, [(4, 1200)]),
}
# Such runs in inference-sim/training (commit ed5c1d26, results/config.yaml) have inference-perf's
# default of prompts, which it sends again and again; vLLM caches prefixes, as their design says.
GROUPS, PROMPTS = 10, 100
PART = 4  # stages are simulated for this part of their time
SERVER = {"max_batch_size": 128, "max_model_len": 4096, "prefix_caching": True}
COSTS = {
    ("meta-llama/Llama-3.1-8B-Instruct", "H100", "1"): "h100-llama-3.1-8b",
    ("meta-llama/Llama-3.1-8B-Instruct", "A100-80GB", "1"): "a100-llama-3.1-8b",
    ("meta-llama/Llama-3.1-8B-Instruct", "L40S", "1"): "l40s-llama-3.1-8b",
    ("mistralai/Mixtral-8x7B-v0.1", "H100", "2"): "h100-mixtral-8x7b-tp2",
}
MEASURES = {"e2e_mean": real.LATENCY, "ttft_mean": real.TTFT, "itl_mean": real.TPOT}
OURS = "this repository"
Row = Mapping[str, str]


def requests(of: Load, seed: int = 0) -> list[Request]:
    """Return requests at exponential intervals that fill each stage, as inference-perf sends."""
    rng = np.random.default_rng(seed)
    common = rng.integers(50_000, size=(GROUPS, of.common))
    own = rng.integers(50_000, size=(PROMPTS, of.own))
    prompts = [[*common[i % GROUPS].tolist(), *own[i].tolist()] for i in range(PROMPTS)]
    instants: list[float] = []
    begin = 0.0
    for rate, seconds in of.stages:
        intervals = rng.exponential(size=int(rate * seconds / PART))
        instants += (begin + intervals.cumsum() / intervals.sum() * seconds / PART).tolist()
        begin += seconds / PART
    return [
        Request(id=i, at=at, prompt_ids=prompts[i % PROMPTS], num_tokens=of.completion)
        for i, at in enumerate(instants)
    ]


def foreseen(costs: Costs, of: Load, budget: int) -> dict[str, float]:
    """Return the means of latency, TTFT and TPOT, in ms."""
    found = real.served(costs, requests(of), token_budget=budget, **SERVER)
    return {name: 1e3 * float(found[name].mean()) for name in MEASURES.values()}


def errors(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return errors in percent, by model, simulator and measure. rows: of the file."""
    found: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(dict)
    of_runs = defaultdict(list)
    for row in rows:
        pair = row["model"], row["hardware"], row["tp"]
        if pair in COSTS and row["stage_index"] == "-1" and row["metric_name"] in MEASURES:
            of_runs[row["exp_id"], COSTS[pair]].append(row)
    for (_, name), run in of_runs.items():
        first, real_ms = run[0], {}
        of_model = found[first["model"].split("/")[1]]
        for row in run:
            measure, actual = MEASURES[row["metric_name"]], float(row["actual"])
            _add(of_model, row["simulator"], measure, float(row["predicted"]), actual)
            real_ms[measure] = actual
        budget = int(first["max_num_batched_tokens"])
        for measure, ms in foreseen(load(name), LOADS[first["workload"]], budget).items():
            _add(of_model, OURS, measure, ms, real_ms[measure])
    return found


def _add(
    of_model: dict[str, dict[str, list[float]]], who: str, measure: str, ms: float, actual: float
) -> None:
    of_measures = of_model.setdefault(who, {name: [] for name in MEASURES.values()})
    of_measures[measure].append(100 * (ms / actual - 1))


def table(rows: Sequence[Row]) -> str:
    """Return the table of a mean error of latencies, and of the means of absolute errors."""
    names = list(MEASURES.values())
    lines = [["model", "simulator", "runs", "latency", *(f"|{name}|" for name in names)]]
    for model, simulators in errors(rows).items():
        for who, of in sorted(simulators.items(), key=lambda each: each[0] != OURS):
            means = [f"{np.abs(of[name]).mean():.1f}" for name in names]
            mean = f"{np.mean(of[real.LATENCY]):+.1f}"
            lines.append([model, who, str(len(of[real.LATENCY])), mean, *means])
    return markdown(lines, left=2)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.studies.published", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path, metavar="error_records.csv")
    path = parser.parse_args().file
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        sys.exit(f"error: {path} cannot be read ({error.strerror}); download it as --help says")
    print(table(rows))


if __name__ == "__main__":
    main()
