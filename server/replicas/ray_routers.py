"""Routers of scheduling/routers.py, which the simulator runs too, for Ray Serve."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from scheduling import routers
from scheduling.prefix_cache import block_keys
from scheduling.routers import ReplicaLoad, ReportedLoad, RoutedRequest
from server.request import Request

Ranks = list[list[RunningReplica]]  # the replicas that are preferred first


def meant(replicas: list[RunningReplica], pending: PendingRequest) -> Ranks:
    """Return the replica that a request names, if it is up. If it is not, any replica may take the
    request: it answers that there is none of this name.
    """
    to = pending.kwargs.get("to")
    named = [replica for replica in replicas if replica.replica_id.unique_id == to]
    return [named] if named else []


def offered(replicas: list[RunningReplica], pending: PendingRequest) -> Ranks:
    """Return replicas that the request was not offered to yet, then those that had no room."""
    tried = pending.kwargs.get("tried", ())
    was = [each for each in replicas if each.replica_id.unique_id in tried]
    return [rank for rank in ([each for each in replicas if each not in was], was) if rank]


class OurRouter(RequestRouter):
    """A router of scheduling.routers, behind Ray's interface.

    A replica's requests are those that this handle sent and that are not answered, counted as they
    are sent: Ray may say that a short one ended before it says that it was routed. Its tokens are
    those of its last report (`Replica.record_routing_stats`, which Ray fetches from time to time)
    and those meant for it since the report was made, by the clocks of both machines.
    """

    def initialize_state(self, name: str, block_size: int) -> None:
        self._router = routers.router(name)
        self._block_size = block_size
        self._sent: Counter[ReplicaID] = Counter()  # requests
        self._reported: dict[ReplicaID, ReportedLoad] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> Ranks:
        for each in candidate_replicas:
            if report := each.routing_stats:
                self._load(each.replica_id).report(report["at"], 0, report["tokens"])
        if pending_request is None:
            return [candidate_replicas]
        if not (ranks := meant(candidate_replicas, pending_request)):
            untried, *tried = offered(candidate_replicas, pending_request)
            known = {number(each.replica_id): each for each in untried}
            loads = [self._known(n, each) for n, each in known.items()]
            first = known.pop(self._router.choose(self._routed(pending_request), loads))
            ranks = [[first], [*known.values()], *tried]
        context, request = pending_request.routing_context, request_of(pending_request)
        if request is not None and not context.should_backoff:
            # once, and now: a burst is chosen for before Ray says of the first that it was routed
            self._load(ranks[0][0].replica_id).sent(time.time(), tokens_of(request))
        context.should_backoff = True  # else Ray tries again without a pause
        return ranks

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._sent[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._sent[replica_id] -= self._sent[replica_id] > 0  # 0: its replica was thought gone

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        for gone in {*self._sent, *self._reported} - self._replica_id_set:
            self._router.forget(number(gone))
            self._sent.pop(gone, None)
            self._reported.pop(gone, None)

    def _routed(self, pending: PendingRequest) -> RoutedRequest:
        request = request_of(pending)
        if request is None:
            return RoutedRequest(0, 0)
        keys: Sequence[bytes] = ()
        if self._router.uses_keys:
            salts = request.cache_salt, request.adapter
            keys = block_keys(request.prompts[0], self._block_size, *salts)
        prompt = sum(map(len, request.prompts))
        return RoutedRequest(prompt, tokens_of(request) - prompt, keys, request.user)

    def _known(self, number: int, replica: RunningReplica) -> ReplicaLoad:
        id_ = replica.replica_id
        if self._router.uses_tokens and (report := replica.routing_stats):
            routers.report_ages_s.append(time.time() - report["at"])
        return ReplicaLoad(number, self._sent[id_], self._load(id_).known.tokens)

    def _load(self, id_: ReplicaID) -> ReportedLoad:
        return self._reported.setdefault(id_, ReportedLoad(number(id_)))


def number(id_: ReplicaID) -> int:
    """Return a number for a replica, the same in each process."""
    return int.from_bytes(id_.unique_id.encode())


def request_of(pending: PendingRequest) -> Request | None:
    """Return the request of a pending call, if it is a completion."""
    first = pending.args[0] if pending.args else None
    return first if isinstance(first, Request) else None


def tokens_of(request: Request) -> int:
    """Return prompt tokens plus the most completion tokens."""
    prompt = sum(map(len, request.prompts))
    return prompt + len(request.prompts) * request.n * request.num_tokens
