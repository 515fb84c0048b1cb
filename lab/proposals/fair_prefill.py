"""local-inference-lab/vllm pull request 664, for 612 and 625 (merged): shares of the time.

Taken: while both wait, the one goes whose measured time ÷ its weight is less, and that the share of
prompts is 0.4. Not said in what was read: how long the past counts; chosen here: an iteration's
time counts 0.98 of it after each next one, as in our own estimates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from scheduling.history import KEPT, Done, Memory
from scheduling.policies.base import View, setting
from scheduling.policies.dynamic import Dynamic
from scheduling.policies.prefill import DECODES, PROMPTS, Prefill, Share


class Spent(Memory):
    """Seconds of the last iterations with prompts, and of the others."""

    def __init__(self) -> None:
        self.prompts_s = self.decodes_s = 0.0
        self._ended_at = 0.0

    def add(self, done: Done) -> None:
        took_s = done.ended_at - max(self._ended_at, done.planned_at)
        self._ended_at = done.ended_at
        self.prompts_s = KEPT * self.prompts_s + took_s * bool(done.prompts)
        self.decodes_s = KEPT * self.decodes_s + took_s * (not done.prompts)


class Weighted(Prefill):
    """Prompts alone or rows that decode alone, by the time that each has had; k: prompts' share."""

    @property
    def remembers(self) -> Sequence[type[Memory]]:
        return [Spent]

    def shares(self, view: View) -> tuple[Share, ...]:
        spent = view.memories[Spent]
        behind = spent.prompts_s * (1 - self.k) <= spent.decodes_s * self.k
        return (PROMPTS, DECODES) if behind else (DECODES, PROMPTS)


@dataclass(frozen=True)
class FairPrefill(Dynamic):
    """`dynamic`, but prompts and rows that decode have shares of the time while both wait."""

    prefill_share: float = setting(0.4, "share of the time for prompts", gt=0, lt=1)

    @cached_property
    def prefill_rule(self) -> Prefill:
        return Weighted("first", self.prefill_share)
