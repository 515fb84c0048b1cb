"""A vLLM on this machine: its small model, its traffic, its start and its end."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from client.calls import ServerError, get
from client.load import replay
from client.machine import ROOT
from client.saving import write
from client.traces import Request
from client.wire import wire
from compare.servers import start, stop
from config.config import free_port

LOAD = 0.7  # of what a burst reaches
BLOCK, LONGEST, VOCABULARY = 32, 512, 50257
ROWS, BUDGET, BLOCKS = 16, 256, 1023
FIXED = f"--max-model-len {LONGEST} --block-size {BLOCK} --skip-tokenizer-init --enforce-eager"
BASE, LONG, OVERLOAD, PREFIXES, LEVELS = "base", "long", "overload", "prefixes", "levels"
# of the usual load: simulated from a recording, fcfs then waits 0.2 s for the first token, sjf 0.13
NEAR, NEAR_ROWS, FULL = "near", 8, 1.35
TIMES_AS_LONG = 9
CHECKPOINT = """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
GPT2LMHeadModel(GPT2Config(n_layer=4, n_head=4, n_embd=256)).save_pretrained(sys.argv[1])
"""


def trace(traffic: str, n: int, rate: float, seed: int = 0) -> list[Request]:
    """Return n requests as a Poisson process: prompts of 16 to 300 tokens, answers of 4 to 80. Of
    `long` there are more; of `overload` more come than can be served; of `prefixes` each begins
    with one of four beginnings of 128 tokens; of `levels` every third has the higher priority; of
    `near` each seed has a trace of its own, whose answers are log-normal.
    """
    chance = np.random.default_rng([1, seed] if traffic == NEAR else 1)
    n *= TIMES_AS_LONG if traffic == LONG else 1
    at = np.cumsum(chance.exponential(1 / (rate * {OVERLOAD: 2, NEAR: FULL}.get(traffic, 1)), n))
    shared = chance.integers(0, VOCABULARY, (4, 128)) if traffic == PREFIXES else np.zeros((4, 0))
    prompts, answers = chance.integers(16, 301, n), chance.integers(4, 81, n)
    if traffic == NEAR:  # of the same mean
        answers = np.clip(chance.lognormal(3.4, 0.8, n), 2, 200).astype(int)
    result = []
    for i in range(n):
        own = chance.integers(0, VOCABULARY, prompts[i])
        ids = [*map(int, shared[chance.integers(4)]), *own.tolist()]
        level = 1 + (i % 3 > 0) if traffic == LEVELS else None
        result.append(
            Request(
                id=i,
                at=float(at[i]),
                prompt_ids=ids[:430],
                num_tokens=int(answers[i]),
                priority=level,
            )
        )
    return result


@contextmanager
def vllm(folder: Path, flags: str, recording: Path, order: str = "") -> Iterator[str]:
    """Run vLLM with the recorder, or an order; yield its URL. Raises ServerError if it does not
    come up.
    """
    recording.unlink(missing_ok=True)
    for file in (ROOT / "simulate" / "vllm").glob("vllm_*.py"):
        shutil.copy(file, folder)
    shutil.copytree(ROOT / "scheduling", folder / "scheduling", dirs_exist_ok=True)
    url = f"http://127.0.0.1:{(port := free_port())}"
    environment = os.environ | {
        "RECORD_ITERATIONS": str(recording), "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1",
        "ORDER": order or "fcfs",
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }  # fmt: skip
    words = f"-m vllm.entrypoints.openai.api_server --model {folder} --served-model-name small"
    kind = "vllm_order.OrderedScheduler" if order else "vllm_recorder.AsyncRecordingScheduler"
    scheduler = f"--scheduler-cls {kind}"
    base = f"--max-num-seqs {ROWS} --max-num-batched-tokens {BUDGET}"
    cache = f"--num-gpu-blocks-override {BLOCKS + 1} --no-enable-prefix-caching"
    command = [sys.executable, *f"{words} {FIXED} {scheduler} {base} {cache} {flags}".split()]
    with (folder / "vllm.log").open("wb") as log:
        server = start([*command, "--port", str(port)], log, environment)
        try:
            deadline = time.monotonic() + 300
            while True:
                try:
                    get(f"{url}/v1/models")
                    break
                except ServerError:
                    if server.poll() is not None or time.monotonic() > deadline:
                        raise ServerError(f"vLLM did not start; see {folder}/vllm.log") from None
                    time.sleep(0.5)
            yield url
        finally:
            stop(server)


def rate_of(folder: Path) -> float:
    """Return the requests per second of LOAD, measured once: all runs get the same traces."""
    path = folder / "rate.json"
    if not path.exists():
        burst = [each.model_copy(update={"at": 0.0}) for each in trace(BASE, 6 * ROWS, 1.0)]
        with vllm(folder, "", folder / "burst.jsonl") as url:
            began = time.monotonic()
            replay(url, burst, wire("openai", "small"))
            write(path, json.dumps(round(LOAD * len(burst) / (time.monotonic() - began), 2)))
    return float(json.loads(path.read_text("utf-8")))
