"""Waiting requests: by arrival, by key and by user, with the times at which they are due."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from sortedcontainers import SortedDict

from scheduling.admission import UserLimits
from scheduling.errors import DeadlinePassed, InvalidRequest, Overloaded
from scheduling.inference import Inference, State
from scheduling.ledger import Ledger
from scheduling.policies.fair import COMPLETION, prompt_charge
from scheduling.policies.lengths import Bins, Predictor
from scheduling.policies.orders import Order
from scheduling.policies.priority import QueuePolicy

SPARE = 64  # entries without a meaning that may be kept beside as many as had one
NO_POLICY = QueuePolicy()

Group = Sequence[Inference]
T = TypeVar("T")


class Timers(Generic[T]):
    """Entries by their time. `is_over`: an entry has lost its meaning, and need not be kept."""

    def __init__(self, is_over: Callable[[T], bool]):
        self._is_over = is_over
        self._heap: list[tuple[float, int, T]] = []
        self._added = 0
        self._most = SPARE

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, entry: T) -> None:
        heapq.heappush(self._heap, (at, self._added, entry))
        self._added += 1
        if len(self._heap) > self._most:
            self._heap = [each for each in self._heap if not self._is_over(each[2])]
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + SPARE

    def due(self, now: float) -> Iterator[T]:
        """Take those whose time has come, in its order."""
        while (at := self.next) is not None and at <= now:
            yield heapq.heappop(self._heap)[2]

    @property
    def next(self) -> float | None:
        """When the next one falls due; over ones before it are dropped."""
        while self._heap and self._is_over(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


class Queue:
    """Those that wait, of all or of one bin. Keys are unique, and do not change meanwhile."""

    def __init__(self) -> None:
        self.by_arrival: SortedDict[int, Inference] = SortedDict()
        self.by_key: SortedDict[tuple[Any, ...], Inference] = SortedDict()
        self.by_user: dict[str | None, SortedDict[int, Inference]] = {}

    def __len__(self) -> int:
        return len(self.by_arrival)

    def add(self, inference: Inference, by_user: bool) -> None:
        """`by_user`: also among its user's, which costs memory a user."""
        self.by_arrival[inference.id] = self.by_key[inference.standing.key] = inference
        if by_user:
            self.by_user.setdefault(inference.user, SortedDict())[inference.id] = inference

    def remove(self, inference: Inference) -> None:
        del self.by_arrival[inference.id], self.by_key[inference.standing.key]
        if inference.user in self.by_user:
            mine = self.by_user[inference.user]
            del mine[inference.id]
            if not mine:
                del self.by_user[inference.user]

    @property
    def oldest(self) -> list[Inference]:
        """The members that wait of the request that came first; none if nobody waits."""
        members: list[Inference] = []
        for inference in self.by_arrival.values():
            if members and inference.group != members[0].group:
                break
            members.append(inference)
        return members


def _has_begun(group: Group) -> bool:
    """Some of it was admitted, or it has an answer."""
    return any(i.admitted_at is not None or i.answered_at is not None for i in group)


class WaitingQueue:
    """Queues, one a bin. Who is in here is WAITING."""

    def __init__(self, order: Order, n_bins: int, predictor: Predictor, limits: UserLimits):
        self.waiting: dict[int, Inference] = {}
        self.queues = [Queue() for _ in range(n_bins)]
        self.ledger = Ledger(order.weights) if order.by_user else None
        self._order = order
        self._bins = Bins(n_bins)
        self._predictor = predictor
        self._limits = limits
        self._sizes: Counter[int] = Counter()  # who waits, by level
        self._timeouts: Timers[Group] = Timers(_has_begun)

    def check(self, group: Group, now: float) -> None:
        """Raises InvalidRequest, Overloaded or RateLimited for a request that cannot come in, whose
        level is known; else it counts against its user's limits.
        """
        policy, asked_s = self._policy_of(group[0]), group[0].queue_timeout_s
        if asked_s is not None and not (policy.timeout_ms and policy.override):
            raise InvalidRequest(
                "queue_timeout_s shortens the time that a queue policy states and lets requests "
                "override, and there is none for this request's level; leave it out.",
                param="queue_timeout_s",
            )
        waiting = self._sizes[group[0].priority]
        if policy.max_size and waiting + len(group) > policy.max_size:
            raise Overloaded(
                f"{waiting} requests of level {group[0].priority} are waiting, of "
                f"{policy.max_size} that its queue holds; try again later, or raise its max_size "
                "in --queue-policy."
            )
        self._limits.admit(group, now)

    def enter(self, group: Group, processed: int, now: float) -> None:
        """Queue an arriving request. processed: see Order.arrive."""
        # one key for all: they stay side by side
        predicted = max(self._predictor.predict(member) for member in group)
        bin_ = self._bins.place(predicted)
        self._order.arrive(group, processed)
        for member in group:
            member.standing.predicted_tokens, member.standing.bin = predicted, bin_
            if self.ledger is not None:
                self.ledger.waits(member)
            self._add(member)
        timeout_s = self._policy_of(group[0]).timeout_s(group[0].queue_timeout_s)
        if timeout_s is not None:
            self._timeouts.add(now + timeout_s, group)

    def wait_again(self, inference: Inference) -> None:
        """It was preempted."""
        if self.ledger is not None:
            self.ledger.waits(inference)
        self._add(inference)

    def leave(self, inference: Inference) -> None:
        """It waits no longer."""
        self._remove(inference)
        if self.ledger is not None:
            self.ledger.leaves(inference)

    def promote(self, inference: Inference, now: float) -> None:
        """It has not been computed for long."""
        self._remove(inference)
        self._order.promote(inference, now)
        self._add(inference)

    def charge_prompt(self, inference: Inference) -> None:
        """It is about to be admitted."""
        if self.ledger is not None:
            self.ledger.charge(inference.user, prompt_charge([inference]))

    def charge_completions(self, served: Sequence[Inference]) -> None:
        """A completion token was computed for each of them."""
        if self.ledger is not None:
            for user, n in Counter(inference.user for inference in served).items():
                self.ledger.charge(user, COMPLETION * n)

    def learn(self, inference: Inference) -> None:
        """It was answered."""
        self._predictor.learn(inference)

    def timed_out(self, now: float) -> list[tuple[Inference, DeadlinePassed]]:
        """Those that their level's queue policy rejects now; those that it delays go behind."""
        rejected = []
        for group in self._timeouts.due(now):
            policy = self._policy_of(group[0])
            if policy.action == "reject":
                asked_s = policy.timeout_s(group[0].queue_timeout_s) or 0.0
                error = DeadlinePassed(
                    f"The request waited for {1e3 * asked_s:g} ms, which is as long as level "
                    f"{group[0].priority}'s queue policy lets it."
                )
                rejected += [(member, error) for member in group]
                continue
            for member in group:
                self._remove(member)
                self._order.delay(member)
                self._add(member)
        return rejected

    @property
    def next_timeout(self) -> float | None:
        return self._timeouts.next

    def _policy_of(self, inference: Inference) -> QueuePolicy:
        return self._order.queue_policies.get(inference.priority, NO_POLICY)

    def _add(self, inference: Inference) -> None:
        inference.state = State.WAITING
        inference.standing.key = self._order.turn(inference)
        self.waiting[inference.id] = inference
        if self._order.queue_policies:
            self._sizes[inference.priority] += 1
        self.queues[inference.standing.bin].add(inference, self._order.by_user)

    def _remove(self, inference: Inference) -> None:
        del self.waiting[inference.id]
        if self._order.queue_policies:
            self._sizes[inference.priority] -= 1
        self.queues[inference.standing.bin].remove(inference)
