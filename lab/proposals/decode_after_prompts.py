"""SGLang pull requests 32775 and 34058, for issue 32549: rows that decode starve beside prompts.

Taken: prompts first, but after N iterations of prompts alone one of rows that decode, and that a
prompt which has begun is not interrupted; 0 is off, and the default. Chosen here: 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from scheduling.history import Done, Memory
from scheduling.policies.base import View, prefills, setting
from scheduling.policies.dynamic import Dynamic
from scheduling.policies.prefill import DECODES, PROMPTS, Prefill, Share


class PromptsInARow(Memory):
    """Iterations of prompts alone since the last one with a row that decoded."""

    def __init__(self) -> None:
        self.n = 0

    def add(self, done: Done) -> None:
        self.n = 0 if done.decodes else self.n + 1


class Bounded(Prefill):
    """Prompts first, at most `k` iterations in a row."""

    @property
    def remembers(self) -> Sequence[type[Memory]]:
        return [PromptsInARow]

    def shares(self, view: View) -> tuple[Share, ...]:
        begun = any(prefills(row) and row.computed for row in view.running)
        due = self.k and view.memories[PromptsInARow].n >= self.k
        return (DECODES, PROMPTS) if due and not begun else (PROMPTS, DECODES)


@dataclass(frozen=True)
class DecodeAfterPrompts(Dynamic):
    """`dynamic --prefill first`, but after some iterations of prompts one of rows that decode."""

    prompts_in_a_row: int = setting(4, "iterations of prompts alone in a row; 0: any", ge=0)

    @cached_property
    def prefill_rule(self) -> Prefill:
        return Bounded("first", self.prompts_in_a_row)
