"""Routers of scheduling/routers.py, which the simulator runs too, for Ray Serve."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RequestRouter,
    RunningReplica,
)

from scheduling import routers
from scheduling.prefix_cache import block_keys
from scheduling.routers import ReplicaLoad, ReportedLoad, RoutedRequest
from server.request import Request

Ranks = list[list[RunningReplica]]  # the replicas that are preferred first


def meant(replicas: list[RunningReplica], pending: PendingRequest | None) -> Ranks:
    """Return the replica that a request names, if it is up. If it is not, any replica may take the
    request: it answers that there is none of this name.
    """
    to = pending.kwargs.get("to") if pending else None
    named = [replica for replica in replicas if replica.replica_id.unique_id == to]
    return [named] if named else []


def offered(replicas: list[RunningReplica], pending: PendingRequest) -> Ranks:
    """Return replicas that the request was not offered to yet, then those that had no room."""
    tried = pending.kwargs.get("tried", ())
    was = [each for each in replicas if each.replica_id.unique_id in tried]
    return [rank for rank in ([each for each in replicas if each not in was], was) if rank]


class OurRouter(RequestRouter):
    """A router of scheduling.routers, behind Ray's interface.

    A replica's requests are those that this handle sent and that are not answered. Its tokens are
    those of its last report (`Replica.record_routing_stats`, which Ray fetches from time to time)
    and those sent there since the report was made, by the clocks of both machines.
    """

    def initialize_state(self, name: str, block_size: int) -> None:
        self._router = routers.router(name)
        self._block_size = block_size
        self._sent: defaultdict[ReplicaID, set[str]] = defaultdict(set)  # ids of requests
        self._reported: dict[ReplicaID, ReportedLoad] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> Ranks:
        for each in candidate_replicas:
            if report := each.routing_stats:
                self._load(each.replica_id).report(report["at"], 0, report["tokens"])
        if pending_request is None or (named := meant(candidate_replicas, pending_request)):
            return named if pending_request else [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else Ray tries without a pause
        untried, *tried = offered(candidate_replicas, pending_request)
        known = {number(each.replica_id): each for each in untried}
        loads = [self._known(n, each) for n, each in known.items()]
        chosen = self._router.choose(self._routed(pending_request), loads)
        first = known.pop(chosen)
        return [[first], [*known.values()], *tried]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        self._sent[replica_id].add(pending_request.metadata.internal_request_id)
        if (request := request_of(pending_request)) is not None:
            self._load(replica_id).sent(time.time(), tokens_of(request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._sent[replica_id].discard(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        before = set(self._replica_id_set)
        super().update_replicas(replicas)
        for id_ in before - self._replica_id_set:
            self._router.forget(number(id_))
        for kept in (self._sent, self._reported):
            for gone in kept.keys() - self._replica_id_set:
                del kept[gone]

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
        return ReplicaLoad(number, len(self._sent[id_]), self._load(id_).known.tokens)

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
