"""Answers leave in the order in which their requests came (Triton's `preserve_ordering`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from scheduling.inference import Inference


class Outbox:
    """Plain answers that are finished and wait for an earlier one. A stream, which is read as it
    comes, neither waits nor is waited for.
    """

    def __init__(self) -> None:
        self.held: dict[int, Inference] = {}
        self._expected: deque[Inference] = deque()  # plain ones, as they came

    def expect(self, group: Iterable[Inference]) -> None:
        self._expected += (inference for inference in group if not inference.streamed)

    def hold(self, finished: Iterable[Inference]) -> list[Inference]:
        """Keep those that are plain; return the others."""
        plain = [inference for inference in finished if not inference.streamed]
        self.held |= {inference.id: inference for inference in plain}
        return [inference for inference in finished if inference.streamed]

    def leave(self) -> list[Inference]:
        """Those before which nobody is left that has no answer."""
        leaving = []
        while self._expected:
            first = self._expected[0]
            if first.id in self.held:
                leaving.append(self.held.pop(first.id))
            elif first.answered_at is None:
                break
            self._expected.popleft()
        return leaving
