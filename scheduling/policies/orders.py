"""Who goes first among those that wait."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, Any, ClassVar

from scheduling.policies.base import View, prefills, setting

if TYPE_CHECKING:
    from scheduling.inference import Inference

HOLD_BACK = 32  # tokens


@dataclass(frozen=True)
class Order:
    """Its fields are settings.

    A key never changes while a request waits, smallest first; among equal ones who came first goes
    first. `in_order`: nobody goes before an earlier one.
    """

    in_order: ClassVar[bool] = True

    def key(self, group: Sequence[Inference]) -> Any:
        """The key of a request's members, which wait side by side.

        They have their arrival already.
        """
        raise NotImplementedError

    def seen(self, view: View, request_level: bool) -> View:
        """The view of a policy, with those that wait in an order that keys cannot express."""
        return view


@dataclass(frozen=True)
class Fcfs(Order):
    """First come, first served."""

    def key(self, group: Sequence[Inference]) -> float:
        return group[0].arrived_at


@dataclass(frozen=True)
class Prefix(Fcfs):
    """The longest cached prefix first, among those that came first (SGLang's longest prefix match;
    Zheng et al., NeurIPS 2024, section 3).

    *Hold-back*: of requests that have HOLD_BACK tokens or more in common which are not cached, one
    goes at a time; the others wait until it has computed them, or has ended. Never within one
    request, and not in request-level modes, where a batch would wait for another one.
    """

    in_order: ClassVar[bool] = False
    prefix_window: int = setting(
        128,
        "with --order prefix: how many requests, from the oldest, it orders",
        needs=("order", "prefix"),
        ge=1,
    )

    def seen(self, view: View, request_level: bool) -> View:
        return replace(view, waiting=_ByPrefix(view, self.prefix_window, not request_level))


class _ByPrefix(Collection["Inference"]):
    """Those that wait; ordered when somebody looks, since most iterations have no row free."""

    def __init__(self, view: View, window: int, holds_back: bool):
        self._view, self._window, self._holds_back = view, window, holds_back

    def __len__(self) -> int:
        return len(self._view.waiting)

    def __contains__(self, inference: object) -> bool:
        return inference in self._view.waiting

    def __iter__(self) -> Iterator[Inference]:
        requests = (
            list(members) for _, members in groupby(self._view.waiting, key=lambda i: i.group)
        )
        oldest = sorted(
            islice(requests, self._window),
            key=lambda members: -max(self._view.cached(member) for member in members),
        )
        ordered = chain.from_iterable(chain(oldest, requests))
        return self._one_of_each(ordered) if self._holds_back else ordered

    def _one_of_each(self, ordered: Iterator[Inference]) -> Iterator[Inference]:
        """Without those that wait for what another one computes.

        Two that have HOLD_BACK uncached tokens in common have so many cached ones in common, too:
        the key of the block after both tells them.
        """
        blocks = self._view.limits.blocks(HOLD_BACK)
        computes: dict[bytes, int] = {}  # by which request

        def is_first(inference: Inference, cached: int) -> bool:
            keys = inference.keys or ()
            if len(keys) <= cached + blocks:
                return True
            return computes.setdefault(keys[cached + blocks], inference.group) == inference.group

        for inference in self._view.running:
            if prefills(inference):
                is_first(inference, inference.named)
        for inference in ordered:
            if is_first(inference, len(self._view.found(inference))):
                yield inference
