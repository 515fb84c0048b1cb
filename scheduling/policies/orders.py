"""Which waiting request goes first. Orders that also pause rows are in `preemptive`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice, takewhile
from typing import TYPE_CHECKING, Any, ClassVar

from scheduling.policies.base import prefills, setting

if TYPE_CHECKING:
    from scheduling.inference import Inference
    from scheduling.policies.base import View
    from scheduling.queue import Queue

OLDEST = 128  # requests that `hrrn` sorts
HOLD_BACK = 32  # tokens


@dataclass(frozen=True)
class Order:
    """Waiting requests go by `turn`, smallest first, which does not change while they wait, unless
    `ordered` says otherwise. Fields are settings.

    `in_order`: no request is admitted before an earlier one. `preemptive`: rows go by their turn,
    too, and those beyond max_batch_size are paused. `by_user`: it goes by the view's ledger.
    `by_length`: by predicted lengths. `by_service`: by what the server has computed, so that each
    iteration may change it.
    """

    in_order: ClassVar[bool] = True
    preemptive: ClassVar[bool] = False
    by_user: ClassVar[bool] = False
    by_length: ClassVar[bool] = False
    by_service: ClassVar[bool] = False

    @property
    def queue_policies(self) -> Mapping[int, Any]:
        """Policies of the levels that have one."""
        return {}

    @property
    def weights(self) -> Mapping[str, float]:
        """Weights of users, 1 for all others."""
        return {}

    @property
    def promote_after_s(self) -> float | None:
        """Time without being computed after which an inference is promoted."""
        return None

    def check(self, group: Sequence[Inference]) -> None:
        """Raise InvalidRequest for a request that the order cannot place."""

    def arrive(self, group: Sequence[Inference], processed: int) -> None:
        """Record what the order needs of an arriving request. processed: tokens that the server has
        computed so far.
        """

    def turn(self, inference: Inference) -> tuple[Any, ...]:
        """Return rank, key and id, so that of equals the first arrival goes first, and members of
        a request stay side by side.
        """
        return self.rank(inference), self.key(inference), inference.id

    def place(self, inference: Inference) -> tuple[Any, ...]:
        """Return the turn, to sort by. Raises ValueError if it has a NaN, which sorts nowhere."""
        if _has_nan(turn := self.turn(inference)):
            raise ValueError(f"the key of a request is {turn}; NaN has no place in an order")
        return turn

    def rank(self, inference: Inference) -> Any:
        """Return what counts before the key; where blocks run out, the last rank is preempted."""
        return 0

    def key(self, inference: Inference) -> Any:
        return inference.arrived_at

    def is_overdue(self, inference: Inference, now: float) -> bool:
        """Return whether it has waited so long that only earlier arrivals go before it."""
        return False

    def computed(self, inference: Inference, tokens: int, now: float) -> None:
        """Note that so many tokens were computed, recomputed ones aside; called for `preemptive`
        orders, whose turns it may change.
        """

    def delay(self, inference: Inference) -> None:
        """Put an inference behind all others of its level."""

    def promote(self, inference: Inference, now: float) -> None:
        """Give another turn to an inference that was not computed for `promote_after_s`."""

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        """Return the inferences of a queue, in the order."""
        return iter(queue.by_key.values())


def _has_nan(key: Any) -> bool:
    return any(map(_has_nan, key)) if isinstance(key, tuple) else key != key


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
        gt=0,
        le=1e9,
        allow_inf_nan=False,
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
        ge=0,
        le=1e9,
        allow_inf_nan=False,
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
        ge=0,
        le=1e9,
        allow_inf_nan=False,
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
    prefix_window: int = setting(128, "number of the oldest requests that it sorts", ge=1)

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        def most_cached_first(members: Sequence[Inference]) -> float:
            return -max(view.cached_tokens(member) for member in members)

        ordered = oldest_sorted(queue, self.prefix_window, most_cached_first)
        return ordered if view.request_level else _one_of_each(ordered, view)


def _one_of_each(ordered: Iterable[Inference], view: View) -> Iterator[Inference]:
    """Return requests without those that wait for blocks which another one computes.

    Two with HOLD_BACK uncached tokens in common have the same key for the block after them.
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
            is_first(inference, inference.num_cached_blocks)
    for inference in ordered:
        if is_first(inference, len(view.find(inference))):
            yield inference
