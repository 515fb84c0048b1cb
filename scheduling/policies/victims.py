"""Which row gives its KV blocks up where none is free (`--kv-reservation demand`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduling.inference import Inference
from scheduling.policies.base import Victim, View


@dataclass(frozen=True)
class Newest(Victim):
    """The last one in the order, as in vLLM."""

    def choose(self, rows: Sequence[Inference], view: View) -> Inference:
        return rows[-1]


NEWEST = Newest()


@dataclass(frozen=True)
class LeastComputed(Victim):
    """The one with the fewest computed tokens, which a preemption takes; of equals the newest."""

    def choose(self, rows: Sequence[Inference], view: View) -> Inference:
        return min(reversed(rows), key=lambda row: row.computed)


@dataclass(frozen=True)
class MostComputed(Victim):
    """The one with the most computed tokens; of equals the newest."""

    def choose(self, rows: Sequence[Inference], view: View) -> Inference:
        return max(reversed(rows), key=lambda row: row.computed)
