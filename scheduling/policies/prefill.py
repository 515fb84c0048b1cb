"""Prefill and decode: which of the two the next iteration computes (`--prefill`).

mixed      both, with at most token_budget prompt tokens (Sarathi-Serve, OSDI 2024; vLLM V1)
first      prompts alone, while any fits (vLLM V0; the default of SGLang and nano-vllm)
last       prompts alone, while fewer than decode_floor rows decode (of 1: FasterTransformer's)
every:K    prompts alone, after K iterations of decode rows
adaptive   both, with as many prompt tokens as keep the time between two tokens within tbt_ms
           (Sarathi-Serve's budget by a limit of that time, with costs fitted while it serves)
"""

from __future__ import annotations

from typing import NamedTuple

from scheduling.policies.base import View


class Share(NamedTuple):
    """Rows that an iteration may compute: those of prompts, those that decode, or both."""

    prompts: bool
    decodes: bool


BOTH, PROMPTS, DECODES = Share(True, True), Share(True, False), Share(False, True)


class Prefill(NamedTuple):
    """A value of `--prefill`, with what belongs to it."""

    rule: str
    k: int = 0  # of every:K
    decode_floor: int = 0  # of last, in rows
    tbt_s: float = 0.0  # of adaptive

    @property
    def reads_history(self) -> bool:
        """True if it depends on the iterations before, which are then in the view."""
        return self.rule in ("every", "adaptive")

    def shares(self, view: View) -> tuple[Share, ...]:
        """Return what to try to compute, in this order, until there is a row. So prompts that do
        not fit stop no decode row, and the other way around.
        """
        if self.rule in ("mixed", "adaptive"):
            return (BOTH,)
        if self.rule == "last":
            prompts_go_first = n_decoding(view) < self.decode_floor
        else:  # k is 0 of first
            prompts_go_first = view.history is None or view.history.without_prompts >= self.k
        return (PROMPTS, DECODES) if prompts_go_first else (DECODES, PROMPTS)

    def budget(self, view: View) -> int:
        """Return how many prompt tokens the next iteration may compute: at least one, so that every
        prompt is computed in the end, and all of the token budget where no gap grows by it.
        """
        most = view.limits.token_budget
        if self.rule == "adaptive" and view.history is not None and (rows := n_decoding(view)):
            return max(1, min(most, view.history.prompt_tokens_within(self.tbt_s, rows)))
        return most


def read_prefill(text: str) -> tuple[str, int]:
    """Read the setting: a rule, and the K of every:K. Raises ValueError with a sentence."""
    rule, colon, k = text.partition(":")
    if rule in ("mixed", "first", "last", "adaptive") and not colon:
        return rule, 0
    if rule == "every" and k.isdecimal() and int(k):
        return rule, int(k)
    raise ValueError(
        f"{text!r} is none of mixed, first, last, every:K (K from 1 on, such as every:4) and "
        "adaptive"
    )


def n_decoding(view: View) -> int:
    return [inference.decodes for inference in view.running].count(True)
