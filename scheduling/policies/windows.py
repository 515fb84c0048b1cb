"""Orders whose keys change while requests wait: they sort the oldest, and look no further."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, ClassVar

from scheduling.policies.base import View, prefills, setting
from scheduling.policies.orders import Bounded, Order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from scheduling.inference import Inference
    from scheduling.queue import Queue

OLDEST = 128  # requests that `hrrn` sorts
HOLD_BACK = 32  # tokens


def oldest_sorted(
    queue: Queue, n: int, key: Callable[[Sequence[Inference]], float]
) -> Iterator[Inference]:
    """The n requests that came first, smallest key first; then the others as they came."""
    requests: Iterator[Sequence[Inference]] = (
        list(members) for _, members in groupby(queue.by_key.values(), key=lambda i: i.group)
    )
    oldest = sorted(islice(requests, n), key=key)
    return chain.from_iterable(chain(oldest, requests))


@dataclass(frozen=True)
class Hrrn(Bounded):
    """The highest response ratio next, with tokens for time, so that it needs no clock (as SGLang
    has it): tokens that the server processed since a request came ÷ those that it would compute of
    its own prompt.
    """

    by_service: ClassVar[bool] = True

    def _others(self, queue: Queue, view: View) -> Iterator[Inference]:
        def ratio(members: Sequence[Inference]) -> float:
            own = sum(member.uncomputed - view.cached(member) for member in members)
            return (view.processed - members[0].processed_before) / own

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
    prefix_window: int = setting(128, "how many requests, from the oldest, it orders", ge=1)

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        def most_cached_first(members: Sequence[Inference]) -> float:
            return -max(view.cached(member) for member in members)

        ordered = oldest_sorted(queue, self.prefix_window, most_cached_first)
        return ordered if view.request_level else _one_of_each(ordered, view)


def _one_of_each(ordered: Iterable[Inference], view: View) -> Iterator[Inference]:
    """Without those that wait for what another one computes.

    Two that have HOLD_BACK uncached tokens in common have so many cached ones in common, too:
    the key of the block after both tells them.
    """
    blocks = view.limits.blocks(HOLD_BACK)
    computes: dict[bytes, int] = {}  # by which request

    def is_first(inference: Inference, cached: int) -> bool:
        keys = inference.keys or ()
        if len(keys) <= cached + blocks:
            return True
        return computes.setdefault(keys[cached + blocks], inference.group) == inference.group

    for inference in view.running:
        if prefills(inference):
            is_first(inference, inference.named)
    for inference in ordered:
        if is_first(inference, len(view.found(inference))):
            yield inference
