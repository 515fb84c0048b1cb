"""Which waiting request goes first. Orders that also pause rows are in `preemptive`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice, takewhile
from typing import Any, ClassVar

from scheduling.inference import Inference
from scheduling.policies.base import NOT_NEGATIVE, POSITIVE, View, prefills, setting
from scheduling.policies.base import Order as Order
from scheduling.queue import Queue

OLDEST = 128  # requests that `hrrn` and `prefix` sort (if more wait, SGLang sorts none)
HOLD_BACK = 32  # tokens


@dataclass(frozen=True)
class Fcfs(Order):
    """First come, first served."""


@dataclass(frozen=True)
class Bounded(Order):
    """Requests that have waited for `max_wait_s` go before all others, as they came."""

    in_order: ClassVar[bool] = False
    max_wait_s: float | None = setting(
        None,
        "a request that has waited this long goes first (mlfq: returns to the first level); with "
        "--lora-policy skip or drain it is overtaken no longer",
        "none",
        **POSITIVE,
    )

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        if self.max_wait_s is None:
            yield from self._others(queue, view)
            return
        yield from takewhile(lambda i: self.is_overdue(i, view.now), queue.by_arrival.values())
        for inference in self._others(queue, view):
            if not self.is_overdue(inference, view.now):
                yield inference

    def is_overdue(self, inference: Inference, now: float) -> bool:
        return self.max_wait_s is not None and inference.arrived_at <= now - self.max_wait_s

    def _others(self, queue: Queue, view: View) -> Iterator[Inference]:
        return super().ordered(queue, view)


@dataclass(frozen=True)
class ByWork(Order):
    """The least remaining work first, in decoded tokens: those predicted, and `prefill_weight` for
    each prompt token to compute, those in the prefix cache included, since that may change.
    """

    by_length: ClassVar[bool] = True
    prefill_weight: float = setting(
        0.2,
        "decoded tokens that a prompt token to compute counts as",
        **NOT_NEGATIVE,
    )

    def arrive(self, group: Sequence[Inference], processed: int) -> None:
        longest = max(len(member.prompt_ids) for member in group)
        for member in group:
            member.standing.state = longest

    def work(self, inference: Inference) -> float:
        """Return the work of an uncomputed inference, by its group's longest prompt."""
        return inference.standing.predicted_tokens + self.prefill_weight * inference.standing.state


@dataclass(frozen=True)
class Sjf(ByWork, Bounded):
    """Shortest job first, by prompt and predicted completion tokens (Qiu et al., 2024, by the
    latter alone: a `prefill_weight` of 0).

    With `aging`, a request that came a second earlier goes before one whose work is so many tokens
    less: work − aging · waited sorts as work + aging · arrived, which does not change.
    """

    aging: float = setting(
        0.0,
        "decoded tokens that a second of waiting takes off the length of a request",
        **NOT_NEGATIVE,
    )

    def key(self, inference: Inference) -> float:
        return self.work(inference) + self.aging * inference.arrived_at


def oldest_sorted(
    queue: Queue, n: int, key: Callable[[Sequence[Inference]], Any]
) -> Iterator[Inference]:
    """Return the n oldest requests, smallest key first; then the others as they came."""
    requests: Iterator[Sequence[Inference]] = (
        list(members) for _, members in groupby(queue.by_key.values(), key=lambda i: i.group)
    )
    oldest = sorted(islice(requests, n), key=key)
    return chain.from_iterable(chain(oldest, requests))


@dataclass(frozen=True)
class Hrrn(Bounded):
    """The highest response ratio next, with tokens for time (as SGLang has it): tokens that the
    server processed since a request came ÷ those that it would compute of its own prompt.
    """

    by_service: ClassVar[bool] = True

    def arrive(self, group: Sequence[Inference], processed: int) -> None:
        for member in group:
            member.standing.state = processed

    def _others(self, queue: Queue, view: View) -> Iterator[Inference]:
        def ratio(members: Sequence[Inference]) -> float:
            own = sum(member.uncomputed - view.cached_tokens(member) for member in members)
            return (view.processed - members[0].standing.state) / own

        return oldest_sorted(queue, OLDEST, lambda members: -ratio(members))


@dataclass(frozen=True)
class Prefix(Order):
    """The longest cached prefix first, among those that came first (SGLang's longest prefix match;
    Zheng et al., NeurIPS 2024, section 3).

    *Hold-back*: of requests that have HOLD_BACK tokens or more in common which are not cached, one
    goes at a time; the others wait until it has computed them, or has ended. Never within one
    request, and not in request-level modes, where a batch would wait for another one.
    """

    in_order: ClassVar[bool] = False
    window: ClassVar[int] = OLDEST

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        def most_cached_first(members: Sequence[Inference]) -> float:
            return -max(view.cached_tokens(member) for member in members)

        ordered = oldest_sorted(queue, self.window, most_cached_first)
        return ordered if view.request_level else _one_of_each(ordered, view)


def _one_of_each(ordered: Iterable[Inference], view: View) -> Iterator[Inference]:
    """Return requests without those that wait for blocks which another one computes.

    Two with HOLD_BACK uncached tokens in common have the same key for the block after them.
    """
    blocks = view.limits.blocks(HOLD_BACK)
    computes: dict[bytes, int] = {}  # by which request

    def is_first(inference: Inference, cached: int) -> bool:
        keys = inference.prefix.keys if inference.prefix else ()
        if len(keys) <= cached + blocks:
            return True
        return computes.setdefault(keys[cached + blocks], inference.group) == inference.group

    for inference in view.running:
        if prefills(inference):
            is_first(inference, inference.prefix.n_blocks if inference.prefix else 0)
    for inference in ordered:
        if is_first(inference, len(view.find(inference))):
            yield inference
