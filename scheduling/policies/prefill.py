"""Prefill and decode: which of the two the next iteration computes (`--prefill`).

mixed        both, with at most token_budget prompt tokens (Sarathi-Serve, OSDI 2024; vLLM V1)
first        prompts alone, while any fits (vLLM V0; the default of SGLang and nano-vllm)
last:K       prompts alone, while fewer than K rows decode (by default 1: FasterTransformer's)
every:K      prompts alone, after K iterations of decode rows
adaptive:MS  both, with as many prompt tokens as keep the time between two tokens within MS (by
             default 50) milliseconds (Sarathi-Serve's budget by a limit of that time, with costs
             fitted while it serves)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from scheduling.history import History, Memory
from scheduling.inference import Inference
from scheduling.policies.base import View


class Share(NamedTuple):
    """Rows that an iteration may compute: those of prompts, those that decode, or both."""

    prompts: bool
    decodes: bool


BOTH, PROMPTS, DECODES = Share(True, True), Share(True, False), Share(False, True)


class Prefill(NamedTuple):
    """A value of `--prefill`: a rule, and its number."""

    rule: str
    k: float = 0  # last: rows; every: iterations; adaptive: milliseconds

    @property
    def remembers(self) -> Sequence[type[Memory]]:
        """What it reads of earlier iterations in the view."""
        return [History] if self.rule in ("every", "adaptive") else []

    def shares(self, view: View) -> tuple[Share, ...]:
        """Return what to try to compute, in this order, until there is a row. So prompts that do
        not fit stop no decode row, and the other way around.
        """
        if self.rule in ("mixed", "adaptive"):
            return (BOTH,)
        if self.rule == "last":
            prompts_go_first = n_decoding(view) < self.k
        else:  # k is 0 of first
            history = view.memories.get(History)
            prompts_go_first = history is None or history.without_prompts >= self.k
        return (PROMPTS, DECODES) if prompts_go_first else (DECODES, PROMPTS)

    def budget(self, view: View) -> int:
        """Return how many prompt tokens the next iteration may compute: at least one, so that every
        prompt is computed in the end, and all of the token budget where no gap grows by it.
        """
        most = view.limits.token_budget
        history = view.memories.get(History) if self.rule == "adaptive" else None
        if history is not None and (rows := n_decoding(view)):
            return max(1, min(most, history.prompt_tokens_within(self.k / 1e3, rows)))
        return most

    def chunk(self, view: View, inference: Inference, prompts: int, left: int) -> int:
        """Return how many tokens of this prompt may be computed beside so many other prompts, if
        the budget has so many left.
        """
        return left


def read_prefill(text: str) -> Prefill:
    """Read the setting. Raises ValueError with a sentence."""
    rule, colon, k = text.partition(":")
    if not colon:
        k = {"last": "1", "adaptive": "50"}.get(rule, "")
    if rule in ("mixed", "first") and not colon:
        return Prefill(rule)
    if rule in ("last", "every") and k.isdecimal() and int(k):
        return Prefill(rule, int(k))
    if rule == "adaptive" and re.fullmatch(r"\d+(\.\d+)?(e-?\d+)?", k) and 0 < float(k) <= 1e9:
        return Prefill(rule, float(k))
    raise ValueError(
        f"{text!r} is none of mixed, first, last:K, every:K (K from 1 on, such as every:4) and "
        "adaptive:MS (above 0, such as adaptive:50)"
    )


def n_decoding(view: View) -> int:
    return [inference.decodes for inference in view.running].count(True)
