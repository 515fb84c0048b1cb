"""vllm-ascend pull request 12240 (merged): offline jobs, the longest first.

Taken: the job with the longest answers goes first, and its answers' length is predicted from those
that ended. A job is a request's `user`. Not said in what was read: a job of which none has ended;
chosen here: it goes first, so that its length is known soon.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from scheduling.history import Done, Memory
from scheduling.inference import Inference
from scheduling.policies.base import Order, View, setting
from scheduling.policies.orders import oldest_sorted
from scheduling.queue import Queue


class JobLengths(Memory):
    """Answers that have ended, and their tokens, of each user."""

    def __init__(self) -> None:
        self.of: dict[str | None, tuple[int, int]] = {}

    def add(self, done: Done) -> None:
        for inference in done.finished:
            n, tokens = self.of.get(inference.user, (0, 0))
            self.of[inference.user] = n + 1, tokens + len(inference.tokens)

    def predicted(self, user: str | None, least: int) -> float:
        n, tokens = self.of.get(user, (0, 0))
        return tokens / n if n >= least else inf


@dataclass(frozen=True)
class LongestJob(Order):
    """The user whose answers were the longest so far."""

    in_order: ClassVar[bool] = False
    by_service: ClassVar[bool] = True
    job_answers: int = setting(1, "answers that must have ended for a prediction", ge=1)

    @property
    def remembers(self) -> Sequence[type[Memory]]:
        return [JobLengths]

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        lengths = view.memories[JobLengths]

        def place(members: Sequence[Inference]) -> tuple[float, float]:
            return -lengths.predicted(members[0].user, self.job_answers), members[0].arrived_at

        return oldest_sorted(queue, len(queue), place)
