"""What a long prompt does to the rows that decode beside it, over token budgets.

    python -m benchmarks.long_prompt --model FOLDER [--budgets 16,64,256] [--out FOLDER]
        [any server setting]

16 rows decode; a prompt of 900 tokens arrives; each iteration computes at most token_budget of
them. Measured are the gaps between tokens of the 16 rows from the arrival to the prompt's first
token, against their median before it. The last line is JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import figures
from benchmarks.common import NO_HTTP, PREFIXES, Engine, configs, record, run, wait_for
from benchmarks.engine import numbers
from client.machine import processor
from compare.report import drawing
from config import ConfigError, Parser
from scheduling.inference import Inference

ROWS, PROMPT, LIMIT = 16, 900, 4.0
BEFORE = 20  # tokens of each row before the prompt arrives
AFTER = 4  # tokens of the long request
UNUSED = NO_HTTP | PREFIXES  # the same long prompt comes for each budget


def measure(engine: Engine, token_budget: int, n_vocab: int) -> dict[str, float]:
    """Serve 16 rows, of enough tokens to overlap, and, once they decode, the long prompt."""
    engine.scheduler.limits = replace(engine.scheduler.limits, token_budget=token_budget)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, min(n_vocab, 50256), PROMPT).tolist()
    tokens = BEFORE + 2 * (PROMPT // token_budget + 2) + AFTER + 10
    rows = [
        Inference(rng.integers(0, min(n_vocab, 50256), 10).tolist(), min(tokens, 1000))
        for _ in range(ROWS)
    ]
    long = Inference(prompt, AFTER)
    engine.manager.enqueue(rows)
    while min(len(row.tokens) for row in rows) < BEFORE:
        time.sleep(0.002)
    engine.manager.enqueue([long])
    wait_for([*rows, long])
    first_token = long.token_times[0]
    before, during = [], []
    for row in rows:
        for earlier, later in zip(row.token_times[1:], row.token_times[2:]):
            if later <= long.arrived_at:
                before.append(later - earlier)
            elif earlier < first_token:
                during.append(later - earlier)
    return {
        "token_budget": token_budget,
        "median_itl_s": statistics.median(before),
        "longest_itl_s": max(during),
        "ttft_s": first_token - long.arrived_at,
    }


def main() -> None:
    parser = Parser(
        prog="python -m benchmarks.long_prompt",
        description="Gaps beside a long prompt.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--budgets", default="16,32,64,128,256,512,1024", help="default: 16,32,64,128,256,512,1024"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/long_prompt"), help="folder for the figure"
    )
    options, [config] = configs(
        parser,
        sys.argv[1:],
        lambda known: ["dynamic"],
        UNUSED,
        token_budget=lambda known: max(numbers(known.budgets)),
    )
    budgets = numbers(options.budgets)
    if max(budgets) > config.token_budget:
        raise ConfigError(
            f"--budgets {options.budgets}: "
            f"the engine is built for --token-budget {config.token_budget} at most"
        )
    if config.max_batch_size <= ROWS or config.max_model_len < PROMPT + AFTER:
        raise ConfigError(
            f"{ROWS} rows and one of {PROMPT} tokens are needed; "
            f"raise --max-batch-size or --max-model-len"
        )
    engine = Engine(config)
    points: list[dict[str, float]] = []
    print(
        "  token_budget  median gap, ms  longest gap, ms  longest / median  "
        "first token of the prompt, s"
    )
    for budget in budgets:
        points.append(point := measure(engine, budget, config.shape.vocab_size))
        print(
            f"{budget:14} {1e3 * point['median_itl_s']:15.1f} {1e3 * point['longest_itl_s']:16.1f}"
            f" {point['longest_itl_s'] / point['median_itl_s']:17.1f} {point['ttft_s']:30.2f}"
        )
    engine.manager.close()
    result: dict[str, Any] = {"rows": ROWS, "prompt_tokens": PROMPT, "points": points} | record(
        [config], UNUSED
    )
    options.out.mkdir(parents=True, exist_ok=True)
    caption = (
        f"a prompt of {PROMPT} tokens beside {ROWS} decoding rows · "
        f"{Path(config.model).name}, {config.dtype} · "
        f"{processor(result['hardware'], result['config'])} · commit {result['commit']}"
    )
    drawing.save(figures.gap_over_budgets(points, LIMIT, caption), options.out / "long_prompt.png")
    print(f"figure: {options.out / 'long_prompt.png'}")
    print(json.dumps(result))


if __name__ == "__main__":
    run(main)
