"""What observers of a scheduler are told: each iteration, and each answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from scheduling.inference import Inference, Iteration


@dataclass(slots=True)
class IterationRecord:
    """An iteration, for observers. `started_at`: seconds on the manager's clock."""

    started_at: float
    seconds: float
    iteration: Iteration
    # this iteration and later ones in which its rows compute a token each; `seconds` is of all
    n: int = 1
    rows: dict[str, int] = field(init=False)  # number in each of them, by `stats.ROW_KINDS`

    def __post_init__(self) -> None:
        rows, padding = self.iteration.rows, self.iteration.padding
        idle = [row.idle for row in rows].count(True)
        recomputed = len(rows) - [row.recomputed for row in rows].count(0)
        live = len(rows) - idle - recomputed
        self.rows = {"live": live, "idle": idle, "padding": padding, "recomputed": recomputed}


class Observer(Protocol):
    """Observer of iterations and answers. A manager calls it in the handler thread or under its
    lock: it must be quick, and what it raises is logged.
    """

    def iteration(self, record: IterationRecord) -> None:
        """An iteration is over."""

    def answered(self, inference: Inference) -> None:
        """An inference has its answer or its error, and its caller is about to be woken."""
