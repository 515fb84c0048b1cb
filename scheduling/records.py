"""Records of iterations, snapshots of a scheduler's load, and the interface of its observers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from scheduling.inference import Inference, Iteration, Row


@dataclass(slots=True)
class IterationRecord:
    """An iteration, for observers. `started_at`: seconds on the manager's clock."""

    started_at: float
    seconds: float
    iteration: Iteration
    # this iteration and later ones in which its rows compute a token each; `seconds` is of all
    n: int = 1
    # number in each of them, by `stats.ROW_KINDS`: a row with drafts counts as 1 + their number
    rows: dict[str, int] = field(init=False)
    live: int = field(init=False)  # live rows, each once
    drafts: list[tuple[int, int]] = field(init=False)  # by row with drafts: number, accepted

    def __post_init__(self) -> None:
        rows, padding = self.iteration.rows, self.iteration.padding
        idle = [row.idle for row in rows].count(True)
        recomputed = len(rows) - [row.recomputed for row in rows].count(0)
        self.live = live = len(rows) - idle - recomputed
        self.drafts = [(len(row.drafts), _accepted(row)) for row in rows if row.drafts]
        accepted = sum([accepted for _, accepted in self.drafts])
        rejected = sum([n for n, _ in self.drafts]) - accepted
        self.rows = {
            "live": live + accepted, "idle": idle, "padding": padding, "recomputed": recomputed,
            "rejected": rejected,
        }  # fmt: skip


def _accepted(row: Row) -> int:
    """Return how many drafts of a row were accepted: none where it was cancelled in the middle."""
    return max(0, min(row.inference.computed - row.start - 1, len(row.drafts)))


class Snapshot(NamedTuple):
    """Requests and KV blocks of a scheduler now, and tokens since the start."""

    waiting: int
    running: int  # held ones too, but not those whose row is idle and which are answered
    blocks_used: int
    n_blocks: int
    prompt_tokens: int  # those found in the prefix cache, too
    completion_tokens: int
    prefix_queries: int  # prompt tokens that were looked up in the prefix cache
    prefix_hits: int  # those found


class Observer(Protocol):
    """Observer of iterations and answers. A manager calls it in the handler thread or under its
    lock: it must be quick, and what it raises is logged.
    """

    def iteration(self, record: IterationRecord) -> None:
        """An iteration is over."""

    def answered(self, inference: Inference) -> None:
        """An inference has its answer or its error, and its caller is about to be woken."""
