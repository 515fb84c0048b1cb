"""Other engines on the burst, each run in an environment of its own, which knows nothing of ours.

    VLLM-ENV/bin/python -m lab.benchmarks.peers.engines vllm --model FOLDER [--n 64] …
    PEERS-ENV/bin/python -m lab.benchmarks.peers.engines openvino --model FOLDER …
    PEERS-ENV/bin/python -m lab.benchmarks.peers.engines ctranslate2 --model FOLDER …

vLLM needs lab/benchmarks/requirements-vllm.txt, and where there is apt: apt install
libtcmalloc-minimal4; OpenVINO and CTranslate2 need lab/benchmarks/requirements-peers.txt. FOLDER is
made by lab.benchmarks.peers.checkpoint.
"""

from __future__ import annotations

import argparse
import ctypes.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from lab.benchmarks import HELP
from lab.benchmarks.workload import DRAWN, LARGEST, Prompted, draw

THREADS = 2
Options = argparse.Namespace  # model, n and dtype
Serve = Callable[[Sequence[Prompted]], Sequence[int]]  # returns how many tokens each got
Started = Iterator[tuple[str, Serve]]  # an engine's name and version, for each way that it serves
VLLM_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GB, as ours
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # three processes share the cores with its threads
    "OMP_NUM_THREADS": str(THREADS),
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "STARTED_AGAIN": "1",
}
OPENVINO_PRECISIONS = {  # products', keys' and values', and the form of the weights
    "bfloat16": ("bf16", "bf16", "openvino"),
    "float32": ("f32", "f32", "openvino"),
    # eight bits: weights with a scale per output channel; keys and values by its default
    "int8": (None, "u8", "openvino-int8"),
}


def fail(sentence: str) -> NoReturn:
    """End as bad input does."""
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


def form(folder: Path, name: str) -> str:
    """The place where checkpoint.py has put a peer's form of the model."""
    if not (folder / name).is_dir():
        fail(f"{folder} has no {name}; make it by python -m lab.benchmarks.peers.checkpoint")
    return str(folder / name)


def start_again() -> None:
    """Start vLLM again with its settings, and with the OpenMP and malloc that it advises: a process
    cannot preload a library for itself.
    """
    openmp, malloc = Path(sys.prefix, "lib", "libiomp5.so"), "tcmalloc_minimal"
    libraries = [ctypes.util.find_library(malloc), str(openmp) if openmp.exists() else None]
    if None in libraries:
        print("libtcmalloc_minimal or libiomp5 is missing, without which vLLM is slower")
    preload = [library for library in (*libraries, os.environ.get("LD_PRELOAD")) if library]
    os.environ.update(VLLM_SETTINGS | {"LD_PRELOAD": ":".join(preload)})
    os.execv(sys.executable, [sys.executable, "-m", "lab.benchmarks.peers.engines", *sys.argv[1:]])


def vllm(options: Options) -> Started:
    """vLLM's CPU engine."""
    from vllm import LLM, SamplingParams, __version__

    engine = LLM(
        str(options.model), skip_tokenizer_init=True, dtype=options.dtype, max_num_seqs=LARGEST,
        max_model_len=1024, disable_log_stats=True,
        enable_prefix_caching=False,  # the burst is served twice
    )  # fmt: skip

    def serve(requests: Sequence[Prompted]) -> list[int]:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        params = [
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            for _, tokens in requests
        ]
        answers = engine.generate(prompts, params, use_tqdm=False)
        return [len(answer.outputs[0].token_ids) for answer in answers]

    yield f"vLLM {__version__}", serve


def openvino(options: Options) -> Started:
    """OpenVINO GenAI's continuous batching."""
    products, keys, weights = OPENVINO_PRECISIONS[options.dtype]
    folder = form(options.model, weights)
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 4  # GB, as ours
    scheduler.enable_prefix_caching = False  # the burst is served twice
    settings = {"INFERENCE_NUM_THREADS": THREADS, "KV_CACHE_PRECISION": keys}
    if products:  # otherwise one that suits the processor
        settings["INFERENCE_PRECISION_HINT"] = products
    pipe = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", settings)

    def add(number: int, prompt: list[int], tokens: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
        return pipe.add_request(number, openvino.Tensor(np.array([prompt])), config)

    def serve(requests: Sequence[Prompted]) -> list[int]:
        answers = [add(number, *request) for number, request in enumerate(requests)]
        while pipe.has_non_finished_requests():
            pipe.step()
        return [len(answer.read_all()[0].generated_ids) for answer in answers]

    yield f"OpenVINO GenAI {genai.__version__.split('-')[0]}", serve


def steps(requests: Sequence[Prompted]) -> list[int]:
    """The number of CTranslate2's steps that each row takes part in.

    As many tokens as the shortest prompt has are computed at once; the rest of a longer prompt
    takes a step a token, before its completion.
    """
    at_once = min(len(prompt) for prompt, _ in requests)
    return [len(prompt) - at_once + tokens for prompt, tokens in requests]


def ctranslate2(options: Options) -> Started:
    """CTranslate2: one batch, which rows leave as they end. It has no continuous batching; a burst
    of as many requests as rows needs none.
    """
    folder = form(options.model, "ctranslate2")
    import ctranslate2

    generator = ctranslate2.Generator(folder, compute_type=options.dtype, intra_threads=THREADS)

    def serve(requests: Sequence[Prompted]) -> list[int]:
        ends, ran = steps(requests), [0] * len(requests)

        def ended(done: Any) -> bool:
            ran[done.batch_id] += 1
            return ran[done.batch_id] == ends[done.batch_id]

        generator.generate_batch(
            [[f"t{i}" for i in prompt] for prompt, _ in requests],
            max_length=max(ends),
            end_token=[],
            include_prompt_in_result=False,  # some of it would be there if a prompt has one token
            callback=ended,
        )
        return [tokens + n - end for n, end, (_, tokens) in zip(ran, ends, requests)]

    yield f"CTranslate2 {ctranslate2.__version__}", serve


class Engine(NamedTuple):
    """A peer: how it starts, its kinds of numbers, and what has to be installed for it."""

    start: Callable[[Options], Started]
    dtypes: Sequence[str]
    requirements: str = "lab/benchmarks/requirements-peers.txt"


ENGINES = {
    "vllm": Engine(vllm, ("bfloat16", "float32"), "lab/benchmarks/requirements-vllm.txt"),
    "openvino": Engine(openvino, tuple(OPENVINO_PRECISIONS)),
    "ctranslate2": Engine(ctranslate2, ("int8",)),
}


def measure(name: str, n: int, serve: Serve) -> None:
    """Time the second serving of the burst, when a peer has compiled what it needs; print it."""
    requests = draw(n)
    serve(requests)
    start = time.perf_counter()
    made = serve(requests)
    seconds = time.perf_counter() - start
    if list(made) != [tokens for _, tokens in requests]:
        fail(f"{name} made {sum(made):,} tokens and not each request's number of them")
    print(
        f"{name}: {n} requests, {sum(made):,} tokens in {seconds:.1f} s, "
        f"{sum(made) / seconds:.1f} tok/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, **HELP)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument(
        "--model", type=Path, required=True, help="of lab.benchmarks.peers.checkpoint"
    )
    parser.add_argument("--n", type=int, default=DRAWN, help=f"requests (default: {DRAWN})")
    parser.add_argument("--dtype", help="default: the engine's first")
    options = parser.parse_args()
    engine = ENGINES[options.engine]
    options.dtype = options.dtype or engine.dtypes[0]
    if options.dtype not in engine.dtypes:
        known = " or ".join(engine.dtypes)
        fail(f"--dtype {options.dtype}: {options.engine} computes in {known} here")
    if not 1 <= options.n <= LARGEST:
        fail(f"--n must be from 1 to {LARGEST}")
    try:
        for name, serve in engine.start(options):
            measure(f"{name}, {options.dtype}", options.n, serve)
    except ImportError as error:
        fail(f"{error}; install {engine.requirements} in an environment of its own")


if __name__ == "__main__":
    if "vllm" in sys.argv[1:2] and "STARTED_AGAIN" not in os.environ:
        start_again()
    main()
