"""Replicas behind a router: which of them gets a request, how many there are, and which are slow or
fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from deploy import routers
from deploy.autoscaling import CONTROL_INTERVAL_S, Autoscaler, Autoscaling
from deploy.routers import Asked, Gateway
from scheduling.errors import EngineFailed
from scheduling.inference import Inference, Iteration
from scheduling.scheduler import Scheduler
from simulate.costs import Costs
from simulate.loop import COME, LOOK, Arrival, Ended, Group, Loop, nobody
from simulate.replica import Replica, Stretch, any_ids
from simulate.time import instant, seconds


class Failure(NamedTuple):
    """A replica is gone, with all that it has in flight; a new one takes its place after the
    start-up time.
    """

    replica: int
    at_s: float


@dataclass(frozen=True)
class Layout:
    """How many replicas there are, and what they are like.

    stale_s: a router's reports of the replicas may be so old; counts_own: it adds what it sent
    since they were made (`deploy.routers.Gateway`). start_s: from the decision to start a
    replica until it takes requests. slow: of replicas by number how many times as long their
    iterations take.
    autoscaling: how many there are follows the load; it begins with `replicas`. Raises ValueError.
    """

    replicas: int = 1
    router: str = "power_of_two"
    stale_s: float = 0.0
    counts_own: bool = True
    start_s: float = 0.0
    slow: Mapping[int, float] = field(default_factory=dict)
    failures: Sequence[Failure] = ()
    autoscaling: Autoscaling | None = None
    seed: int = 0  # of the router's draws

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
    """How many replicas there are from a time on: those that take requests, and those that start or
    finish what they have.
    """

    at_s: float
    up: int
    others: int


class Fleet:
    """Serves what arrives in the time of a `Loop`, by as many replicas as its layout says.

    build: a replica's scheduler. computed: told of each stretch and the number of its replica.
    session: whose requests a router may keep together. ended, generate, jump: as of a `Replica`. A
    request that comes while no replica is up waits until one is.
    """

    def __init__(
        self,
        loop: Loop,
        layout: Layout,
        build: Callable[[], Scheduler],
        costs: Costs,
        *,
        generate: Callable[[Iteration], Iterable[int]] = any_ids,
        computed: Callable[[int, Stretch], None] = lambda number, stretch: None,
        ended: Ended = nobody,
        session: Callable[[Inference], str | None] = lambda inference: inference.user,
        jump: bool = True,
    ):
        self.layout = layout
        self.changes: list[Change] = []
        self.sent: dict[int, int] = {}  # requests, by the replica that got them
        self.missed: list[Failure] = []  # that hit nobody
        self._loop, self._build, self._costs = loop, build, costs
        self._generate, self._computed, self._ended, self._jump = generate, computed, ended, jump
        self._session = session
        self._gateway = Gateway(
            routers.router(layout.router, layout.seed), instant(layout.stale_s), layout.counts_own
        )
        self._replicas: dict[int, Replica] = {}  # that are up, or finish what they have
        self._known: dict[int, routers.Replica] = {}  # that are up
        self._starting: set[int] = set()
        self._next = 0
        self._waiting: list[Group] = []  # for a replica to be up
        for _ in range(layout.replicas):
            self._up(self._number())
        for failure in layout.failures:
            loop.at(instant(failure.at_s), COME, self._fail, failure)
        if layout.autoscaling:
            self._autoscaler = Autoscaler(layout.autoscaling, layout.replicas)
            loop.at(0, LOOK, self._decide)

    def arrive(self, group: Group) -> None:
        if not self._known:
            self._waiting.append(group)
            return
        number = self._choose(group) if self.layout.is_several else next(iter(self._known))
        self._known[number].requests += len(group)
        self.sent[number] = self.sent.get(number, 0) + 1
        self._replicas[number].arrive(group)

    def _choose(self, group: Group) -> int:
        """Which of several replicas gets it."""
        router = self._gateway.router
        if router.uses_tokens and self._gateway.looks(self._loop.now):
            for number, known in self._known.items():
                known.tokens = self._replicas[number].tokens_left
        first = group[0]
        asked = Asked(
            len(first.prompt_ids),
            sum(inference.num_tokens for inference in group),
            (first.keys or ()) if router.uses_keys else (),
            self._session(first),
        )
        return self._gateway.choose(asked, list(self._known.values()), self._loop.now)

    def check_done(self) -> None:
        """Raises RuntimeError if work is left, once nothing is left to happen."""
        for replica in self._replicas.values():
            replica.check_done()

    def replica_seconds(self, end_s: float) -> float:
        """What all replicas together were paid for, from their start until then."""
        ends = [change.at_s for change in self.changes[1:]] + [end_s]
        return sum(
            (change.up + change.others) * max(0.0, min(end, end_s) - change.at_s)
            for change, end in zip(self.changes, ends)
        )

    def _number(self) -> int:
        self._next += 1
        return self._next - 1

    def _up(self, number: int) -> None:
        """A replica takes requests from now on."""
        self._starting.discard(number)
        costs = self._costs.slower(self.layout.slow.get(number, 1.0))
        self._known[number] = routers.Replica(number)

        def ended(now: float, inference: Inference) -> Iterable[Arrival]:
            if number in self._known:
                self._known[number].requests -= 1
            elif replica is self._replicas.get(number) and not replica.has_work:
                del self._replicas[number]  # it was to stop, and has finished what it had
                self._note()
            return self._ended(now, inference)

        replica = self._replicas[number] = Replica(
            self._loop,
            self._build(),
            costs,
            self._generate,
            computed=lambda stretch: self._computed(number, stretch),
            ended=ended,
            jump=self._jump,
        )
        self._note()
        waiting, self._waiting = self._waiting, []
        for group in waiting:
            self.arrive(group)

    def _start(self) -> None:
        number = self._number()
        self._starting.add(number)
        self._note()
        self._loop.at(self._loop.now + instant(self.layout.start_s), COME, self._started, number)

    def _started(self, number: int) -> None:
        if number in self._starting:  # nobody thought better of it
            self._up(number)

    def _stop(self) -> None:
        """One that starts, else the one with the fewest requests, once it has finished them."""
        if self._starting:
            self._starting.remove(max(self._starting))
        else:
            number = min(self._known.values(), key=lambda known: (known.requests, -known.id)).id
            self._down(number)
            if not self._replicas[number].has_work:
                del self._replicas[number]
        self._note()

    def _fail(self, failure: Failure) -> None:
        number = failure.replica
        if number not in self._known or self._loop.is_over:
            self.missed.append(failure)
            return
        self._down(number)
        self._replicas.pop(number).fail(EngineFailed("The replica failed."))
        self._start()

    def _down(self, number: int) -> None:
        """A replica takes no more requests."""
        del self._known[number]
        self._gateway.router.forget(number)

    def _decide(self) -> None:
        """As Ray Serve's controller does, as long as anything happens."""
        now = seconds(self._loop.now)
        ongoing = {number: known.requests for number, known in self._known.items()}
        if self._autoscaler.settings.target_tokens is not None:
            ongoing = {number: self._replicas[number].tokens_left for number in self._known}
        target = self._autoscaler.decide(now, ongoing)
        while (n := len(self._known) + len(self._starting)) != target:
            (self._start if n < target else self._stop)()
        if not self._loop.is_over:
            self._loop.at(self._loop.now + instant(CONTROL_INTERVAL_S), LOOK, self._decide)

    def _note(self) -> None:
        up = len(self._known)
        others = len(self._starting) + len(self._replicas) - up
        self.changes.append(Change(seconds(self._loop.now), up, others))
