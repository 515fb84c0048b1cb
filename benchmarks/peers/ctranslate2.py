"""CTranslate2 in int8 on the burst: one batch, which rows leave as they end.

    PEERS-ENV/bin/python -m benchmarks.peers.ctranslate2 --model FOLDER [--n 64]

It has no continuous batching; in a burst of as many requests as rows nobody would join anyway.
Needs benchmarks/requirements-peers.txt, in an environment of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.peers.tools import THREADS, form, options, tell
from benchmarks.workload import Asked


def steps(requests: Sequence[Asked]) -> list[int]:
    """Of each row, how many it runs in a batch.

    As many tokens as the shortest prompt has are computed at once; what is left of a longer prompt
    takes a step a token, before what is generated.
    """
    at_once = min(len(prompt) for prompt, _ in requests)
    return [len(prompt) - at_once + tokens for prompt, tokens in requests]


def main() -> None:
    asked = options("ctranslate2", ("int8",))
    import ctranslate2

    folder = form(asked.model, "ctranslate2")
    generator = ctranslate2.Generator(str(folder), compute_type="int8", intra_threads=THREADS)

    def serve(requests: Sequence[Asked]) -> list[int]:
        ends, ran = steps(requests), [0] * len(requests)

        def ended(done: Any) -> bool:
            ran[done.batch_id] += 1
            return ran[done.batch_id] == ends[done.batch_id]

        generator.generate_batch(
            [[f"t{i}" for i in prompt] for prompt, _ in requests],
            max_length=max(ends),
            end_token=[],
            include_prompt_in_result=False,  # of which some is there if a prompt has one token
            callback=ended,
        )
        return [tokens + n - end for n, end, (_, tokens) in zip(ran, ends, requests)]

    tell(f"CTranslate2 {ctranslate2.__version__}, int8", asked.n, serve)


if __name__ == "__main__":
    main()
