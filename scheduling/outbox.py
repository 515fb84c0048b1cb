"""Answers leave in the order in which their requests came (Triton's `preserve_ordering`)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from scheduling.inference import Inference


class Outbox:
    """Plain answers that are finished and wait for an earlier one. A stream, which is read as it
    comes, neither waits nor is waited for.
    """

    def __init__(self) -> None:
        self.held: dict[int, Inference] = {}
        self._unanswered: dict[int, Inference] = {}  # plain ones, as they came

    def expect(self, group: Iterable[Inference]) -> None:
        self._unanswered |= {each.id: each for each in group if not each.streamed}

    def hold(self, finished: Iterable[Inference]) -> list[Inference]:
        """Keep those that are plain; return the others."""
        plain = [inference for inference in finished if not inference.streamed]
        self.held |= {inference.id: inference for inference in plain}
        return [inference for inference in finished if inference.streamed]

    @property
    def free(self) -> list[Inference]:
        """Held ones before which nobody is left that has no answer."""
        return [self.held[id] for id in takewhile(self.held.__contains__, self._unanswered)]

    def forget(self, inference: Inference) -> None:
        """It is answered, whatever with."""
        self.held.pop(inference.id, None)
        self._unanswered.pop(inference.id, None)
