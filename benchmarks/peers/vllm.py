"""vLLM's CPU engine on the burst.

    VLLM-ENV/bin/python -m benchmarks.peers.vllm --model FOLDER [--n 64] [--dtype bfloat16]

Needs benchmarks/requirements-vllm.txt, in an environment of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from benchmarks.peers.tools import THREADS, options, tell
from benchmarks.workload import LARGEST, Asked

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GB, as ours
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{THREADS - 1}",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main() -> None:
    asked = options("vllm", ("bfloat16", "float32"))
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
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
    main()
