"""Replicas behind a router: their number, which may follow the load, and those that are slow or
fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deploy import routers
from deploy.autoscaling import CONTROL_INTERVAL_S, Autoscaler, Autoscaling
from deploy.routers import Gateway, RoutedRequest
from scheduling.errors import EngineFailed
from scheduling.inference import Inference
from scheduling.scheduler import Scheduler
from simulate.costs import Costs
from simulate.loop import ARRIVE, OBSERVE, Arrival, Group, Loop
from simulate.replica import SimulatedReplica, Stretch, ignore
from simulate.time import instant, seconds

# called as `Ended` is, after the number of the replica
EndedAt = Callable[[int, float, Inference], Iterable[Arrival]]


class Failure(NamedTuple):
    """End of a replica with all that it has in flight; another one starts in its place."""

    replica: int
    at_s: float


@dataclass(frozen=True)
class Layout:
    """Number of replicas, and their properties. Raises ValueError."""

    replicas: int = 1  # with autoscaling: at first
    router: str = "power_of_two"
    stale_s: float = 0.0  # age that the router's reports of the replicas may have
    counts_own: bool = True  # the router adds what it sent since (`deploy.routers.Gateway`)
    start_s: float = 0.0  # from the decision to start a replica until it takes requests
    slow: Mapping[int, float] = field(default_factory=dict)  # by replica, times as long
    failures: Sequence[Failure] = ()
    autoscaling: Autoscaling | None = None
    seed: int = 0  # of the router's draws
    prefill_replicas: int = 0  # the first ones, with disaggregated prefill
    kv_gbps: float = 0.0  # Gbit/s at which each of those sends keys and values

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError("there must be at least 1 replica")
        routers.router(self.router)
        most = self.autoscaling.max_replicas if self.autoscaling else self.replicas
        for number in (*self.slow, *(failure.replica for failure in self.failures)):
            if not 0 <= number < most:
                raise ValueError(f"there is no replica {number}; name one of 0 … {most - 1}")

    @property
    def is_several(self) -> bool:
        return self.replicas > 1 or self.autoscaling is not None


class Change(NamedTuple):
    """Replicas from a time on. up: take requests. others: start, or finish their last ones."""

    at_s: float
    up: int
    others: int


class Fleet:
    """Replicas that serve what arrives in the time of a `Loop`, as its layout says.

    build: makes a replica's scheduler. computed: called with the number of a replica and each of
    its stretches. session: returns the user or conversation of a request, which a router may keep
    together. numbers: of its replicas, if it has some of the layout's alone. kind: of
    replica. of_replicas (`generate`, `jump`): as of a `SimulatedReplica`. A request that arrives
    while no replica is up waits until one is.
    """

    def __init__(
        self,
        loop: Loop,
        layout: Layout,
        build: Callable[[], Scheduler],
        costs: Costs,
        *,
        computed: Callable[[int, Stretch], None] = ignore,
        ended: EndedAt = lambda number, now, inference: (),
        session: Callable[[Inference], str | None] = lambda inference: inference.user,
        numbers: range | None = None,
        kind: Callable[..., SimulatedReplica] = SimulatedReplica,
        **of_replicas: Any,
    ):
        self.layout = layout
        self.changes: list[Change] = []
        self.sent: dict[int, int] = {}  # requests, by the replica that got them
        self.missed: list[Failure] = []  # of replicas that were not up
        self._loop, self._build, self._costs = loop, build, costs
        self._computed, self._ended, self._session = computed, ended, session
        self._kind = kind
        self._of_replicas = {"jump": True} | of_replicas
        self._gateway = Gateway(
            routers.router(layout.router, layout.seed), instant(layout.stale_s), layout.counts_own
        )
        self.replicas: dict[int, SimulatedReplica] = {}  # up, or finishing what they have
        self._up: dict[int, routers.ReplicaLoad] = {}  # as the router sees them
        self._starting: set[int] = set()
        numbers = range(layout.replicas) if numbers is None else numbers
        self._numbers = itertools.count(numbers.start)
        self._waiting: list[Group] = []  # requests that came while no replica was up
        for _ in numbers:
            self._begin(next(self._numbers))
        for failure in layout.failures:
            loop.at(instant(failure.at_s), ARRIVE, self._fail, failure)
        if layout.autoscaling:
            self._autoscaler = Autoscaler(layout.autoscaling, layout.replicas)
            loop.at(0, OBSERVE, self._decide)

    def arrive(self, group: Group, after: int = 0) -> None:
        """Send a group to a replica, where it arrives after so many picoseconds."""
        if not self._up:
            self._waiting.append(group)
            return
        number = self._choose(group) if self.layout.is_several else next(iter(self._up))
        self._up[number].requests += len(group)
        self.sent[number] = self.sent.get(number, 0) + 1
        self.replicas[number].arrive(group, after)

    def _choose(self, group: Group) -> int:
        """Return the number of the replica that gets the group."""
        router = self._gateway.router
        if router.uses_tokens and self._gateway.looks(self._loop.now):
            for number, seen in self._up.items():
                seen.tokens = self.replicas[number].remaining_tokens
        first = group[0]
        keys = (first.keys or ()) if router.uses_keys else ()
        tokens = sum(inference.num_tokens for inference in group)
        request = RoutedRequest(len(first.prompt_ids), tokens, keys, self._session(first))
        return self._gateway.choose(request, list(self._up.values()), self._loop.now)

    def check_done(self) -> None:
        """Raise RuntimeError if work is left, once no event is."""
        for replica in self.replicas.values():
            replica.check_done()

    def replica_seconds(self, end_s: float) -> float:
        """Return the seconds of all replicas together, from their start decision on."""
        ends = [change.at_s for change in self.changes[1:]] + [end_s]
        return sum(
            (change.up + change.others) * max(0.0, min(end, end_s) - change.at_s)
            for change, end in zip(self.changes, ends)
        )

    def _begin(self, number: int) -> None:
        """Let a replica take requests from now on."""
        self._starting.discard(number)
        costs = self._costs.slower(self.layout.slow.get(number, 1.0))
        self._up[number] = routers.ReplicaLoad(number)

        def ended(now: float, inference: Inference) -> Iterable[Arrival]:
            if number in self._up:
                self._up[number].requests -= 1
            elif replica is self.replicas.get(number) and not replica.has_work:
                del self.replicas[number]  # it was to stop, and has finished what it had
                self._record_change()
            return self._ended(number, now, inference)

        replica = self.replicas[number] = self._kind(
            self._loop, self._build(), costs, ended=ended,
            computed=lambda stretch: self._computed(number, stretch), **self._of_replicas,
        )  # fmt: skip
        self._record_change()
        waiting, self._waiting = self._waiting, []
        for group in waiting:
            self.arrive(group)

    def _start(self) -> None:
        number = next(self._numbers)
        self._starting.add(number)
        self._record_change()
        self._loop.at(self._loop.now + instant(self.layout.start_s), ARRIVE, self._started, number)

    def _started(self, number: int) -> None:
        if number in self._starting:  # it was not stopped meanwhile
            self._begin(number)

    def _stop(self) -> None:
        """Stop a starting replica, else the one with the fewest requests when they have ended."""
        if self._starting:
            self._starting.remove(max(self._starting))
        else:
            number = min(self._up.values(), key=lambda seen: (seen.requests, -seen.id)).id
            self._down(number)
            if not self.replicas[number].has_work:
                del self.replicas[number]
        self._record_change()

    def _fail(self, failure: Failure) -> None:
        number = failure.replica
        if number not in self._up or self._loop.is_over:
            self.missed.append(failure)
            return
        self._down(number)
        self.replicas.pop(number).fail(EngineFailed("The replica failed."))
        self._start()

    def _down(self, number: int) -> None:
        """Give a replica no more requests."""
        del self._up[number]
        self._gateway.router.forget(number)

    def _decide(self) -> None:
        """Follow the load as Ray Serve's controller does, until all other events are over."""
        now = seconds(self._loop.now)
        ongoing = {number: seen.requests for number, seen in self._up.items()}
        if self._autoscaler.settings.target_tokens is not None:
            ongoing = {number: self.replicas[number].remaining_tokens for number in self._up}
        target = self._autoscaler.decide(now, ongoing)
        while (n := len(self._up) + len(self._starting)) != target:
            (self._start if n < target else self._stop)()
        if not self._loop.is_over:
            self._loop.at(self._loop.now + instant(CONTROL_INTERVAL_S), OBSERVE, self._decide)

    def _record_change(self) -> None:
        up = len(self._up)
        others = len(self._starting) + len(self.replicas) - up
        self.changes.append(Change(seconds(self._loop.now), up, others))
