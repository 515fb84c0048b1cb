"""Virtual time: whole picoseconds, whose sums are exact in whatever order, and a loop of events."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from scheduling.extensions import Group
from scheduling.inference import Inference

PS = 10**12  # a second
Arrival = tuple[float, Group]  # at so many seconds
# called with each inference that has ended and the time of its answer; returns the arrivals that
# follow from it
Ended = Callable[[float, Inference], Iterable[Arrival]]
# kinds of events at one instant, in their order: iterations end, requests arrive, what runs next is
# planned, and then the state is observed
END, ARRIVE, PLAN, OBSERVE = range(4)
MOST_PLANS = 100_000  # in a row, after which a policy is taken to wait for ever


def seconds(ps: int) -> float:
    """Return the nearest float, the time that a scheduler gets."""
    return ps / PS


def instant(at: float) -> int:
    """Return the picosecond nearest to so many seconds."""
    return round(at * PS)


def not_before(at: float) -> int:
    """Return the first picosecond whose `seconds` are `at` or more."""
    numerator, denominator = at.as_integer_ratio()
    ps = -(-numerator * PS // denominator)
    while seconds(ps - 1) >= at:  # late in a long run a float is coarser than a picosecond
        ps -= 1
    return ps


class Serves(Protocol):
    """Replicas, or one alone."""

    def arrive(self, group: Group) -> None: ...

    def check_done(self) -> None:
        """Raise RuntimeError if work is left, once no event is."""


class Event:
    """A call to be made at an instant, unless it is cancelled."""

    __slots__ = ("arguments", "call")

    def __init__(self, call: Callable[..., None], arguments: tuple[Any, ...]):
        self.call: Callable[..., None] | None = call
        self.arguments = arguments

    def cancel(self) -> None:
        self.call = None


class Loop:
    """Events by time; at one instant by kind, and then in the order in which they were added.

    Only the next arrival of the trace is stored; at one instant it goes before arrivals that were
    added.
    """

    def __init__(self) -> None:
        self.now = 0  # picoseconds
        self._heap: list[tuple[int, int, int, Event]] = []
        self._added = itertools.count(1)
        self._pending = 0  # events that are not observations

    def serve(self, trace: Iterable[Arrival], server: Serves) -> float:
        """Run until no event is left; return the seconds. Raises RuntimeError if work is left."""
        self._arrive, self._trace = server.arrive, iter(trace)
        self._draw()
        plans = 0  # in a row
        while self._heap:
            time, kind, _, event = heapq.heappop(self._heap)
            self._pending -= kind != OBSERVE
            if event.call is not None:
                self.now = time
                event.call(*event.arguments)
                if kind == PLAN:
                    plans += 1
                    if plans % MOST_PLANS == 0 and all(item[1] >= PLAN for item in self._heap):
                        raise RuntimeError(
                            f"{MOST_PLANS:,} plans in a row computed nothing, and no request is "
                            "still to come; each only named a later wake_at"
                        )
                elif kind != OBSERVE:
                    plans = 0
        server.check_done()
        return seconds(self.now)

    def at(self, time: int, kind: int, call: Callable[..., None], *arguments: Any) -> Event:
        return self._put(time, kind, next(self._added), Event(call, arguments))

    def add(self, arrivals: Iterable[Arrival]) -> None:
        """Add arrivals to those of the trace, none earlier than now."""
        for at, group in arrivals:
            # late in a long run a float of seconds is coarser than a picosecond
            self.at(max(self.now, instant(at)), ARRIVE, self._arrive, group)

    @property
    def arrival_is_due(self) -> bool:
        """True if a request arrives at this instant."""
        self._drop_cancelled()
        return bool(self._heap) and self._heap[0][:2] <= (self.now, ARRIVE)

    @property
    def is_over(self) -> bool:
        """True if no events but observations are left."""
        self._drop_cancelled()
        return not self._pending

    @property
    def next_at(self) -> int:
        """Instant of the next event; there must be one."""
        self._drop_cancelled()
        return self._heap[0][0]

    def _draw(self) -> None:
        for at, group in itertools.islice(self._trace, 1):
            self._put(instant(at), ARRIVE, 0, Event(self._arrive_and_draw, (group,)))

    def _arrive_and_draw(self, group: Group) -> None:
        self._draw()
        self._arrive(group)

    def _put(self, time: int, kind: int, number: int, event: Event) -> Event:
        heapq.heappush(self._heap, (time, kind, number, event))
        self._pending += kind != OBSERVE
        return event

    def _drop_cancelled(self) -> None:
        while self._heap and self._heap[0][3].call is None:
            self._pending -= heapq.heappop(self._heap)[1] != OBSERVE
