"""OpenVINO GenAI's continuous batching on the burst.

    PEERS-ENV/bin/python -m benchmarks.peers.openvino --model FOLDER [--n 64] [--dtype bfloat16]

int8: weights of eight bits, a scale per output channel, and keys and values of eight bits, which is
its default. Needs benchmarks/requirements-peers.txt, in an environment of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.peers.tools import THREADS, form, options, tell
from benchmarks.workload import Asked

PRECISIONS = {  # of --dtype: of products, of keys and values, and the form of the weights
    "bfloat16": ("bf16", "bf16", "openvino"),
    "float32": ("f32", "f32", "openvino"),
    "int8": (None, "u8", "openvino-int8"),
}


def main() -> None:
    asked = options("openvino", tuple(PRECISIONS))
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 4  # GB, as ours
    scheduler.enable_prefix_caching = False  # the burst is served twice
    products, keys, weights = PRECISIONS[asked.dtype]
    settings = {
        "INFERENCE_NUM_THREADS": THREADS,
        "KV_CACHE_PRECISION": keys,
    }
    if products:  # else what suits the processor
        settings["INFERENCE_PRECISION_HINT"] = products
    folder = form(asked.model, weights)
    pipe = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", settings)

    def add(number: int, prompt: list[int], tokens: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
        return pipe.add_request(number, openvino.Tensor(np.array([prompt])), config)

    def serve(requests: Sequence[Asked]) -> list[int]:
        answers = [add(number, *request) for number, request in enumerate(requests)]
        while pipe.has_non_finished_requests():
            pipe.step()
        return [len(answer.read_all()[0].generated_ids) for answer in answers]

    tell(f"OpenVINO GenAI {genai.__version__.split('-')[0]}, {asked.dtype}", asked.n, serve)


if __name__ == "__main__":
    main()
