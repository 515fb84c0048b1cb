"""A simulated replica: a scheduler, and the time that its engine takes."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import NamedTuple

from scheduling.errors import ServingError
from scheduling.extensions import Group
from scheduling.inference import Drafter, Inference, Iteration, Row
from scheduling.planning import next_iteration, nothing_planned, rows_to_draft
from scheduling.scheduler import Scheduler
from simulate.costs import Costs
from simulate.jump import apply_repeated, cannot_join, repeats
from simulate.loop import ARRIVE, END, PLAN, PS, Ended, Event, Loop, not_before, seconds


class Stretch(NamedTuple):
    """An iteration and the n - 1 after it, a token of each row. Times are picoseconds."""

    iteration: Iteration
    begun: int
    first: int  # duration of the first iteration
    second: int  # duration of the second, if there is one
    growth: int  # by which each later one is longer than the one before it
    gap: int  # between two iterations
    n: int

    def tokens(self, k: int) -> int:
        """Count the prompt and completion tokens of the first k, as a scheduler does."""
        live = [row for row in self.iteration.rows if not row.idle]
        return sum(row.new_prompt_tokens for row in live if k) + k * len(live)

    def ends(self) -> list[int]:
        """Return the end of each iteration."""
        first, step, growth = self.begun + self.first, self.gap + self.second, self.growth
        return [first + k * step + k * (k - 1) // 2 * growth for k in range(self.n)]

    def end(self, k: int) -> int:
        """Return the end of the k-th iteration, from 0."""
        later = k * (self.gap + self.second) + k * (k - 1) // 2 * self.growth
        return self.begun + self.first + later

    def begins(self, k: int) -> int:
        return self.end(k - 1) + self.gap if k else self.begun

    def busy(self, n: int) -> int:
        """Return the time of the first n iterations, without the gaps between them."""
        return self.end(n - 1) - self.begun - (n - 1) * self.gap if n else 0

    def ended_by(self, instant: int) -> int:
        """Count the iterations that end at an instant or before."""
        return bisect_right(range(self.n), instant, key=self.end)

    def rows(self, k: int) -> list[Row]:
        """Return the rows of the k-th iteration."""
        if not k:
            return self.iteration.rows
        new = tuple.__new__  # as in `iteration.rows_of`
        return [
            row if row[5] else new(Row, (row[0], row[1] + row[2] + k - 1, 1, *row[3:6], 0, row[7]))
            for row in self.iteration.rows
        ]


def any_ids(iteration: Iteration) -> Iterable[int]:
    """Return ids for all rows that sample, of a text that nothing reads."""
    return repeat(0)


def ignore(*_: object) -> None:
    """Observe nothing."""


class SimulatedReplica:
    """A replica that serves what arrives in the time of a `Loop`, as the handler thread of
    `batching` does.

    generate: returns the ids of an iteration. drafter: proposes some. planned, ended: see `drive`.
    computed: called with each stretch. jump: compute iterations as one stretch while nothing
    changes, with the same result as one by one; `generate` is then called once for all of them.
    """

    def __init__(
        self,
        loop: Loop,
        scheduler: Scheduler,
        costs: Costs,
        generate: Callable[[Iteration], Iterable[int]] = any_ids,
        drafter: Drafter | None = None,
        planned: Callable[[float, Iteration], None] = ignore,
        computed: Callable[[Stretch], None] = ignore,
        ended: Ended = lambda now, inference: (),
        jump: bool = False,
    ):
        self.scheduler = scheduler
        self.costs = costs
        self._loop = loop
        self._generate, self._drafter = generate, drafter
        self._jump = jump
        self._planned, self._computed, self._ended = planned, computed, ended
        self._stretch: Stretch | None = None
        self._next: Event | None = None  # the end of the stretch, or a plan
        self._planned_at: int | None = None
        self._free_at = 0  # time before which no plan is made
        self._arriving: deque[tuple[Event, Group]] = deque()  # groups whose threads wait for a turn
        self._turns_end_at = 0
        self._tokens = 0  # all requests' tokens, without those that will never be computed
        self.sending = 0  # requests whose KV blocks are being sent to another replica
        if scheduler.has_work:
            self._plan_at(loop.now)

    def arrive(self, group: Group, after: int = 0) -> None:
        """Queue a group, after so many picoseconds, and once it is its thread's turn. The
        inferences of a refused group get the refusal as `error`.
        """
        self._tokens += sum([member.remaining_tokens for member in group])
        if after:
            self._loop.at(self._loop.now + after, ARRIVE, self._take_turn, group)
        else:
            self._take_turn(group)

    def _take_turn(self, group: Group) -> None:
        now, at = self._loop.now, max(self._loop.now, self._turns_end_at)
        self._turns_end_at = at + self.costs.request_turn
        if at == now:
            self._enqueue(group)
        else:
            self._arriving.append((self._loop.at(at, ARRIVE, self._enqueue_next), group))

    def _enqueue_next(self) -> None:
        _, group = self._arriving.popleft()
        self._enqueue(group)

    def _enqueue(self, group: Group) -> None:
        try:
            self.scheduler.enqueue(group, seconds(self._loop.now))
        except ServingError as refusal:
            self._refuse(group, refusal)
            return
        if self._stretch is None:
            self._plan_at(self._loop.now + self.costs.gap)
        elif self._stretch.n > 1:
            if not cannot_join(self.scheduler):
                self._cut(self._loop.now)
            elif (deadline := self.scheduler.next_deadline()) is not None:
                self._cut(not_before(deadline))

    def wake(self) -> None:
        """Plan again, if it computes nothing: KV blocks have been freed."""
        if self._stretch is None and self.scheduler.has_work:
            self._plan_at(self._loop.now + self.costs.gap)

    def fail(self, error: ServingError) -> None:
        """End all requests, and compute nothing any more. Iterations that have ended count."""
        if self._next is not None:
            self._next.cancel()
        stretch, self._stretch, self._next = self._stretch, None, None
        if stretch is not None and stretch.n > 1 and (n := stretch.ended_by(self._loop.now)):
            self._apply(stretch._replace(n=n))
        arriving, self._arriving = self._arriving, deque()
        for event, group in arriving:
            event.cancel()
            self._refuse(group, error)
        ended = self.scheduler.fail(self.scheduler.in_flight(), error, seconds(self._loop.now))
        self._end(ended)

    def _refuse(self, group: Group, error: ServingError) -> None:
        for inference in group:
            inference.error = error
        self._end(group)

    @property
    def has_work(self) -> bool:
        """True if requests have not ended."""
        return self.scheduler.has_work or bool(self._arriving)

    @property
    def remaining_tokens(self) -> int:
        """Tokens that are not computed yet, of all requests."""
        done = self.scheduler.processed
        if self._stretch is not None and self._stretch.n > 1:
            done += self._stretch.tokens(self._stretch.ended_by(self._loop.now))
        return self._tokens - done

    def check_done(self) -> None:
        """Raise RuntimeError if work is left, once no event is."""
        if self.has_work:
            raise nothing_planned(self.scheduler)

    def _end(self, inferences: Iterable[Inference]) -> None:
        for inference in inferences:
            self._tokens -= inference.remaining_tokens
            at = max(self._loop.now, self._turns_end_at)
            self._turns_end_at = at + self.costs.answer_turn
            self._loop.add(self._ended(seconds(at), inference))

    def _expire(self) -> None:
        self._end(self.scheduler.expire(seconds(self._loop.now)))

    def _plan_at(self, instant: int) -> None:
        """Plan at an instant, unless a plan is due before; not before the engine is free."""
        instant = max(instant, self._free_at)
        if self._next is not None:
            if self._planned_at is not None and self._planned_at <= instant:
                return
            self._next.cancel()
        self._planned_at = instant
        self._next = self._loop.at(instant, PLAN, self._plan)

    def _plan(self) -> None:
        loop, scheduler = self._loop, self.scheduler
        self._next = self._planned_at = None
        now = seconds(loop.now)
        self._expire()
        if loop.arrival_is_due:  # one that follows from an expired request
            self._plan_at(loop.now)
            return
        if scheduler.speculation is not None and self._drafter is not None:
            scheduler.speculation.draft(rows_to_draft(scheduler, now), self._drafter)
        iteration, at = next_iteration(scheduler, now)
        self._planned(now, iteration)
        if iteration.rows:
            self._begin(iteration)
        elif at is not None:
            self._plan_at(not_before(at))
        elif scheduler.has_work and not self._awaits_blocks:
            raise nothing_planned(scheduler)

    @property
    def _awaits_blocks(self) -> bool:
        """True if KV blocks will be free though nothing is computed, and `wake` is called then."""
        return self.sending > 0

    def _begin(self, iteration: Iteration) -> None:
        costs = self.costs
        n = repeats(self.scheduler, iteration) if self._jump else 1
        following = costs.following(iteration) if n > 1 else (0, 0)
        first, gap = costs.of(iteration), costs.between(iteration, 0)
        self._stretch = Stretch(iteration, self._loop.now, first, *following, gap, n)
        if n > 1 and (deadline := self.scheduler.next_deadline()) is not None:
            self._cut(not_before(deadline))
        else:
            self._next = self._loop.at(self._stretch.end(n - 1), END, self._finish)

    def _cut(self, instant: int) -> None:
        """Compute only those iterations of the stretch that begin before an instant."""
        stretch = self._stretch
        assert stretch is not None
        last = max(instant, self._loop.now) - 1  # those that begin later are left out
        n = max(1, bisect_right(range(stretch.n), last, key=stretch.begins))
        if n < stretch.n or self._next is None:
            if self._next is not None:
                self._next.cancel()
            self._stretch = stretch = stretch._replace(n=n)
            # in the gap after an iteration its end is past
            self._next = self._loop.at(max(stretch.end(n - 1), self._loop.now), END, self._finish)

    def _finish(self) -> None:
        stretch = self._stretch
        assert stretch is not None
        self._stretch = self._next = None
        self._apply(stretch)
        if self.scheduler.has_work:
            self._plan_at(self._free_at)

    def _apply(self, stretch: Stretch) -> None:
        """Apply the iterations of a stretch, and end the requests that they answer."""
        iteration, ends = stretch.iteration, stretch.ends()
        times = [end / PS for end in ends]
        answered = apply_repeated(self.scheduler, iteration, self._generate(iteration), times)
        gap = self.costs.between(iteration, len(answered)) if answered else stretch.gap
        self._free_at = ends[-1] + gap
        self._computed(stretch)
        self._end(answered)
