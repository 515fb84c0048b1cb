"""Routers, which choose a replica for a request. Pure, except that each remembers its own choices.

A router knows the `ReplicaLoad` of each replica that is up, and no clock. The same seed and calls
give the same choices. Equal replicas take turns, or one is drawn.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

# ages of the reports by which replicas were chosen lately, in the process of the ingress; here and
# not in `ray_routers`, since Ray copies the globals of a router's own module
report_ages_s: deque[float] = deque(maxlen=10_000)


@dataclass(slots=True)
class ReplicaLoad:
    """A replica that is up, as a router may know it; its caller may change it between calls.

    Routers that are to agree (`session`) need the same ids.
    """

    id: int
    requests: int = 0  # sent there and not answered, waiting or running
    tokens: int = 0  # prompt tokens not computed and completion tokens not generated


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request, as a router may know it."""

    prompt_tokens: int
    num_tokens: int  # completion tokens requested, which may be more than it gets
    keys: Sequence[bytes] = ()  # `block_keys` of its prompt, the key of no block included
    session: str | None = None  # a user, or a conversation, whose requests share something


class Router:
    """A policy of choosing."""

    uses_keys: ClassVar[bool] = False  # whether `RoutedRequest.keys` make a difference
    uses_tokens: ClassVar[bool] = False  # whether `ReplicaLoad.tokens` do

    def __init__(self, seed: int = 0):
        self.rng = random.Random(seed)
        self._last: int | None = None

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> int:
        """Return the id of one of the replicas, of which there must be one at least."""
        raise NotImplementedError

    def forget(self, id: int) -> None:
        """Forget a replica that is gone."""

    def in_turn(self, equals: Iterable[ReplicaLoad]) -> int:
        """Return the id that follows the one returned last; at first, a random one."""
        ids = [replica.id for replica in equals]
        if self._last is None:
            self._last = self.rng.choice(ids)
        else:
            self._last = min((id for id in ids if id > self._last), default=min(ids))
        return self._last

    def least(self, load: Callable[[ReplicaLoad], int], replicas: Sequence[ReplicaLoad]) -> int:
        """Return the id of one of the replicas with the least load."""
        lowest = min(map(load, replicas))
        return self.in_turn(replica for replica in replicas if load(replica) == lowest)


class Random(Router):
    """A random replica, each as likely as the others."""

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> int:
        return self.rng.choice(replicas).id


class RoundRobin(Router):
    """All replicas in turn, by id."""

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> int:
        return self.in_turn(replicas)


class LeastRequests(Router):
    """The replica with the fewest requests (join the shortest queue; nginx's least_conn)."""

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> int:
        return self.least(_requests, replicas)


class LeastTokens(Router):
    """The replica with the fewest tokens still to compute."""

    uses_tokens = True

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> int:
        return self.least(_tokens, replicas)


class PowerOfTwo(Router):
    """The one with fewer requests of two replicas drawn at random (Mitzenmacher, IEEE TPDS 2001;
    Ray Serve's default). The longest queue is far shorter than with one drawn; and since pairs
    differ, many routers with old knowledge do not all choose the same replica.
    """

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> int:
        drawn = self.rng.sample(replicas, min(2, len(replicas)))
        return min(drawn, key=_requests).id  # the first drawn of equals


class PrefixAffinity(Router):
    """The replica that was sent the longest part of this prompt, in full KV blocks.

    Replicas with over `margin` requests more than the least loaded one are left out; equal matches
    go to the less loaded replica. If the longest match is less than `least_match` of the prompt's
    full blocks, the least loaded replica is chosen. The latest `remembered` blocks that were sent
    to each replica are remembered; their keys agree with what its prefix cache can find.

    SGLang's cache-aware router (cache_threshold, balance_abs_threshold) and Ray Serve's
    PrefixCacheAffinityRouter (match_rate_threshold, imbalanced_threshold) do the same on trees of
    characters, but ignore all prefixes while the longest and shortest queue are too far apart.
    """

    uses_keys = True

    def __init__(
        self, seed: int = 0, margin: int = 10, least_match: float = 0.1, remembered: int = 10_000
    ):
        super().__init__(seed)
        self.margin, self.least_match, self.remembered = margin, least_match, remembered
        # by replica, the oldest first
        self._sent: defaultdict[int, OrderedDict[bytes, None]] = defaultdict(OrderedDict)

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> int:
        keys = request.keys[1:]
        chosen = self._choose(keys, replicas)
        if keys:
            self._remember(chosen, keys)
        return chosen

    def forget(self, id: int) -> None:
        self._sent.pop(id, None)

    def matched(self, id: int, keys: Sequence[bytes]) -> int:
        """Return how many of the first blocks were sent to a replica, as far as remembered."""
        sent = self._sent.get(id, ())
        return bisect_left(keys, True, key=lambda key: key not in sent)  # from one on, all are

    def _choose(self, keys: Sequence[bytes], replicas: Sequence[ReplicaLoad]) -> int:
        most = min(map(_requests, replicas)) + self.margin
        near = [replica for replica in replicas if replica.requests <= most]
        matched = [self.matched(replica.id, keys) for replica in near]
        longest = max(matched)
        if longest and longest >= self.least_match * len(keys):
            near = [replica for replica, n in zip(near, matched) if n == longest]
        return self.least(_requests, near)

    def _remember(self, id: int, keys: Sequence[bytes]) -> None:
        """Remember a prompt's blocks, its last as the oldest, to be forgotten first."""
        sent = self._sent[id]
        for key in reversed(keys):
            sent[key] = None
            sent.move_to_end(key)
        while len(sent) > self.remembered:
            sent.popitem(last=False)


class SessionAffinity(Router):
    """The same replica for all requests of a session as long as it is up, whatever its load; for a
    request without a session, the replica with the fewest requests.

    By rendezvous hashing (Thaler and Ravishankar, IEEE/ACM ToN 1998): the replica of the largest
    hash of both names. If a replica goes, its own sessions move; if it is added as one of n, 1/n of
    all sessions move to it. Nothing is remembered, and all routers agree.
    """

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> int:
        if request.session is None:
            return self.least(_requests, replicas)
        session = request.session.encode()

        def weight(replica: ReplicaLoad) -> bytes:
            return hashlib.blake2b(b"%d:%b" % (replica.id, session), digest_size=8).digest()

        return max(replicas, key=weight).id


_requests, _tokens = attrgetter("requests"), attrgetter("tokens")


ROUTERS: dict[str, type[Router]] = {
    "random": Random, "round_robin": RoundRobin, "least_requests": LeastRequests,
    "power_of_two": PowerOfTwo, "least_tokens": LeastTokens, "prefix": PrefixAffinity,
    "session": SessionAffinity,
}  # fmt: skip
ON_RAY = ("power_of_two", "least_tokens", "prefix", "session")  # the default one first


def router(name: str, seed: int = 0) -> Router:
    """Return a router by its name. Raises ValueError for an unknown name."""
    if name not in ROUTERS:
        raise ValueError(f"unknown router {name!r}; valid ones are {', '.join(ROUTERS)}")
    return ROUTERS[name](seed)


class ReportedLoad:
    """A replica's load by its last report, plus the requests sent there since that was made.

    A report takes time to arrive, and lacks the requests sent meanwhile. Times are in any unit, of
    one clock or of clocks that agree.
    """

    def __init__(self, id: int):
        self.known = ReplicaLoad(id)
        self._made_at: float | None = None
        self._since: deque[tuple[float, int]] = deque()  # when a request was sent, and its tokens

    def sent(self, at: float, tokens: int) -> None:
        """Add a request that was sent."""
        self._since.append((at, tokens))
        self.known.requests += 1
        self.known.tokens += tokens

    def report(self, made_at: float, requests: int, tokens: int) -> None:
        """Replace the last report; one that is not newer is ignored."""
        if self._made_at is not None and made_at <= self._made_at:
            return
        self._made_at = made_at
        while self._since and self._since[0][0] <= made_at:
            self._since.popleft()
        self.known.requests = requests + len(self._since)
        self.known.tokens = tokens + sum(tokens for _, tokens in self._since)


class Gateway:
    """A router with knowledge as old as in practice.

    With `max_age` 0 it knows current loads, as a gateway does through which all requests and
    answers pass (SGLang's router, a single handle of Ray Serve). Else all replicas report when a
    request comes and the last reports are that old or older, in the unit of `now`; until then loads
    are those of the reports. With `counts_own`, requests that this gateway has sent since are added
    (`ReportedLoad`): vLLM's rule for data parallelism, with a report each 100 ms. Without it, all
    requests between two reports go where the load was least, as those of many gateways do which do
    not know of each other (the bulletin board of Mitzenmacher, "How useful is old information?",
    IEEE TPDS 2000). Which replicas are up is always known; one without a report counts as idle.
    """

    def __init__(self, router: Router, max_age: float = 0, counts_own: bool = True):
        self.router, self.max_age, self.counts_own = router, max_age, counts_own
        self._reported_at: float | None = None
        self._reported: dict[int, ReportedLoad] = {}

    def looks(self, now: float) -> bool:
        """Return whether a choice at `now` is by current loads, and not by earlier reports."""
        return self._reported_at is None or now - self._reported_at >= self.max_age

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], now: float) -> int:
        """Return the id of the request's replica. replicas: those up, with their current loads."""
        if not self.max_age:
            return self.router.choose(request, replicas)
        if self.looks(now):
            self._reported_at = now
            self._reported = {each.id: ReportedLoad(each.id) for each in replicas}
            for each in replicas:
                self._reported[each.id].report(now, each.requests, each.tokens)
        new = self._reported.setdefault
        known = [new(each.id, ReportedLoad(each.id)).known for each in replicas]
        chosen = self.router.choose(request, known)
        if self.counts_own:
            self._reported[chosen].sent(now, request.prompt_tokens + request.num_tokens)
        return chosen
