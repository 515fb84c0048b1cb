"""What int8 weights and int8 keys and values give, as axes of batching: step time over rows and
contexts, and a burst on a pool too small for it.

    python -m benchmarks.quantization --model FOLDER [--rows 1,8,32,64] [--contexts 256,1024]
        [--rounds 3] [--pool-gb 0.06] [--out DIR] [any server setting]

The variants' engines stand side by side in one process and take turns at every step, so that they
share each minute of a machine whose speed changes by the minute; a gain is the plain variant's step
over another's in the same turn. Where weights happen to lie makes engines of the same settings
differ, too: so each round is a process that loads them anew and in another order, and the plain
variant is there twice, as a control. In each round, too, every variant serves a burst on a pool of
so many bytes, in a process of its own. Writes a page, a figure and every number to --out.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import figures
from benchmarks.burst import refuse_few_ids
from benchmarks.common import NO_HTTP, PREFIXES, Engine, configs, record, run
from benchmarks.engine import decode_rows, fill, numbers, step_seconds
from benchmarks.workload import LARGEST, draw
from client.machine import processor
from compare.report.tables import markdown
from config import ONLY_IN, Config, ConfigError, Parser
from generate import load_generator
from generate.cached import CachedGenerator
from scheduling.inference import Sampling
from studies.runner import Page, write
from weights import locate

PLAIN, CONTROL = "plain", "plain again"
VARIANTS: dict[str, list[str]] = {
    PLAIN: [],
    "linear int8": ["--linear", "int8"],
    "kv int8": ["--kv-dtype", "int8"],
    "both int8": ["--linear", "int8", "--kv-dtype", "int8"],
}
TURNS = 3  # of each round, for each number of rows and context
# the pools are the benchmark's own: one holds all rows, the other is --pool-gb
UNUSED = NO_HTTP | PREFIXES | {"mode", "max_waiting", "loop_interval_ms", *ONLY_IN}
UNUSED |= {"kv_cache"}
PAGE = Page(
    "benchmarks.quantization", "quantization", "int8 as an axis of batching", "Gain over rows"
)
Steps = dict[str, list[float]]  # of each variant the seconds of each turn


def time_steps(
    built: Mapping[str, Config], rows: Sequence[int], contexts: Sequence[int]
) -> list[Steps]:
    """Load the engines in the order of `built`; for each context and number of rows, their turns.

    A turn is two steps, of which the second counts: the first brings caches from the last
    engine's weights to its own.
    """
    generators: dict[str, CachedGenerator] = {}
    for name, config in built.items():
        torch.set_num_threads(config.threads)
        blocks = max(rows) * -(-max(contexts) // config.block_size)
        # warming up needs a request's, too
        n_blocks = max(blocks, config.blocks_per_request)
        whole = config.model_copy(update={"kv_cache": f"{n_blocks}blocks"})
        generator = load_generator(whole, locate(whole), whole.shape.vocab_size)
        assert isinstance(generator, CachedGenerator)
        fill(generator.attention.cache)
        generators[name] = generator
    found = []
    for context in contexts:
        for n in rows:
            point: Steps = {name: [] for name in built}
            for _ in range(TURNS):
                for name, generator in generators.items():
                    decode = decode_rows(n, context, built[name].block_size)
                    point[name].append(step_seconds(generator, decode, repeats=1))
            found.append(point)
    return found


def serve_burst(config: Config) -> dict[str, float]:
    """The burst of benchmarks.burst on this config's pool."""
    engine = Engine(config)
    seconds, inferences = engine.serve(draw(), Sampling())
    busy_s = sum(each.seconds for each in engine.iterations)
    result = {
        "kv_blocks": engine.manager.snapshot().n_blocks,
        "rows": sum(e.seconds * e.iteration.running for e in engine.iterations) / busy_s,
        "iterations": len(engine.iterations),
        "seconds": seconds,
        "throughput": sum(len(inference.tokens) for inference in inferences) / seconds,
    }
    engine.manager.close()
    return result


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in a new process, which gives all memory back."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def measure(
    built: Mapping[str, Config],
    capped: Mapping[str, Config],
    rows: Sequence[int],
    contexts: Sequence[int],
    rounds: int,
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Of each context and number of rows the median step of each variant, and its gains; of each
    variant what it made of the burst.
    """
    names = list(built)
    places = [(context, n) for context in contexts for n in rows]
    turns: list[Steps] = [{name: [] for name in names} for _ in places]
    bursts: dict[str, list[dict[str, float]]] = {name: [] for name in capped}
    for i in range(rounds):
        order = names[i % len(names) :] + names[: i % len(names)]
        found = alone(time_steps, {name: built[name] for name in order}, rows, contexts)
        for mine, its in zip(turns, found):
            for name in names:
                mine[name] += its[name]
        for name, config in capped.items():
            bursts[name].append(alone(serve_burst, config))
    steps = [
        {
            "context": context,
            "rows": n,
            "seconds": {name: statistics.median(mine[name]) for name in names},
            "gains": {name: gains(mine[PLAIN], mine[name]) for name in names if name != PLAIN},
        }
        for (context, n), mine in zip(places, turns)
    ]
    seconds = {name: [each["seconds"] for each in mine] for name, mine in bursts.items()}
    pools = {
        name: {key: statistics.median(each[key] for each in mine) for key in mine[0]}
        | {"gains": gains(seconds[PLAIN], seconds[name])}
        for name, mine in bursts.items()
    }
    return steps, pools


def gains(plain: Sequence[float], its: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(plain, its, strict=True)]


def steps_table(steps: Sequence[Mapping[str, Any]]) -> str:
    """The plain step in ms; of the others the median gain and, in brackets, the middle half."""
    names = list(steps[0]["gains"])
    table = [["context", "rows", "plain, ms", *names]]
    for step in steps:
        quartiles = [np.percentile(step["gains"][name], (50, 25, 75)) for name in names]
        told = [f"× {middle:.2f} ({low:.2f}–{high:.2f})" for middle, low, high in quartiles]
        plain = f"{1e3 * step['seconds'][PLAIN]:.1f}"
        table.append([str(step["context"]), str(step["rows"]), plain, *told])
    return markdown(table, left=2)


def pools_table(pools: Mapping[str, Mapping[str, Any]]) -> str:
    table = [["variant", "blocks", "rows on average", "iterations", "tok/s", "gain"]]
    for name, pool in pools.items():
        gain = statistics.median(pool["gains"])
        cells = [f"{pool['kv_blocks']:,}", f"{pool['rows']:.1f}", f"{pool['iterations']:,}"]
        table.append([name, *cells, f"{pool['throughput']:,.0f}", f"× {gain:.2f}"])
    return markdown(table)


def parsed(flags: Sequence[str]) -> tuple[Any, Config]:
    """The options, and the config of a variant."""
    parser = Parser(
        prog="python -m benchmarks.quantization",
        description="What int8 gives, by rows and context, and on a small pool.",
        allow_abbrev=False,
    )
    parser.add_argument("--rows", default="1,8,32,64", help="default: 1,8,32,64")
    parser.add_argument("--contexts", default="256,1024", help="of each row (default: 256,1024)")
    parser.add_argument("--rounds", type=int, default=3, help=f"of {TURNS} turns each (default: 3)")
    parser.add_argument(
        "--pool-gb", type=float, default=0.06, help="KV blocks of the burst (default: 0.06)"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/quantization"), help="folder")
    options, [config] = configs(
        parser,
        [*sys.argv[1:], *flags],
        lambda known: ["dynamic"],
        UNUSED,
        max_batch_size=lambda known: max(numbers(known.rows)),
    )
    return options, config


def main() -> None:
    built = {}
    for name, flags in VARIANTS.items():
        options, built[name] = parsed(flags)
    built[CONTROL] = plain = built[PLAIN]
    if "int8" in (plain.multiplied_as, plain.kept_as):
        raise ConfigError("the plain variant is int8 itself; leave --linear and --kv-dtype out")
    refuse_few_ids(plain)
    rows, contexts = numbers(options.rows), numbers(options.contexts)
    if max(contexts) > plain.max_model_len:
        raise ConfigError(
            f"this model's rows hold at most {plain.max_model_len} tokens; lower --contexts"
        )
    if max(rows) > plain.max_batch_size:
        raise ConfigError(
            f"--rows {options.rows}: "
            f"the engine is built for --max-batch-size {plain.max_batch_size} at most"
        )
    capped = {
        name: built[name].model_copy(update={"kv_cache": f"{options.pool_gb}GB"})
        for name in VARIANTS
    }
    if capped[PLAIN].n_blocks < plain.blocks_per_request:
        raise ConfigError(
            f"--pool-gb {options.pool_gb:g} holds no request of {plain.max_model_len} tokens; "
            f"raise it, or lower --max-model-len"
        )
    rounds = max(1, options.rounds)
    steps, pools = measure(built, capped, rows, contexts, rounds)
    result = {"steps": steps, "pools": pools, "variants": VARIANTS} | record([plain], UNUSED)
    of = f"{result['config']['model']}, {plain.dtype}, linear layers {plain.linear}"
    told_of = f"{of}; {processor(result['hardware'], result['config'])}"
    body = (
        f"Gains are the plain variant's step over another's in the same turn: medians of "
        f"{TURNS * rounds} turns, in brackets their middle half. "
        f"`{CONTROL}` has the plain variant's settings: what it differs by is chance.\n\n"
        f"{steps_table(steps)}\n\n"
        f"## {1e3 * options.pool_gb:g} MB of KV blocks\n\n"
        f"The burst of benchmarks.burst, {LARGEST} requests at once; medians of {rounds}, "
        f"gains over the plain variant's burst of the same round.\n\n"
        f"{pools_table(pools)}"
    )
    figure = figures.quantization(
        steps,
        pools,
        CONTROL,
        options.pool_gb,
        f"{told_of} · medians and the middle half of {TURNS * rounds} turns, "
        f"medians of {rounds} bursts · commit {result['commit']}",
    )
    write(PAGE, options.out, told_of, body, figure, result)
    print(json.dumps(result))


if __name__ == "__main__":
    run(main)
