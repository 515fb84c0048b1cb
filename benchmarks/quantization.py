"""What int8 weights and int8 keys and values give, as axes of batching: step time over rows and
contexts, and a burst on a pool too small for it.

    python -m benchmarks.quantization --model FOLDER [--rows 1,8,32,64] [--contexts 256,1024]
        [--rounds 3] [--pool-gb 0.06] [--out DIR] [any server setting]

The variants' engines stand side by side in one process and take turns at every step; a gain is the
plain variant's step over another's in the same turn. Where weights happen to lie makes engines of
the same settings differ, too: so each round is a process that loads them anew and in another order,
and the plain variant is there twice, as a control. In each round, too, every variant serves a burst
on a pool of so many bytes, in a process of its own. Writes a page, a figure and every number.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import figures
from benchmarks.engine import fill, step_seconds
from benchmarks.harness import NO_HTTP, PREFIXES, Benchmark, Numbers, made_by, ratios, run
from benchmarks.offline import (
    OfflineServer,
    decode_rows,
    load_engine,
    refuse_few_ids,
    refuse_what_does_not_fit,
)
from benchmarks.workload import LARGEST, draw
from compare.report.tables import markdown
from config import ONLY_IN, Config, ConfigError
from scheduling.sampling import Sampling

PLAIN, CONTROL = "plain", "plain again"
VARIANTS: dict[str, list[str]] = {
    PLAIN: [],
    "linear int8": ["--linear", "int8"],
    "kv int8": ["--kv-dtype", "int8"],
    "both int8": ["--linear", "int8", "--kv-dtype", "int8"],
}
TURNS = 3  # of each round, for each number of rows and context
BENCHMARK = Benchmark(
    "quantization",
    "What int8 gives, by rows and context, and on a small pool.",
    {
        "--rows": (Numbers("1,8,32,64"), "rows of a step"),
        "--contexts": (Numbers("256,1024"), "tokens of each row"),
        "--rounds": (3, f"of {TURNS} turns each"),
        "--pool-gb": (0.06, "KV blocks of the burst"),
        "--out": (Path("runs/quantization"), "folder"),
    },
    # the pools are the benchmark's own: one holds all rows, the other is --pool-gb
    NO_HTTP | PREFIXES | {"mode", "max_waiting", "loop_interval_ms", *ONLY_IN}
    | {"kv_cache"},
)  # fmt: skip
Steps = dict[str, list[float]]  # of each variant the seconds of each turn
Pool = Mapping[str, float]  # measurements of a burst


def time_steps(
    configs: Mapping[str, Config], rows: Sequence[int], contexts: Sequence[int]
) -> list[Steps]:
    """Load the engines in the order of `configs`; of each context and number of rows, their turns.

    A turn is two steps, of which the second counts: the first brings caches from the last
    engine's weights to its own.
    """
    engines = {}
    for name, config in configs.items():
        torch.set_num_threads(config.threads)
        blocks = max(rows) * -(-max(contexts) // config.block_size)
        # warming up needs a request's, too
        pool = f"{max(blocks, config.blocks_per_request)}blocks"
        engines[name] = load_engine(config.model_copy(update={"kv_cache": pool}))
        fill(engines[name].attention.cache)
    points = []
    for context in contexts:
        for n in rows:
            steps: Steps = {name: [] for name in configs}
            for _ in range(TURNS):
                for name, engine in engines.items():
                    decode = decode_rows(n, context, configs[name].block_size)
                    steps[name].append(step_seconds(engine, decode, repeats=1))
            points.append(steps)
    return points


def serve_burst(config: Config) -> Pool:
    """The burst of benchmarks.burst on this config's pool."""
    server = OfflineServer(config)
    seconds, inferences = server.serve(draw(), Sampling())
    busy_s = sum(each.seconds for each in server.iterations)
    result = {
        "kv_blocks": server.manager.snapshot().n_blocks,
        "rows": sum(e.seconds * e.iteration.running for e in server.iterations) / busy_s,
        "iterations": len(server.iterations),
        "seconds": seconds,
        "throughput": sum(len(inference.tokens) for inference in inferences) / seconds,
    }
    server.manager.close()
    return result


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in a new process, which gives all memory back."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def measure(
    configs: Mapping[str, Config],
    capped: Mapping[str, Config],
    rows: Sequence[int],
    contexts: Sequence[int],
    rounds: int,
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Steps and bursts: medians, and the gains over the plain variant in each turn and round.

    configs: of the steps, with the control. capped: of the bursts.
    """
    names = list(configs)
    places = [(context, n) for context in contexts for n in rows]
    turns: list[Steps] = [{name: [] for name in names} for _ in places]
    bursts: dict[str, list[Pool]] = {name: [] for name in capped}
    for i in range(rounds):
        order = names[i % len(names) :] + names[: i % len(names)]
        found = alone(time_steps, {name: configs[name] for name in order}, rows, contexts)
        for point, steps in zip(turns, found):
            for name in names:
                point[name] += steps[name]
        for name, config in capped.items():
            bursts[name].append(alone(serve_burst, config))
    steps = [
        {
            "context": context,
            "rows": n,
            "seconds": {name: statistics.median(point[name]) for name in names},
            "gains": {n: ratios(point[PLAIN], point[n]) for n in names if n != PLAIN},
        }
        for (context, n), point in zip(places, turns)
    ]
    seconds = {name: [each["seconds"] for each in pools] for name, pools in bursts.items()}
    pools = {
        name: {
            key: statistics.median(each[key] for each in bursts[name]) for key in bursts[name][0]
        }
        | {"gains": ratios(seconds[PLAIN], seconds[name])}
        for name in bursts
    }
    return steps, pools


def steps_table(steps: Sequence[Mapping[str, Any]]) -> str:
    """The plain step in ms; of the others the median gain and, in brackets, the middle half."""
    names = list(steps[0]["gains"])
    table = [["context", "rows", "plain, ms", *names]]
    for step in steps:
        quartiles = [np.percentile(step["gains"][name], (50, 25, 75)) for name in names]
        gains = [f"× {middle:.2f} ({low:.2f}–{high:.2f})" for middle, low, high in quartiles]
        plain = f"{1e3 * step['seconds'][PLAIN]:.1f}"
        table.append([str(step["context"]), str(step["rows"]), plain, *gains])
    return markdown(table, left=2)


def pools_table(pools: Mapping[str, Mapping[str, Any]]) -> str:
    table = [["variant", "blocks", "rows on average", "iterations", "tok/s", "gain"]]
    for name, pool in pools.items():
        cells = [f"{pool['kv_blocks']:,}", f"{pool['rows']:.1f}", f"{pool['iterations']:,}"]
        gain = statistics.median(pool["gains"])
        table.append([name, *cells, f"{pool['throughput']:,.0f}", f"× {gain:.2f}"])
    return markdown(table)


def main() -> None:
    configs = {}
    for name, flags in VARIANTS.items():
        options, [configs[name]] = BENCHMARK.engine_configs(
            more=flags, max_batch_size=lambda options: max(options.rows)
        )
    configs[CONTROL] = plain = configs[PLAIN]
    if "int8" in (plain.multiplied_as, plain.kept_as):
        raise ConfigError("the plain variant is int8 itself; leave --linear and --kv-dtype out")
    refuse_few_ids(plain)
    refuse_what_does_not_fit(plain, options.rows, options.contexts)
    capped = {
        name: configs[name].model_copy(update={"kv_cache": f"{options.pool_gb}GB"})
        for name in VARIANTS
    }
    if capped[PLAIN].n_blocks < plain.blocks_per_request:
        raise ConfigError(
            f"--pool-gb {options.pool_gb:g} holds no request of {plain.max_model_len} tokens; "
            f"raise it, or lower --max-model-len"
        )
    steps, pools = measure(configs, capped, options.rows, options.contexts, options.rounds)
    record = BENCHMARK.record([plain])
    result = {"steps": steps, "pools": pools, "variants": VARIANTS} | record
    body = (
        f"Gains are the plain variant's step over another's in the same turn: medians of "
        f"{TURNS * options.rounds} turns, in brackets their middle half. "
        f"`{CONTROL}` has the plain variant's settings: what it differs by is chance.\n\n"
        f"{steps_table(steps)}\n\n"
        f"## {1e3 * options.pool_gb:g} MB of KV blocks\n\n"
        f"The burst of benchmarks.burst, {LARGEST} requests at once; medians of {options.rounds}, "
        f"gains over the plain variant's burst of the same round.\n\n"
        f"{pools_table(pools)}"
    )
    figure = figures.quantization(
        steps, pools, CONTROL, options.pool_gb,
        f"{made_by(record)} · medians and the middle half of {TURNS * options.rounds} turns, "
        f"medians of {options.rounds} bursts",
    )  # fmt: skip
    BENCHMARK.write(
        options.out, "int8 as an axis of batching", made_by(record), body, result,
        ("Gain over rows", figure),
    )  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    run(main)
