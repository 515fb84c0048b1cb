"""The gaps between tokens that a long prompt makes in the rows beside it, over token budgets.

    python -m benchmarks.long_prompt --model FOLDER [--budgets 16,64,256] [--out FOLDER]
        [any server setting]

16 rows decode; a prompt of 900 tokens arrives; each iteration computes at most token_budget of
them. Measured are the gaps between tokens of the 16 rows from the arrival to the prompt's first
token, against their median before it. Writes a figure to --out.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks import figures
from benchmarks.harness import NO_HTTP, PREFIXES, Benchmark, Numbers, draw, made_by, run
from benchmarks.offline import OfflineServer, wait_for
from config import ConfigError
from scheduling.inference import Inference

ROWS, PROMPT, LIMIT = 16, 900, 4.0
BEFORE = 20  # tokens of each row before the prompt arrives
AFTER = 4  # tokens of the long request
BENCHMARK = Benchmark(
    "long_prompt",
    "Gaps between tokens beside a long prompt.",
    {
        "--budgets": (Numbers("16,32,64,128,256,512,1024"), "token budgets"),
        "--out": (Path("runs/long_prompt"), "folder for the figure"),
    },
    NO_HTTP | PREFIXES,  # the same long prompt comes for each budget
)


def measure(server: OfflineServer, token_budget: int, n_vocab: int) -> dict[str, float]:
    """Serve 16 rows, of enough tokens to overlap, and, once they decode, the long prompt."""
    server.scheduler.limits = replace(server.scheduler.limits, token_budget=token_budget)
    rng = np.random.default_rng(0)
    n_vocab = min(n_vocab, 50256)
    long = Inference(rng.integers(0, n_vocab, PROMPT).tolist(), AFTER)
    tokens = min(BEFORE + 2 * (PROMPT // token_budget + 2) + AFTER + 10, 1000)
    rows = [Inference(rng.integers(0, n_vocab, 10).tolist(), tokens) for _ in range(ROWS)]
    server.manager.enqueue(rows)
    while min(len(row.tokens) for row in rows) < BEFORE:
        time.sleep(0.002)
    server.manager.enqueue([long])
    wait_for([*rows, long])
    first_token = long.token_times[0]
    gaps = [pair for row in rows for pair in zip(row.token_times[1:], row.token_times[2:])]
    before = [later - earlier for earlier, later in gaps if later <= long.arrived_at]
    during = [b - a for a, b in gaps if b > long.arrived_at and a < first_token]
    return {
        "token_budget": token_budget,
        "median_itl_s": statistics.median(before),
        "longest_itl_s": max(during),
        "ttft_s": first_token - long.arrived_at,
    }


def main() -> None:
    options, [config] = BENCHMARK.engine_configs(token_budget=lambda options: max(options.budgets))
    if max(options.budgets) > config.token_budget:
        raise ConfigError(
            f"--budgets {options.budgets}: "
            f"the engine is built for --token-budget {config.token_budget} at most"
        )
    if config.max_batch_size <= ROWS or config.max_model_len < PROMPT + AFTER:
        raise ConfigError(
            f"{ROWS} rows and one of {PROMPT} tokens are needed; "
            f"raise --max-batch-size or --max-model-len"
        )
    server = OfflineServer(config)
    points = []
    print(
        "  token_budget  median gap, ms  longest gap, ms  longest / median  "
        "first token of the prompt, s"
    )
    for budget in options.budgets:
        points.append(point := measure(server, budget, config.shape.vocab_size))
        print(
            f"{budget:14} {1e3 * point['median_itl_s']:15.1f} {1e3 * point['longest_itl_s']:16.1f}"
            f" {point['longest_itl_s'] / point['median_itl_s']:17.1f} {point['ttft_s']:30.2f}"
        )
    server.manager.close()
    record = BENCHMARK.record([config])
    caption = f"a prompt of {PROMPT} tokens beside {ROWS} decoding rows · {made_by(record)}"
    draw(figures.gap_over_budgets(points, LIMIT, caption), options.out / "long_prompt.png")
    print(json.dumps({"rows": ROWS, "prompt_tokens": PROMPT, "points": points} | record))


if __name__ == "__main__":
    run(main)
