"""Fair queueing by user, in tokens (VTC; Sheng et al., OSDI 2024)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import ClassVar

from scheduling.inference import Inference
from scheduling.ledger import prompt_charge
from scheduling.policies.base import Order, View, setting
from scheduling.queue import Queue


def read_user_weights(text: str) -> dict[str, float]:
    """Read `NAME=WEIGHT,…`, or none. Raises ValueError with a sentence."""
    weights: dict[str, float] = {}
    for pair in filter(None, text.split(",") if text != "none" else ()):
        name, _, value = pair.rpartition("=")
        try:
            weight = float(value)
        except ValueError:
            weight = 0.0
        if not name or not 1e-6 <= weight <= 1e6:
            raise ValueError(
                f"{pair!r} is no weight; write NAME=WEIGHT with a weight from 0.000001 to 1000000, "
                "such as alice=2,bob=1"
            )
        if name in weights:
            raise ValueError(f"{name} has two weights; give it one")
        weights[name] = weight
    return weights


@dataclass(frozen=True)
class Fair(Order):
    """The user served least goes first (VTC; Sheng et al., OSDI 2024, algorithm 2); requests of one
    user as they came.

    A counter grows by PROMPT for each prompt token when a request is first admitted, cached ones
    included, and by COMPLETION for each completion token; recomputed ones are free. While two users
    wait, their service differs by 2 · max(w_p · longest prompt, w_q · tokens in the pool) at most,
    if KV blocks are reserved whole and none are shared. Else by 2 · (w_p · longest prompt + w_q ·
    rows · longest completion): a user's counter is the least when one of its requests is admitted,
    and its rows add no more until the next is. With weights, divided by the smaller one.
    """

    in_order: ClassVar[bool] = False
    by_user: ClassVar[bool] = True
    by_service: ClassVar[bool] = True
    user_weights: str = setting("", "shares of users, such as alice=2,bob=1", "1 each")

    @cached_property
    def weights(self) -> Mapping[str, float]:
        return read_user_weights(self.user_weights)

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        """Return inferences in the order; each request moves its user's counter by its prompt."""
        ledger = view.ledger
        assert ledger is not None
        users = (entry for entry in ledger.by_counter() if entry[2] in queue.by_user)
        next_user = next(users, None)
        # users that have had a turn: counter, number, their requests, the first of those
        turns: list[tuple[float, int, Iterator[Inference], Inference]] = []
        while turns or next_user is not None:
            if next_user is not None and (not turns or next_user[:2] < turns[0][:2]):
                counter, number, user = next_user
                next_user = next(users, None)
                requests = iter(queue.by_user[user].values())
                head = next(requests)
            else:
                counter, number, requests, head = heappop(turns)
            group = [head]
            after = next(requests, None)
            while after is not None and after.group == head.group:
                group.append(after)
                after = next(requests, None)
            yield from group
            if after is not None:
                counter += ledger.charged(head.user, prompt_charge(group))
                heappush(turns, (counter, number, requests, after))
