"""Tokens that an engine computes for no request: they fill up rectangles, or fixed batch sizes."""

from __future__ import annotations

from collections.abc import Sequence

from scheduling.inference import Row
from scheduling.policies import Limits


def padding(rows: Sequence[Row], limits: Limits) -> int:
    """Return how many tokens fill up the rectangles of an iteration, or its decode rows a size."""
    n, sizes = len(rows), limits.decoder_batch_sizes
    if limits.padded:
        return sum(
            max(rows[i].n_tokens for i in rectangle) - rows[i].n_tokens
            for rectangle in rectangles(rows, limits.padded)
            for i in rectangle
        )
    if n and sizes and all(row.decodes for row in rows):
        return next((size for size in sizes if size >= n), n) - n
    return 0


def rectangles(rows: Sequence[Row], padded: str) -> list[list[int]]:
    """Return the rows of each rectangle: all (`together`), or decode rows and prompts (`apart`)."""
    every = range(len(rows))
    if padded == "together":
        return [[*every]]
    kinds = [[i for i in every if rows[i].decodes is decodes] for decodes in (True, False)]
    return [indices for indices in kinds if indices]
