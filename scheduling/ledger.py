"""Service that each user has had: the counters of fair queueing (VTC; Sheng et al., OSDI 2024).

A user's counter grows by the service that it gets, divided by its weight. When a user begins to
wait, with a new request or a preempted one, its counter is raised to the least one of users that
wait; if none waits, to that of the user that waited last. So a user that is away saves nothing up.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from sortedcontainers import SortedDict

from scheduling.extensions import Extension
from scheduling.inference import Inference

PROMPT, COMPLETION = 1, 2  # charge of a token
MANY = 4096  # number of counters beyond which those that no longer matter are dropped

User = str | None  # None: all requests that name no user


def prompt_charge(group: Sequence[Inference]) -> int:
    """Return the charge of an admission: a prompt counts once, whatever its completions."""
    paying = (m for m in group if m.leader is None and m.admitted_at is None)
    return PROMPT * sum(len(member.prompt_ids) for member in paying)


class Ledger(Extension):
    """Counters, and the users with waiting requests in their order."""

    def __init__(self, weights: Mapping[str, float]):
        self._weights = weights
        self._counters: dict[User, float] = {}
        self._waiting: Counter[User] = Counter()
        self._numbers = itertools.count()  # among equals the user that waits longer is first
        self._place: dict[User, tuple[float, int]] = {}  # the places of users that wait
        self._order: SortedDict[tuple[float, int], User] = SortedDict()
        self._moved: set[User] = set()  # counters that grew since they were put in order
        self._last_left: User = None
        self._most_counters = MANY

    def counter(self, user: User) -> float:
        return self._counters.get(user, 0.0)

    def charged(self, user: User, service: float) -> float:
        """Return what service adds to a user's counter."""
        return service / self._weights.get(user or "", 1.0)

    def wait(self, inference: Inference, now: float) -> None:
        """Raise the counter of its user, if none of the user's requests waited."""
        user = inference.user
        if not self._waiting[user]:
            self._counters[user] = max(self.counter(user), self._floor)
            self._put(user, next(self._numbers))
            if len(self._counters) > self._most_counters:
                self._forget()
        self._waiting[user] += 1

    def leave(self, inference: Inference) -> None:
        user = inference.user
        self._waiting[user] -= 1
        if not self._waiting[user]:
            del self._waiting[user], self._order[self._place.pop(user)]
            self._moved.discard(user)
            self._last_left = user

    def admit(self, inference: Inference, now: float) -> None:
        """Charge its prompt: once for all its completions, and not again after a preemption."""
        self.charge(inference.user, prompt_charge([inference]))

    def sampled(self, inferences: Sequence[Inference], now: float) -> None:
        """Charge a completion token for each."""
        for user, n in Counter(inference.user for inference in inferences).items():
            self.charge(user, COMPLETION * n)

    def charge(self, user: User, service: float) -> None:
        if user not in self._counters:  # forgotten while it ran
            self._counters[user] = self._floor
        self._counters[user] += self.charged(user, service)
        if user in self._place:
            self._moved.add(user)

    def by_counter(self) -> Iterator[tuple[float, int, User]]:
        """Return counter, tie breaker and name of users that wait, the least served first."""
        self._put_in_order()
        for (counter, number), user in self._order.items():
            yield counter, number, user

    @property
    def _floor(self) -> float:
        """Least counter of a user that comes back."""
        self._put_in_order()
        return self._order.peekitem(0)[0][0] if self._order else self.counter(self._last_left)

    def _put(self, user: User, number: int) -> None:
        self._place[user] = place = (self.counter(user), number)
        self._order[place] = user

    def _put_in_order(self) -> None:
        for user in self._moved:
            place = self._place[user]
            del self._order[place]
            self._put(user, place[1])
        self._moved.clear()

    def _forget(self) -> None:
        """Forget counters below the floor: a user that comes back is raised to it anyway."""
        floor = self._floor
        self._counters = {
            user: counter
            for user, counter in self._counters.items()
            if user in self._place or counter > floor or user == self._last_left
        }
        self._most_counters = max(MANY, 2 * len(self._counters))
