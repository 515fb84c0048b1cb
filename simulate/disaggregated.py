"""Disaggregated prefill: prefill and decode on replicas of their own (DistServe: Zhong et al., OSDI
2024; Splitwise: Patel et al., ISCA 2024; vLLM's disaggregated prefilling).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from client.results import Json
from config.config import Config
from config.settings import ConfigError, flag, meaningful
from scheduling.admission import UserLimits
from scheduling.errors import ServingError
from scheduling.extensions import Group
from scheduling.inference import Inference
from scheduling.scheduler import Scheduler
from simulate.asynchronous import AsynchronousReplica
from simulate.costs import Costs
from simulate.fleet import Change, EndedAt, Fleet, Layout
from simulate.loop import ARRIVE, Arrival, Loop, instant, seconds

# settings that are not simulated with it, and their values without effect
WITHOUT = {
    **dict.fromkeys(("prefix_caching", "shed", "preserve_ordering", "ahead"), False),
    "speculate": 0,
    "prefill": "mixed",
}
# settings that hold in front of all replicas: each would count a request again
LIMITS = ("user_requests_per_minute", "user_tokens_per_minute")
# fields of an inference that a prefill replica sets: of all, and of those that end there
COMPUTED = ("blocks", "computed", "tokens", "decodes")
END = ("state", "error", "is_over")


def refuse(config: Config, variant: str) -> None:
    """Raise ConfigError for settings that are not simulated with disaggregated prefill."""
    for name, value in WITHOUT.items():
        if getattr(config, name) != value and meaningful(name, config.mode):
            raise ConfigError(
                f"{flag(name)} is not simulated with disaggregated prefill, and {variant} "
                "has it; leave it out, or --prefill-replicas"
            )


def fleet_of(config: Config, layout: Layout) -> Callable[..., Fleet | Disaggregated]:
    """Return what makes the replicas of a layout."""
    if layout.prefill_replicas:
        token_bytes = config.block_bytes // config.block_size
        limits = UserLimits(*(getattr(config, name) for name in LIMITS))
        return functools.partial(Disaggregated, token_bytes=token_bytes, limits=limits)
    return functools.partial(Fleet, kind=AsynchronousReplica) if config.ahead else Fleet


class Disaggregated:
    """Prefill replicas compute prompts and first tokens, decode replicas all other tokens.

    A request is passed on by HTTP to a prefill replica, which a router chooses. When its prompt is
    computed, another router chooses a decode replica, to which the first token and the keys and
    values of the prompt are sent at once; from there the client gets its tokens. Each prefill
    replica sends one request after another, in this order, while it computes others. The KV blocks
    of a request are free there once it is sent. At the decode replica it waits in the queue until
    there are rows and blocks for it. If it is preempted, its prompt is computed there again. A
    request of one token ends with the prefill replica's answer.

    token_bytes: of the keys and values of a token. limits: of users, in front of all replicas. All
    else is as of a `Fleet`. The numbers of decode replicas follow those of prefill replicas.
    """

    def __init__(
        self,
        loop: Loop,
        layout: Layout,
        build: Callable[[], Scheduler],
        costs: Costs,
        *,
        token_bytes: int,
        limits: UserLimits | None = None,
        ended: EndedAt,
        session: Callable[[Inference], str | None],
        **of_replicas: Any,
    ):
        self._loop, self._replicas, self._ended = loop, layout.replicas, ended
        self._limits = limits or UserLimits(None, None)
        self._request, self._answer = costs.request, costs.answer  # costs of the HTTP in between
        self._token = 8000 * token_bytes / layout.kv_gbps  # picoseconds to send one
        self._whole: dict[Inference, Inference] = {}  # by the inference of its first token
        self._arrived_at: dict[Inference, float] = {}  # before it was passed on
        self._free_at: dict[int, int] = {}  # when a prefill replica has sent all that it has to
        numbers, n = range(layout.replicas), layout.prefill_replicas
        fleet = functools.partial(Fleet, loop, layout, build, costs, **of_replicas)
        self._prefill = fleet(
            ended=self._prefilled, session=lambda i: session(self._whole[i]), numbers=numbers[:n]
        )
        self._decode = fleet(ended=self._end, session=session, numbers=numbers[n:])

    def arrive(self, group: Group) -> None:
        now = seconds(self._loop.now)
        try:
            self._limits.check(group, now)
        except ServingError as refusal:
            for member in group:
                member.error = refusal
                self._loop.add(self._ended(0, now, member))
            return
        firsts = [replace(member, num_tokens=1, streamed=False) for member in group]
        self._whole.update(zip(firsts, group))
        self._arrived_at.update(dict.fromkeys(group, now))
        self._prefill.arrive(firsts, self._request)

    def check_done(self) -> None:
        """Raise RuntimeError if work is left, once no event is."""
        self._prefill.check_done()
        self._decode.check_done()

    def facts(self, end_s: float) -> Json:
        """Return facts of all replicas, until a time."""
        sent = self._prefill.sent | self._decode.sent
        changes = [Change(0.0, self._replicas, 0)]
        facts = {"requests": sent, "changes": changes, "missed": []}
        return facts | {"replica_s": self._replicas * end_s, "end_s": end_s}

    def _prefilled(self, number: int, now: float, first: Inference) -> Iterable[Arrival]:
        """Send a request on, whose first token a prefill replica has computed, or end it."""
        inference, loop = self._whole.pop(first), self._loop
        inference.arrived_at = self._arrived_at[inference]
        if first.admitted_at is not None:
            inference.admitted_at = inference.arrived_at + first.admitted_at - first.arrived_at
        is_whole = first.error is not None or inference.num_tokens == 1
        for name in COMPUTED + END if is_whole else COMPUTED:
            setattr(inference, name, getattr(first, name))
        sent_at = instant(now)
        if not is_whole:
            begins_at = max(sent_at, self._free_at.get(number, 0))
            sent_at = self._free_at[number] = begins_at + round(inference.computed * self._token)
        at = seconds(sent_at + self._answer)
        inference.token_times = [at] * len(inference.tokens)
        if is_whole:
            inference.answered_at = None if first.answered_at is None else at
            return self._end(number, at, inference)
        scheduler = self._prefill.replicas[number].scheduler
        kept = scheduler.pool.allocate(scheduler.limits.blocks(inference.computed))
        self._prefill.replicas[number].sending += 1
        loop.at(sent_at, ARRIVE, self._sent, number, kept)
        # after all that ends at this instant, so that the router knows of it
        after = sent_at + self._answer - loop.now
        loop.at(loop.now, ARRIVE, self._decode.arrive, [inference], after)
        return ()

    def _sent(self, number: int, kept: list[int]) -> None:
        """Free the blocks of a request that has been sent."""
        replica = self._prefill.replicas[number]
        replica.scheduler.pool.free(kept)
        replica.sending -= 1
        replica.wake()

    def _end(self, number: int, now: float, inference: Inference) -> Iterable[Arrival]:
        """Answer a request, whose times begin before it was passed on."""
        inference.arrived_at = self._arrived_at.pop(inference)
        return self._ended(number, now, inference)
