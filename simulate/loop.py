"""What happens when: requests come, iterations end, replicas plan."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from scheduling.inference import Inference
from simulate.time import instant

Group = Sequence[Inference]  # who comes together
Arrival = tuple[float, Group]  # at so many seconds
# told of an inference that has ended, and when its answer is on its way; what comes because of that
Ended = Callable[[float, Inference], Iterable[Arrival]]
# of what happens at one instant: iterations end, requests come, what runs next is planned; and then
# whoever looks on is told
END, COME, PLAN, LOOK = range(4)


def nobody(now: float, inference: Inference) -> Iterable[Arrival]:
    """Nobody comes because of an ending."""
    return ()


class Event:
    """A call to be made at an instant, unless it is cancelled."""

    __slots__ = ("call", "what")

    def __init__(self, call: Callable[..., None], what: tuple[Any, ...]):
        self.call: Callable[..., None] | None = call
        self.what = what

    def cancel(self) -> None:
        self.call = None


class Loop:
    """Events by time; at one instant by kind, and then as they were added.

    Of the trace only the next arrival is held; at one instant it goes before arrivals that were
    added.
    """

    def __init__(self) -> None:
        self.now = 0  # picoseconds
        self._heap: list[tuple[int, int, int, Event]] = []
        self._added = itertools.count(1)
        self._left = 0  # of the events, those that are not looks

    def at(self, time: int, kind: int, call: Callable[..., None], *what: Any) -> Event:
        return self._put(time, kind, next(self._added), Event(call, what))

    def serve(self, trace: Iterable[Arrival], come: Callable[[Group], None]) -> None:
        """Have `come` called with all that arrive."""
        self._come, self._trace = come, iter(trace)
        self._draw()

    def add(self, arrivals: Iterable[Arrival]) -> None:
        """They arrive beside the trace, no earlier than now."""
        for at, group in arrivals:
            # late in a long run a float of seconds is coarser than a picosecond
            self.at(max(self.now, instant(at)), COME, self._come, group)

    def _draw(self) -> None:
        for at, group in itertools.islice(self._trace, 1):
            self._put(instant(at), COME, 0, Event(self._next_of_trace, (group,)))

    def _put(self, time: int, kind: int, number: int, event: Event) -> Event:
        heapq.heappush(self._heap, (time, kind, number, event))
        self._left += kind != LOOK
        return event

    def _next_of_trace(self, group: Group) -> None:
        self._draw()
        self._come(group)

    @property
    def somebody_comes_now(self) -> bool:
        self._drop_cancelled()
        return bool(self._heap) and self._heap[0][:2] <= (self.now, COME)

    @property
    def is_over(self) -> bool:
        """Nothing is left to happen, whoever may look."""
        self._drop_cancelled()
        return not self._left

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._heap:
            time, kind, _, event = heapq.heappop(self._heap)
            self._left -= kind != LOOK
            if event.call is not None:
                self.now = time
                event.call(*event.what)

    def _drop_cancelled(self) -> None:
        while self._heap and self._heap[0][3].call is None:
            self._left -= heapq.heappop(self._heap)[1] != LOOK
