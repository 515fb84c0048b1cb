"""Routers, which choose a replica for a request. Pure, but that each remembers its own choices.

A router knows the `ReplicaLoad` of each replica that is up, and no time. Same seed and same calls,
same choices. Of equals none is preferred: they take turns, or are drawn.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(slots=True)
class ReplicaLoad:
    """A replica that is up, as a router may know it; its caller may change it between calls.

    Routers that are to agree (`session`) need the same ids.
    """

    id: int
    requests: int = 0  # sent there and not answered: those that wait and those that run
    tokens: int = 0  # of those, prompt tokens not computed and completion tokens not generated


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request, as a router may know it."""

    prompt_tokens: int
    num_tokens: int  # that it asks for, which may be more than it gets
    keys: Sequence[bytes] = ()  # `blocks.block_keys` of its prompt, the key of no block included
    session: str | None = None  # a user, or a conversation, whose requests share something


class Router:
    """One way to choose."""

    uses_keys: ClassVar[bool] = False  # whether `RoutedRequest.keys` make a difference
    uses_tokens: ClassVar[bool] = False  # whether `ReplicaLoad.tokens` do

    def __init__(self, seed: int = 0):
        self.rng = random.Random(seed)
        self._last: int | None = None

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> int:
        """The id of one of the replicas, of which there must be one at least."""
        raise NotImplementedError

    def forget(self, id: int) -> None:
        """A replica is gone."""

    def in_turn(self, equals: Iterable[ReplicaLoad]) -> int:
        """The one whose id follows the id returned last, the first by chance."""
        ids = [replica.id for replica in equals]
        if self._last is None:
            self._last = self.rng.choice(ids)
        else:
            self._last = min((id for id in ids if id > self._last), default=min(ids))
        return self._last

    def least(self, load: Callable[[ReplicaLoad], int], replicas: Sequence[ReplicaLoad]) -> int:
        """One of those with the least load."""
        lowest = min(map(load, replicas))
        return self.in_turn(replica for replica in replicas if load(replica) == lowest)


class Random(Router):
    """Any, each as likely as the others."""

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> int:
        return self.rng.choice(replicas).id


class RoundRobin(Router):
    """Each in its turn, by id."""

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> int:
        return self.in_turn(replicas)


class LeastRequests(Router):
    """The one with the fewest requests (join the shortest queue; nginx's least_conn)."""

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> int:
        return self.least(_requests, replicas)


class LeastTokens(Router):
    """The one with the fewest tokens left to compute."""

    uses_tokens = True

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> int:
        return self.least(lambda replica: replica.tokens, replicas)


class PowerOfTwo(Router):
    """The one with fewer requests of two drawn at random (Mitzenmacher, IEEE TPDS 2001; Ray Serve's
    default). The longest queue is far shorter than with one drawn, and the two are not always the
    same ones, so that many routers with old knowledge do not all go to one replica.
    """

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> int:
        drawn = self.rng.sample(replicas, min(2, len(replicas)))
        return min(drawn, key=_requests).id  # the first drawn of equals


class PrefixAffinity(Router):
    """Among replicas that have at most `margin` requests more than the least loaded one, that
    which was sent the longest part of this prompt, in full KV blocks, and the less loaded of
    several; the least loaded of all if that is less than `least_match` of the prompt's full blocks.

    So do SGLang's cache-aware router (cache_threshold, balance_abs_threshold) and Ray Serve's
    PrefixCacheAffinityRouter (match_rate_threshold, imbalanced_threshold) on trees of characters,
    but that they give affinity up as a whole while the longest and the shortest queue are too far
    apart. Block keys agree with what a server's prefix cache can find. What was sent to a replica
    is remembered up to `remembered` blocks, the latest, until it is to be forgotten.
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
        """How many of the first blocks were sent to a replica, as far as is remembered."""
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
        """The last block as the oldest, so that a prompt's end is forgotten before its beginning
        and what is remembered is the beginning of each.
        """
        sent = self._sent[id]
        for key in reversed(keys):
            sent[key] = None
            sent.move_to_end(key)
        while len(sent) > self.remembered:
            sent.popitem(last=False)


class SessionAffinity(Router):
    """The same replica for all requests of a session as long as it is up, whatever its load;
    without one, that with the fewest requests.

    By rendezvous hashing (Thaler and Ravishankar, IEEE/ACM ToN 1998): the replica of the largest
    hash of both names. If one of n goes, its own sessions move; if one comes, 1/n of all to it.
    Nothing is remembered, and all routers agree.
    """

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> int:
        if request.session is None:
            return self.least(_requests, replicas)
        session = request.session.encode()

        def weight(replica: ReplicaLoad) -> bytes:
            return hashlib.blake2b(b"%d:%b" % (replica.id, session), digest_size=8).digest()

        return max(replicas, key=weight).id


def _requests(replica: ReplicaLoad) -> int:
    return replica.requests


ROUTERS: dict[str, type[Router]] = {
    "random": Random,
    "round_robin": RoundRobin,
    "least_requests": LeastRequests,
    "power_of_two": PowerOfTwo,
    "least_tokens": LeastTokens,
    "prefix": PrefixAffinity,
    "session": SessionAffinity,
}


def router(name: str, seed: int = 0) -> Router:
    """A router by its name. Raises ValueError for one that is none."""
    if name not in ROUTERS:
        raise ValueError(f"unknown router {name!r}; valid ones are {', '.join(ROUTERS)}")
    return ROUTERS[name](seed)


class ReportedLoad:
    """A replica's load by its last report, and what was sent there since that was made.

    A report takes time to arrive: what was sent meanwhile is not in it, and is added to it. Times
    are in any unit, of one clock, or of clocks that agree.
    """

    def __init__(self, id: int):
        self.known = ReplicaLoad(id)
        self._made_at: float | None = None
        self._since: deque[tuple[float, int]] = deque()  # when a request was sent, and its tokens

    def sent(self, at: float, tokens: int) -> None:
        """A request."""
        self._since.append((at, tokens))
        self.known.requests += 1
        self.known.tokens += tokens

    def report(self, made_at: float, requests: int, tokens: int) -> None:
        """A report; one that is not newer than the last one is known, or outdated."""
        if self._made_at is not None and made_at <= self._made_at:
            return
        self._made_at = made_at
        while self._since and self._since[0][0] <= made_at:
            self._since.popleft()
        self.known.requests = requests + len(self._since)
        self.known.tokens = tokens + sum(tokens for _, tokens in self._since)


class Gateway:
    """A router with the knowledge that it has in practice.

    `max_age` 0: it sees what is, as a gateway does that all requests and answers pass (SGLang's
    router, a single handle of Ray Serve). Else it asks the replicas, all at once, when a request
    comes and their last report is that old or older, in the unit of `now`; in between a load is
    what is `ReportedLoad`, with `counts_own` by this gateway, too. That is vLLM's rule for
    data parallelism, which learns of answers with the next report too (a report each 100 ms).
    Without `counts_own` all requests between two reports go where the last one was least (the
    bulletin board of Mitzenmacher, "How useful is old information?", IEEE TPDS 2000), as those of
    many gateways do which do not know of each other. Who is up is known at once; one that was not
    at the last report is taken for idle.
    """

    def __init__(self, router: Router, max_age: float = 0, counts_own: bool = True):
        self.router, self.max_age, self.counts_own = router, max_age, counts_own
        self._reported_at: float | None = None
        self._reported: dict[int, ReportedLoad] = {}

    def looks(self, now: float) -> bool:
        """Return whether it goes by current loads, and not by an earlier report."""
        return self._reported_at is None or now - self._reported_at >= self.max_age

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], now: float) -> int:
        """The id of the replica that gets the request. `replicas`: those that are up, with what is
        true of them now.
        """
        if not self.max_age:
            return self.router.choose(request, replicas)
        if self.looks(now):
            self._reported_at = now
            self._reported = {each.id: ReportedLoad(each.id) for each in replicas}
            for each in replicas:
                self._reported[each.id].report(now, each.requests, each.tokens)
        known = [
            self._reported.setdefault(each.id, ReportedLoad(each.id)).known for each in replicas
        ]
        chosen = self.router.choose(request, known)
        if self.counts_own:
            self._reported[chosen].sent(now, request.prompt_tokens + request.num_tokens)
        return chosen
