"""Features that a scheduler calls by their hooks (`building.features`): no mode needs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, ClassVar

from scheduling.errors import ServingError
from scheduling.inference import Inference, Row
from scheduling.queue import Timers

Group = Sequence[Inference]  # the inferences of one request


class Extension:
    """Called by the scheduler when something happens, for the methods that it overrides alone."""

    remembers: ClassVar[Sequence[type[Any]]] = ()  # what it reads in the scheduler's `memories`
    timers: Timers[Any] | None = None  # whose next time is when `expire` has something to do

    def attach(self, scheduler: Any) -> None:
        """A `Scheduler` calls it from now on."""

    def check(self, group: Group, now: float) -> None:
        """Raise a ServingError for a request that must not be queued."""

    def arrive(self, group: Group, now: float) -> None:
        """A request is about to be queued; it has its ids."""

    def wait(self, inference: Inference, now: float) -> None:
        """An inference waits from now on: it arrived, or was preempted."""

    def leave(self, inference: Inference) -> None:
        """An inference waits no longer."""

    def before_plan(self, now: float) -> None:
        """A plan is about to be made."""

    def admit(self, inference: Inference, now: float) -> None:
        """An inference runs from now on."""

    def stop_running(self, inference: Inference, now: float) -> None:
        """An inference runs no longer: it is preempted, or leaves the batch."""

    def planned(self, rows: Sequence[Row], now: float) -> None:
        """The next iteration computes these rows."""

    def sampled(self, inferences: Sequence[Inference], now: float) -> None:
        """An iteration is over, and each of these got a token."""

    def finish(self, finished: list[Inference]) -> list[Inference]:
        """Return the inferences to answer now, of those that are finished and of earlier ones."""
        return finished

    def end(self, inference: Inference, now: float) -> None:
        """An inference is answered, with tokens or an error."""

    def expire(self, now: float) -> list[tuple[Inference, ServingError]]:
        """Return inferences to end now, each with its error."""
        return []


HOOKS = [name for name, member in vars(Extension).items() if callable(member)]


def overridden(extension: Extension) -> list[str]:
    """Return the hooks for which an extension is called."""
    kind = type(extension)
    return [hook for hook in HOOKS if getattr(kind, hook) is not getattr(Extension, hook)]


class ResponseOrder(Extension):
    """Plain answers are sent in the order in which their requests came (Triton's
    `preserve_ordering`): a finished one is held until earlier ones are answered. A stream, which is
    read as it comes, neither waits nor is waited for.
    """

    def __init__(self) -> None:
        self._unanswered: dict[int, Inference] = {}  # without streams, by arrival

    def attach(self, scheduler: Any) -> None:
        self.held: dict[int, Inference] = scheduler.held

    def arrive(self, group: Iterable[Inference], now: float) -> None:
        self._unanswered |= {member.id: member for member in group if not member.streamed}

    def finish(self, finished: list[Inference]) -> list[Inference]:
        self.held |= {member.id: member for member in finished if not member.streamed}
        free = [self.held[id] for id in takewhile(self.held.__contains__, self._unanswered)]
        return [member for member in finished if member.streamed] + free

    def end(self, inference: Inference, now: float) -> None:
        self.held.pop(inference.id, None)
        self._unanswered.pop(inference.id, None)
