"""vLLM pull request 51574: nobody is preempted for ever.

Taken: among equal priority one that was preempted least often, counted up to 3, and of these the
newest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduling.inference import Inference
from scheduling.policies.base import Victim, View, setting


@dataclass(frozen=True)
class LeastPreemptedVictim(Victim):
    """The row that was preempted least often; of equals the newest."""

    preemptions_counted: int = setting(3, "preemptions beyond which none counts", ge=1)

    def choose(self, rows: Sequence[Inference], view: View) -> Inference:
        def often(row: Inference) -> int:
            return min(row.interruptions.preemptions, self.preemptions_counted)

        return min(reversed(rows), key=often)
