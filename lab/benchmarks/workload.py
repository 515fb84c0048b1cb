"""The burst that our engine and its peers serve.

Knows numpy alone: each peer runs in an environment of its own.
"""

from __future__ import annotations

import numpy as np

DRAWN, LARGEST = 64, 256  # requests: at a time, and at most
Prompted = tuple[list[int], int]  # prompt ids, completion tokens


def draw(n: int = DRAWN) -> list[Prompted]:
    """The first n requests: lengths of the original experiment, ids of GPT-2's vocabulary."""
    requests: list[Prompted] = []
    for seed in range(-(-n // DRAWN)):
        rng = np.random.default_rng(seed)
        tokens = np.clip(np.abs(np.ceil(rng.normal(100, 100, DRAWN))), 1, 200).astype(int)
        lengths = np.clip(np.abs(np.ceil(rng.normal(10, 10, DRAWN))), 1, 64).astype(int)
        prompts = [rng.integers(0, 50256, length).tolist() for length in lengths]
        requests += zip(prompts, tokens.tolist())
    return requests[:n]
