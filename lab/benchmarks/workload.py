"""The burst that our engine and its peers serve.

Knows numpy alone: each peer runs in an environment of its own.
"""

from __future__ import annotations

import numpy as np

LARGEST = 64
Prompted = tuple[list[int], int]  # prompt ids, completion tokens


def draw(n: int = LARGEST, seed: int = 0) -> list[Prompted]:
    """The first n of 64 requests: lengths of the original experiment, ids of GPT-2's vocabulary."""
    rng = np.random.default_rng(seed)
    tokens = np.clip(np.abs(np.ceil(rng.normal(100, 100, LARGEST))), 1, 200).astype(int)
    lengths = np.clip(np.abs(np.ceil(rng.normal(10, 10, LARGEST))), 1, 64).astype(int)
    prompts = [rng.integers(0, 50256, length).tolist() for length in lengths]
    return list(zip(prompts, tokens.tolist()))[:n]
