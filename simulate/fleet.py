"""Replicas behind a router, and those that are slow or fail."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from client.price import replica_seconds
from client.results import Json
from scheduling import routers
from scheduling.errors import EngineFailed
from scheduling.extensions import Group
from scheduling.inference import Inference
from scheduling.routers import Gateway, RoutedRequest
from scheduling.scheduler import Scheduler
from simulate.costs import Costs
from simulate.loop import ARRIVE, Arrival, Loop, instant, seconds
from simulate.replica import SimulatedReplica, Stretch, ignore

# called as `Ended` is, after the number of the replica
EndedAt = Callable[[int, float, Inference], Iterable[Arrival]]


class Failure(NamedTuple):
    """End of a replica with all that it has in flight; another one starts in its place."""

    replica: int
    at_s: float


@dataclass(frozen=True)
class Layout:
    """Number of replicas, and their properties. Raises ValueError."""

    replicas: int = 1
    router: str = "power_of_two"
    stale_s: float = 0.0  # age that the router's reports of the replicas may have
    counts_own: bool = True  # the router adds what it sent since (`scheduling.routers.Gateway`)
    start_s: float = 0.0  # from a failure until another replica takes requests
    slow: Mapping[int, float] = field(default_factory=dict)  # by replica, times as long
    failures: Sequence[Failure] = ()
    seed: int = 0  # seed of the router's draws
    prefill_replicas: int = 0  # the first ones, with disaggregated prefill
    kv_gbps: float = 0.0  # Gbit/s at which each of those sends keys and values

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError("there must be at least 1 replica")
        routers.router(self.router)
        for number in (*self.slow, *(failure.replica for failure in self.failures)):
            if not 0 <= number < self.replicas:
                last = self.replicas - 1
                raise ValueError(f"there is no replica {number}; name one of 0 … {last}")

    @property
    def is_several(self) -> bool:
        return self.replicas > 1


class Change(NamedTuple):
    """Replicas from a time on. up: take requests. others: start."""

    at_s: float
    up: int
    others: int


class Fleet:
    """Replicas that serve what arrives in the time of a `Loop`, as its layout says.

    build: makes a replica's scheduler. computed: called with the number of a replica and each of
    its stretches. session: returns the user or conversation of a request, which a router may keep
    together. numbers: of its replicas, if it has some of the layout's alone. kind, of_replicas
    (`generate`, `jump`): class and arguments of a replica. A request that arrives while no replica
    is up waits until one is.
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
        self.missed: list[Failure] = []  # failures of replicas that were not up
        self._loop, self._build, self._costs = loop, build, costs
        self._computed, self._ended, self._session = computed, ended, session
        self._replica = functools.partial(kind, loop, **{"jump": True} | of_replicas)
        self._gateway = Gateway(
            routers.router(layout.router, layout.seed), instant(layout.stale_s), layout.counts_own
        )
        self.replicas: dict[int, SimulatedReplica] = {}  # that are up
        self._up: dict[int, routers.ReplicaLoad] = {}  # the same as the router sees them
        self._starting = 0
        numbers = range(layout.replicas) if numbers is None else numbers
        self._numbers = itertools.count(numbers.start)
        self._waiting: list[Group] = []  # requests that came while no replica was up
        for _ in numbers:
            self._begin(next(self._numbers))
        for failure in layout.failures:
            loop.at(instant(failure.at_s), ARRIVE, self._fail, failure)

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
        keys = first.prefix.keys if first.prefix and router.uses_keys else ()
        tokens = sum(inference.num_tokens for inference in group)
        request = RoutedRequest(len(first.prompt_ids), tokens, keys, self._session(first))
        return self._gateway.choose(request, list(self._up.values()), self._loop.now)

    def check_done(self) -> None:
        """Raise RuntimeError if work is left, once no event is."""
        for replica in self.replicas.values():
            replica.check_done()

    def facts(self, end_s: float) -> Json:
        """Return the requests of each replica, and how many replicas there were until a time.
        replica_s: seconds of all of them together, those in which they start included.
        """
        replica_s = replica_seconds(self.changes, 0.0, end_s)
        facts = {"requests": self.sent, "changes": self.changes, "missed": self.missed}
        return facts | {"replica_s": replica_s, "end_s": end_s}

    def _begin(self, number: int) -> None:
        """Let a replica take requests from now on."""
        costs = self._costs.slower(self.layout.slow.get(number, 1.0))
        self._up[number] = routers.ReplicaLoad(number)

        def ended(now: float, inference: Inference) -> Iterable[Arrival]:
            if number in self._up:
                self._up[number].requests -= 1
            return self._ended(number, now, inference)

        computed = functools.partial(self._computed, number)
        self.replicas[number] = self._replica(self._build(), costs, computed=computed, ended=ended)
        self._record_change()
        waiting, self._waiting = self._waiting, []
        for group in waiting:
            self.arrive(group)

    def _started(self) -> None:
        self._starting -= 1
        self._begin(next(self._numbers))

    def _fail(self, failure: Failure) -> None:
        number = failure.replica
        if number not in self._up or self._loop.is_over:
            self.missed.append(failure)
            return
        del self._up[number]
        self._gateway.router.forget(number)
        self.replicas.pop(number).fail(EngineFailed("The replica failed."))
        self._starting += 1
        self._record_change()
        self._loop.at(self._loop.now + instant(self.layout.start_s), ARRIVE, self._started)

    def _record_change(self) -> None:
        self.changes.append(Change(seconds(self._loop.now), len(self._up), self._starting))
