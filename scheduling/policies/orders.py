"""Who goes first among those that wait. Orders that also pause rows are in `turns`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar

from scheduling.door import EXAMPLE, QueuePolicy, read_queue_policies, read_user_weights
from scheduling.errors import InvalidRequest
from scheduling.policies.base import setting

if TYPE_CHECKING:
    from scheduling.inference import Inference
    from scheduling.policies.base import View
    from scheduling.queue import Queue

PROMPT, COMPLETION = 1, 2  # what a token counts in fair queueing


@dataclass(frozen=True)
class Order:
    """Its fields are settings.

    Those that wait go by `turn`, smallest first, which does not change while they do unless
    `ordered` says otherwise. `in_order`: nobody is admitted before an earlier one. `preemptive`:
    rows go by their turn too, and those beyond max_batch_size are paused. `by_user`: it goes by the
    view's ledger. `by_length`: it goes by predicted lengths. `by_service`: by what was computed
    since, so that each iteration counts.
    """

    in_order: ClassVar[bool] = True
    preemptive: ClassVar[bool] = False
    by_user: ClassVar[bool] = False
    by_length: ClassVar[bool] = False
    by_service: ClassVar[bool] = False

    @property
    def queue_policies(self) -> Mapping[int, QueuePolicy]:
        """Of the levels that have one."""
        return {}

    @property
    def weights(self) -> Mapping[str, float]:
        """Of users; who is not there has 1."""
        return {}

    @property
    def promote_after_s(self) -> float | None:
        """Who is not computed for so long gets another turn, by `promote`."""
        return None

    def check(self, group: Sequence[Inference]) -> None:
        """Raises InvalidRequest for a request that the order cannot place."""

    def arrive(self, group: Sequence[Inference]) -> None:
        """A request comes, and gets what its turn goes by."""

    def turn(self, inference: Inference) -> tuple[Any, ...]:
        """Where it stands now: its rank, its key, and its id, so that who came first of equals
        goes first, and members of a request side by side.
        """
        return self.rank(inference), self.key(inference), inference.id

    def rank(self, inference: Inference) -> Any:
        """Before its key; where blocks run out, those of the last rank give way."""
        return 0

    def key(self, inference: Inference) -> Any:
        return inference.arrived_at

    def is_overdue(self, inference: Inference, now: float) -> bool:
        """It has waited so long that only earlier ones go before it."""
        return False

    def computed(self, inference: Inference, tokens: int, now: float) -> None:
        """So many tokens were computed for it, recomputed ones aside. Told of `preemptive` orders,
        whose turns it may change.
        """

    def promote(self, inference: Inference, now: float) -> None:
        """It was not computed for `promote_after_s`."""

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        """Those of a queue, who goes first first."""
        return iter(queue.by_key.values())


@dataclass(frozen=True)
class Fcfs(Order):
    """First come, first served."""


@dataclass(frozen=True)
class Bounded(Order):
    """Before all others go those that have waited for `max_wait_s`, as they came: from then on only
    earlier arrivals go before a request.
    """

    in_order: ClassVar[bool] = False
    max_wait_s: float | None = setting(
        None,
        "who has waited this long goes first (mlfq: returns to the first level)",
        "none",
        gt=0,
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
class Priority(Bounded):
    """Levels, 1 first; within one as they came (Triton's priority levels; vLLM's priorities).

    With KV blocks on demand, those of the lowest level give way. `queue_policy`: what each level's
    queue holds, and for how long (Triton's queue policies).
    """

    priority_levels: int = setting(3, "levels, of which 1 goes first", ge=1, le=64)
    default_priority_level: int | None = setting(
        None, "level of a request that names none, or 0", "the middle one", ge=1
    )
    queue_policy: str = setting(
        "", f"of levels, and of all others by default: {EXAMPLE};default:…", "none"
    )

    @cached_property
    def queue_policies(self) -> Mapping[int, QueuePolicy]:
        return read_queue_policies(self.queue_policy, self.priority_levels)

    def check(self, group: Sequence[Inference]) -> None:
        default = self.default_priority_level or (self.priority_levels + 1) // 2
        level = group[0].priority or default
        if not 1 <= level <= self.priority_levels:
            raise InvalidRequest(
                f"priority must be 1 … {self.priority_levels}, the level of this server's that it "
                f"means, or 0 for level {default}.",
                param="priority",
            )
        for member in group:
            member.priority = level

    def rank(self, inference: Inference) -> tuple[int, bool]:
        return inference.priority, inference.delayed


@dataclass(frozen=True)
class ByWork(Order):
    """By the work that is left, in decoded tokens: those predicted, and `prefill_weight` for each
    token of the prompt to compute.

    What the prefix cache holds of a waiting prompt counts as to compute: it may change at any time,
    and a turn does not.
    """

    by_length: ClassVar[bool] = True
    prefill_weight: float = setting(
        0.2, "decoded tokens that a prompt token to compute is worth", ge=0, allow_inf_nan=False
    )

    def arrive(self, group: Sequence[Inference]) -> None:
        longest = max(len(member.prompt_ids) for member in group)
        for member in group:
            member.longest_prompt = longest

    def work(self, inference: Inference) -> float:
        """Of one of which nothing is computed: of its group's longest."""
        return inference.predicted_tokens + self.prefill_weight * inference.longest_prompt


@dataclass(frozen=True)
class Sjf(ByWork, Bounded):
    """Shortest job first, by prompt and predicted completion tokens (Qiu et al., 2024, by the
    latter alone: a `prefill_weight` of 0).

    With `aging`, a request that came a second earlier goes before one whose work is so many tokens
    less: work − aging · waited sorts as work + aging · arrived, which does not change.
    """

    aging: float = setting(
        0.0, "decoded tokens that a second of waiting is worth", ge=0, allow_inf_nan=False
    )

    def key(self, inference: Inference) -> float:
        return self.work(inference) + self.aging * inference.arrived_at


def prompt_charge(group: Sequence[Inference]) -> int:
    """What admission costs a group. Completions of one prompt have it once; who was admitted before
    has paid.
    """
    return PROMPT * sum(
        len(member.prompt_ids)
        for member in group
        if member.leader is None and member.admitted_at is None
    )


@dataclass(frozen=True)
class Fair(Order):
    """Who was served least goes first: fair queueing by user, in tokens (VTC; Sheng et al., OSDI
    2024, algorithm 2). Within a user as they came.

    A counter grows by PROMPT for each prompt token when a request is first admitted, cached ones
    included, and by COMPLETION for each completion token as it comes; recomputed ones are free.
    Over any time in which two users wait their service differs by 2 · max(w_p · longest prompt, w_q
    · tokens in the pool) at most, whoever asks for more, if the KV blocks of whole lives are
    reserved, and shared with nobody. In any case, as with blocks on demand, by 2 · (w_p · longest
    prompt + w_q · rows · longest completion): a user's counter is the least when one of its
    requests is admitted, and until the next one is, its rows add no more than that. Of users with
    weights, divided by the smaller one.
    """

    in_order: ClassVar[bool] = False
    by_user: ClassVar[bool] = True
    by_service: ClassVar[bool] = True
    user_weights: str = setting("", "shares of users, such as alice=2,bob=1", "1 each")

    @cached_property
    def weights(self) -> Mapping[str, float]:
        return read_user_weights(self.user_weights)

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        """Each request that is taken moves its user's counter by its prompt, within the plan."""
        ledger = view.ledger
        assert ledger is not None
        coming = (entry for entry in ledger.by_counter() if entry[2] in queue.by_user)
        following = next(coming, None)
        turns: list[tuple[float, int, Iterator[Inference], Inference]] = []  # a heap of users
        while turns or following is not None:
            if following is not None and (not turns or following[:2] < turns[0][:2]):
                counter, number, user = following
                following = next(coming, None)
                mine = iter(queue.by_user[user].values())
                head = next(mine)
            else:
                counter, number, mine, head = heappop(turns)
            group = [head]
            after = next(mine, None)
            while after is not None and after.group == head.group:
                group.append(after)
                after = next(mine, None)
            yield from group
            if after is not None:
                counter += ledger.charged(head.user, prompt_charge(group))
                heappush(turns, (counter, number, mine, after))
