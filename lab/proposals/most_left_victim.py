"""vLLM pull request 36980 (closed): do not preempt the request that is about to end.

Taken: among equal priority the one with the most tokens left, by the number that its request
states. Not said in what was read: the choice among equals; chosen here: the newest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduling.inference import Inference
from scheduling.policies.base import Victim, View


@dataclass(frozen=True)
class MostLeftVictim(Victim):
    """The row with the most tokens of its answer left."""

    def choose(self, rows: Sequence[Inference], view: View) -> Inference:
        return max(reversed(rows), key=lambda row: row.num_tokens - len(row.tokens))
