"""vLLM pull request 56897: preempt by what it frees and what it costs.

Taken: the formula. A preemption frees the blocks that only this row holds, and costs its "current
token count", read as the tokens computed so far; a row that is almost done is spared by the tokens
it has of those it stated. Not said in what was read: the choice among equals; chosen here: the
newest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduling.inference import Inference
from scheduling.policies.base import Victim, View


@dataclass(frozen=True)
class CostAwareVictim(Victim):
    """The highest of blocks that only it holds ÷ computed tokens × share of its answer to come."""

    def choose(self, rows: Sequence[Inference], view: View) -> Inference:
        def worth(row: Inference) -> float:
            to_come = 1 - len(row.tokens) / max(1, row.num_tokens)
            return view.own_blocks(row) / max(1, row.computed) * to_come

        return max(reversed(rows), key=worth)
