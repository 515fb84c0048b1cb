"""The offline burst: n requests at once through the real scheduler, manager and engine, without HTTP.

    python -m benchmarks.burst --model FOLDER --dtype bfloat16 [--n 64] [--modes dynamic,static] [any server setting]

The requests are those of the peers' scripts: lengths of the original experiment, 6,904 completion tokens for 64.
Each mode serves the burst twice: once measured, then once more with a timer around each part. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil

from batching import BatchingManager, Inference, IterationRecord, Sampling
from benchmarks.phases import Phases
from benchmarks.record import record
from config import MODES, Config, ConfigError, Parser, add_settings, build, from_environment, meaningful, refuse_unknown
from generate import load_generator
from generate.cached import CachedGenerator
from serving import create_scheduler
from weights import WeightsUnavailable, locate

LARGEST = 64


def draw(n: int = LARGEST, seed: int = 0) -> list[tuple[list[int], int]]:
    """The first n of 64 requests, as (prompt ids, completion tokens): the draw of the original experiment."""
    rng = np.random.default_rng(seed)
    tokens = np.clip(np.abs(np.ceil(rng.normal(100, 100, LARGEST))), 1, 200).astype(int)
    lengths = np.clip(np.abs(np.ceil(rng.normal(10, 10, LARGEST))), 1, 64).astype(int)
    prompts = [rng.integers(0, 50256, length).tolist() for length in lengths]
    return list(zip(prompts, tokens.tolist()))[:n]


class Engine:
    """A mode's manager with its engine in reach; also an observer that counts iterations."""

    def __init__(self, config: Config, n_vocab: int):
        self.iterations: list[IterationRecord] = []
        self.scheduler = create_scheduler(config)
        path, start = locate(config), time.perf_counter()
        self._manager = BatchingManager(self.scheduler, lambda: self._load(config, path, n_vocab), observers=[self])
        if not self._manager.wait_until_loaded():
            raise self._manager.load_error or RuntimeError("the engine did not load")
        self.load_s = time.perf_counter() - start

    def _load(self, config: Config, path: Any, n_vocab: int) -> CachedGenerator:
        generator = load_generator(config, path, n_vocab)
        assert isinstance(generator, CachedGenerator)
        self.generator = generator
        return generator

    def iteration(self, record: IterationRecord) -> None:
        self.iterations.append(record)

    def answered(self, inference: Inference) -> None:
        pass

    def serve(self, requests: Sequence[tuple[list[int], int]], sampling: Sampling) -> tuple[float, list[Inference]]:
        """Serve all requests, which arrive at once; return the wall-clock seconds and the inferences."""
        self.iterations.clear()
        inferences = [Inference(prompt, tokens, sampling) for prompt, tokens in requests]
        start = time.perf_counter()
        self._manager.enqueue(inferences)
        for inference in inferences:
            inference.done.wait()
            if inference.error:
                raise inference.error
        return time.perf_counter() - start, inferences

    def close(self) -> None:
        self._manager.close()


def measure(config: Config, requests: Sequence[tuple[list[int], int]], sampling: Sampling) -> dict[str, Any]:
    """Serve the burst in one mode: throughput, latency, memory, and the time of each part."""
    engine = Engine(config, config.shape.vocab_size)
    seconds, inferences = engine.serve(requests, sampling)
    tokens = sum(len(inference.tokens) for inference in inferences)
    latencies = [(inference.answered_at or 0.0) - inference.arrived_at for inference in inferences]
    result: dict[str, Any] = {
        "output_throughput": tokens / seconds,
        "wall_clock_s": seconds,
        "mean_e2el_ms": 1e3 * float(np.mean(latencies)),
        "completion_tokens": tokens,
        "iterations": len(engine.iterations),
        "load_s": engine.load_s,
        "resident_gb": psutil.Process().memory_info().rss / 1e9,
        "weights_gb": config.shape.weight_bytes(config.dtype) / 1e9,
        "most_kv_used_gb": max(r.iteration.blocks_used for r in engine.iterations) * config.kv_bytes / config.n_blocks / 1e9,
    }
    phases = Phases()
    phases.watch(engine.scheduler, engine.generator)
    timed_s, _ = engine.serve(requests, sampling)
    engine.close()
    return result | {"timed_wall_clock_s": timed_s, "phases_s": phases.report()}


def parse(argv: Sequence[str]) -> tuple[dict[str, Config], int, Sampling]:
    """Return a Config for each mode, n, and how to sample. Raises ConfigError; exits 0 after --help."""
    parser = Parser(prog="python -m benchmarks.burst", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--n", type=int, default=LARGEST, help=f"requests, at most {LARGEST} (default: {LARGEST})")
    parser.add_argument("--modes", default="dynamic", help=f"of {', '.join(MODES)}, separated by commas (default: dynamic)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    parser.add_argument("--top-p", type=float, default=None)
    add_settings(parser)
    known, unknown = parser.parse_known_args(argv)
    refuse_unknown(parser, unknown)
    if not 1 <= known.n <= LARGEST:
        raise ConfigError(f"--n must be from 1 to {LARGEST}")
    flags = {"max_batch_size": str(known.n)} | {k: v for k, v in vars(known).items() if k in Config.model_fields}
    configs = {
        mode: build(mode, {k: v for k, v in flags.items() if meaningful(k, mode)}, from_environment(os.environ))
        for mode in known.modes.split(",")
    }
    for config in configs.values():
        if config.model == "fake" or config.generator == "naive" or config.shape.vocab_size < 50257:
            raise ConfigError("the burst needs a GPT-2 with GPT-2's vocabulary and the cached generator; name another --model")
    return configs, known.n, Sampling(known.temperature, None, known.top_p, seed=0)


def main() -> None:
    try:
        configs, n, sampling = parse(sys.argv[1:])
        requests = draw(n)
        results = {}
        for mode, config in configs.items():
            results[mode] = found = measure(config, requests, sampling)
            print(
                f"{mode}: {n} requests, {found['completion_tokens']:,} tokens in {found['wall_clock_s']:.1f} s, "
                f"{found['output_throughput']:.1f} tok/s, mean latency {found['mean_e2el_ms'] / 1e3:.2f} s"
            )
            whole = sum(found["phases_s"].values())
            for name, seconds in found["phases_s"].items():
                milliseconds = 1e3 * seconds / found["iterations"]
                print(f"  {name:26} {milliseconds:8.2f} ms an iteration  {100 * seconds / whole:5.1f}%")
    except (ConfigError, WeightsUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps({"modes": results} | record(next(iter(configs.values())))))


if __name__ == "__main__":
    main()
