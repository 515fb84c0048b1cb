"""Draft tokens: guesses at an inference's next tokens, which one iteration verifies all at once
(Leviathan et al., ICML 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice


@dataclass(slots=True)
class Drafts:
    """Draft tokens of an inference, and how many were accepted so far."""

    ids: list[int] = field(default_factory=list)  # proposed for its next tokens
    blocks: int = 0  # KV blocks that it would have without those that are verified now
    verified: int = 0  # draft tokens so far
    accepted: int = 0  # of these


def read_draft(text: str) -> tuple[str, str]:
    """Return where draft tokens come from: a kind, and its folder or rates.

    Raises ValueError, with a sentence.
    """
    kind, colon, value = text.partition(":")
    if (kind, colon) == ("ngram", "") or (kind == "model" and value):
        return kind, value
    if kind == "acceptance" and read_rates(value):
        return kind, value
    raise ValueError(
        "must be ngram, model:FOLDER, or acceptance:0.7 (with a chance from 0 to 1 that a draft "
        "token is right; acceptance:0.5,0.9 has another one for those after the first)"
    )


def read_rates(text: str) -> list[float]:
    """Return the chances of draft tokens by their place; none where one is no chance."""
    try:
        rates = [float(rate) for rate in text.split(",")]
    except ValueError:
        return []
    return rates if all(0 <= rate <= 1 for rate in rates) else []


def kept(drafts: Sequence[int], sampled: Iterator[int]) -> list[int]:
    """Return a row's new tokens among the 1 + len(drafts) ids sampled for it: those up to the first
    that differs from its draft token. Later ids were computed from that draft token.
    """
    ids = list(islice(sampled, 1 + len(drafts)))
    for n, (id_, draft) in enumerate(zip(ids, drafts), 1):
        if id_ != draft:
            return ids[:n]
    return ids
