"""vLLM's CPU engine on the burst.

    VLLM-ENV/bin/python -m benchmarks.peers.vllm --model FOLDER [--n 64] [--dtype bfloat16]

Needs benchmarks/requirements-vllm.txt, in an environment of its own, and where there is apt:
apt install libtcmalloc-minimal4.
"""

from __future__ import annotations

import ctypes.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.tools import THREADS, options, tell
from benchmarks.workload import LARGEST, Asked

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GB, as ours
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # three processes share the cores with its threads
    "OMP_NUM_THREADS": str(THREADS),
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "STARTED_AGAIN": "1",
}


def start_again() -> None:
    """With its settings, and the OpenMP and malloc that its documentation wants, where they are.

    A process cannot preload a library for itself.
    """
    openmp, malloc = Path(sys.prefix, "lib", "libiomp5.so"), "tcmalloc_minimal"
    found = [ctypes.util.find_library(malloc), str(openmp) if openmp.exists() else None]
    if None in found:
        print("libtcmalloc_minimal or libiomp5 is missing, without which vLLM is slower")
    preload = [library for library in (*found, os.environ.get("LD_PRELOAD")) if library]
    os.environ.update(SETTINGS | {"LD_PRELOAD": ":".join(preload)})
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.peers.vllm", *sys.argv[1:]])


def main() -> None:
    asked = options("vllm", ("bfloat16", "float32"))
    from vllm import LLM, SamplingParams, __version__

    engine = LLM(
        str(asked.model),
        skip_tokenizer_init=True,
        dtype=asked.dtype,
        max_num_seqs=LARGEST,
        max_model_len=1024,
        enable_prefix_caching=False,  # the burst is served twice
        disable_log_stats=True,
    )

    def serve(requests: Sequence[Asked]) -> list[int]:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        params = [
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            for _, tokens in requests
        ]
        answers = engine.generate(prompts, params, use_tqdm=False)
        return [len(answer.outputs[0].token_ids) for answer in answers]

    tell(f"vLLM {__version__}, {asked.dtype}", asked.n, serve)


if __name__ == "__main__":
    if "STARTED_AGAIN" not in os.environ:
        start_again()
    main()
