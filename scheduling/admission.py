"""Admission control: requests that can never run, and limits of queues and of users."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from scheduling.errors import DeadlinePassed, InvalidRequest, Overloaded, RateLimited, ServingError
from scheduling.extensions import Extension, Group
from scheduling.inference import Inference
from scheduling.policies.base import Limits, Order, Policy
from scheduling.policies.priority import QueuePolicy
from scheduling.queue import Timers, WaitingQueue

MINUTE_S = 60.0
NO_POLICY = QueuePolicy()
IDLE_USERS = 1024  # number of windows beyond which empty ones are dropped


def refuse_too_large(
    group: Sequence[Inference], policy: Policy, limits: Limits, n_blocks: int
) -> None:
    """Raise InvalidRequest for a group that fits into no batch, or not into `n_blocks`."""
    most = policy.max_rows(limits.max_batch_size)
    if policy.request_level and len(group) > most:
        raise InvalidRequest(
            f"Maximum batch size exceeded: {len(group)} completions in one request, at most {most} "
            "in this mode."
        )
    needed = [limits.blocks(inference.total_tokens) for inference in group]
    if (blocks := sum(needed) if policy.request_level else max(needed)) > n_blocks:
        raise InvalidRequest(
            f"The request needs {blocks} KV blocks of {limits.block_size} tokens and the whole "
            f"pool has {n_blocks}: ask for fewer tokens, or start the server with a larger "
            "--kv-cache."
        )


def never_fitting(
    waiting: Iterable[Inference], policy: Policy, limits: Limits, n_blocks: int
) -> list[tuple[Inference, ServingError]]:
    """Return the waiting inferences that fit into no pool of `n_blocks`, each with its error."""
    errors: list[tuple[Inference, ServingError]] = []
    together = policy.request_level
    for _, members in groupby(waiting, lambda i: i.group if together else i.id):
        group = list(members)
        try:
            refuse_too_large(group, policy, limits, n_blocks)
        except InvalidRequest as error:
            errors += [(inference, error) for inference in group]
    return errors


class QueuePolicies(Extension):
    """Limits of each level's queue: requests, and the time of each (Triton's queue policies)."""

    timers: Timers[Group]

    def __init__(self, order: Order):
        self._order, self._policies = order, order.queue_policies
        self._sizes: Counter[int] = Counter()  # waiting inferences by level
        self.timers = Timers(has_begun)

    def attach(self, scheduler: Any) -> None:
        self._queue: WaitingQueue = scheduler.queue

    def check(self, group: Group, now: float) -> None:
        """Raise InvalidRequest for a timeout that its level lacks, Overloaded if that is full."""
        policy, timeout_s = self._policy_of(group[0]), group[0].queue_timeout_s
        if timeout_s is not None and not (policy.timeout_ms and policy.override):
            raise InvalidRequest(
                "queue_timeout_s shortens the timeout of a queue policy with override=yes, and "
                "this request's level has none; leave it out.",
                param="queue_timeout_s",
            )
        waiting = self._sizes[group[0].priority]
        if policy.max_size and waiting + len(group) > policy.max_size:
            raise Overloaded(
                f"{waiting} requests of level {group[0].priority} are waiting, of "
                f"{policy.max_size} that its queue holds; try again later, or raise its max_size "
                "in --queue-policy."
            )

    def arrive(self, group: Group, now: float) -> None:
        timeout_s = self._policy_of(group[0]).timeout_s(group[0].queue_timeout_s)
        if timeout_s is not None:
            self.timers.add(now + timeout_s, group)

    def wait(self, inference: Inference, now: float) -> None:
        self._sizes[inference.priority] += 1

    def leave(self, inference: Inference) -> None:
        self._sizes[inference.priority] -= 1

    def expire(self, now: float) -> list[tuple[Inference, ServingError]]:
        """Return the requests that their level rejects now; put those that it delays last."""
        rejected: list[tuple[Inference, ServingError]] = []
        for group in self.timers.due(now):
            policy = self._policy_of(group[0])
            if policy.action == "reject":
                waited_s = policy.timeout_s(group[0].queue_timeout_s) or 0.0
                error = DeadlinePassed(
                    f"The request waited for {1e3 * waited_s:g} ms, the longest that the queue "
                    f"policy of level {group[0].priority} allows."
                )
                rejected += [(member, error) for member in group]
                continue
            for member in group:
                self._queue.take(member)
                self._order.delay(member)
                self._queue.put(member)
        return rejected

    def _policy_of(self, inference: Inference) -> QueuePolicy:
        return self._policies.get(inference.priority, NO_POLICY)


def has_begun(group: Group) -> bool:
    """Return whether any member of a request was admitted or answered."""
    return any(i.admitted_at is not None or i.answered_at is not None for i in group)


class _Window:
    """Requests of one user in the last minute."""

    def __init__(self) -> None:
        self.entries: deque[tuple[float, int]] = deque()  # time and tokens of each
        self.tokens = 0

    def slide(self, now: float) -> None:
        while self.entries and self.entries[0][0] <= now - MINUTE_S:
            self.tokens -= self.entries.popleft()[1]


class UserLimits(Extension):
    """Requests and tokens per minute that each user may ask for; None: any number (as fair queueing
    is compared with: Sheng et al., OSDI 2024, section 5).

    Tokens are those of prompts, and all that may be generated. Refused requests do not count.
    """

    def __init__(self, requests: int | None, tokens: int | None):
        self._requests = requests
        self._tokens = tokens
        self._windows: dict[str | None, _Window] = {}
        self._most_windows = IDLE_USERS

    def check(self, group: Group, now: float) -> None:
        """Count a request. Raises RateLimited, or InvalidRequest beyond a whole minute's tokens."""
        user = group[0].user
        tokens = sum(
            member.num_tokens + (len(member.prompt_ids) if member.leader is None else 0)
            for member in group
        )
        if self._tokens is not None and tokens > self._tokens:
            raise InvalidRequest(
                f"The request asks for {tokens} tokens, and a user may ask for {self._tokens} a "
                "minute; ask for fewer."
            )
        window = self._windows.setdefault(user, _Window())
        window.slide(now)
        if (wait_s := self._wait_s(window, tokens, now)) is not None:
            raise RateLimited(
                f"{'This user' if user else 'The user without a name'} has asked for "
                f"{len(window.entries)} requests and {window.tokens} tokens in the last minute, "
                f"of {_limit(self._requests)} and {_limit(self._tokens)}; try again in "
                f"{math.ceil(wait_s)} s.",
                retry_after_s=wait_s,
            )
        window.entries.append((now, tokens))
        window.tokens += tokens
        if len(self._windows) > self._most_windows:
            self._forget(now)

    def _wait_s(self, window: _Window, tokens: int, now: float) -> float | None:
        """Return the time until a request of so many tokens is within the limits; None: it is."""
        requests, total = len(window.entries), window.tokens + tokens
        if self._fits(requests, total):
            return None
        for at, n in window.entries:
            requests, total = requests - 1, total - n
            if self._fits(requests, total):
                return at + MINUTE_S - now
        raise AssertionError("an empty window admits every request")

    def _fits(self, requests: int, tokens: int) -> bool:
        """Return whether one more request is within the limits. tokens: with its own."""
        return (self._requests is None or requests < self._requests) and (
            self._tokens is None or tokens <= self._tokens
        )

    def _forget(self, now: float) -> None:
        for window in self._windows.values():
            window.slide(now)
        self._windows = {user: window for user, window in self._windows.items() if window.entries}
        self._most_windows = max(IDLE_USERS, 2 * len(self._windows))


def _limit(most: int | None) -> str:
    return "any number" if most is None else str(most)
