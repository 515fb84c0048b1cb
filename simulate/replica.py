"""A replica: a scheduler, and the time that its engine takes."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import NamedTuple, Protocol

from scheduling.errors import Cancelled, ServingError
from scheduling.inference import Inference, Iteration, Row
from scheduling.scheduler import Scheduler
from simulate.jump import apply_repeated, cannot_join, repeats
from simulate.loop import COME, END, PLAN, Ended, Event, Group, Loop, nobody
from simulate.time import not_before, seconds


class Costs(Protocol):
    """What an engine takes, in picoseconds."""

    @property
    def gap(self) -> int:
        """From an arrival where there was no work to the plan."""
        ...

    @property
    def request_turn(self) -> int:
        """Of the interpreter, in which one thread runs at a time, until a request is queued."""
        ...

    @property
    def answer_turn(self) -> int:
        """The same, until an answer is on its way."""
        ...

    def between(self, iteration: Iteration, answered: int) -> int:
        """From an iteration's end to the next plan. answered: by it."""
        ...

    def of(self, iteration: Iteration) -> int: ...

    def following(self, iteration: Iteration) -> tuple[int, int] | None:
        """How long the next one takes, in which the same rows compute a token each, and by how much
        longer each one after that; None: unknown.
        """
        ...


class Stretch(NamedTuple):
    """An iteration, and the n - 1 that follow it, in which its rows compute a token each. Times are
    picoseconds.
    """

    iteration: Iteration
    begun: int
    first: int  # how long the first one takes
    second: int  # and the second, if there is one
    growth: int  # how much longer each after that takes than the one before
    gap: int  # between two
    n: int

    def tokens(self, k: int) -> int:
        """Prompt and completion tokens of the first k, as a scheduler counts them."""
        live = [row for row in self.iteration.rows if not row.idle]
        return sum(row.new_prompt_tokens for row in live if k) + k * len(live)

    def ends(self) -> list[int]:
        """When each of them ends."""
        end, step, found = self.begun + self.first, self.gap + self.second, []
        for _ in range(self.n):
            found.append(end)
            end += step
            step += self.growth
        return found

    def end(self, k: int) -> int:
        """When the k-th one, from 0, ends."""
        later = k * (self.gap + self.second) + k * (k - 1) // 2 * self.growth
        return self.begun + self.first + later

    def begins(self, k: int) -> int:
        return self.end(k - 1) + self.gap if k else self.begun

    def begun_before(self, instant: int) -> int:
        """How many of them begin before then."""
        return bisect_right(range(self.n), instant - 1, key=self.begins)

    def ended_by(self, instant: int) -> int:
        return bisect_right(range(self.n), instant, key=self.end)

    def first_of(self, n: int) -> Stretch:
        """The first n of them."""
        return self._replace(n=n)

    def after(self, n: int) -> Stretch:
        """Those that follow the first n."""
        first = self.second + (n - 1) * self.growth
        return self._replace(
            iteration=self.iteration._replace(rows=self.rows(n)),
            begun=self.begins(n),
            first=first,
            second=first + self.growth,
            n=self.n - n,
        )

    def rows(self, k: int) -> list[Row]:
        """Of the k-th one."""
        if not k:
            return self.iteration.rows
        return [
            row
            if row.idle
            else row._replace(start=row.start + row.n_tokens + k - 1, n_tokens=1, recomputed=0)
            for row in self.iteration.rows
        ]


def any_ids(iteration: Iteration) -> Iterable[int]:
    """An id for each row that samples, where nobody reads the text."""
    return repeat(0)


def unplanned(now: float, iteration: Iteration) -> None: ...


def uncounted(stretch: Stretch) -> None: ...


class Replica:
    """Serves what arrives in the time of a `Loop`, as the handler thread of `batching` does.

    generate: the ids of an iteration. planned: told of each iteration that was asked for, before it
    is computed, and when. computed: told of each stretch. ended: see `drive`. jump: iterations
    between which nothing changes are computed as one stretch, to the same end as one by one; then
    `generate` is asked once for all.
    """

    def __init__(
        self,
        loop: Loop,
        scheduler: Scheduler,
        costs: Costs,
        generate: Callable[[Iteration], Iterable[int]] = any_ids,
        planned: Callable[[float, Iteration], None] = unplanned,
        computed: Callable[[Stretch], None] = uncounted,
        ended: Ended = nobody,
        jump: bool = False,
    ):
        self.scheduler = scheduler
        self.costs = costs
        self._loop = loop
        self._generate, self._jump = generate, jump
        self._planned, self._computed, self._ended = planned, computed, ended
        self._stretch: Stretch | None = None
        self._next: Event | None = None  # the end of the stretch, or a plan
        self._planned_at: int | None = None
        self._free_at = 0  # no plan is made before
        self._coming: deque[tuple[Event, Group]] = deque()  # whose threads wait for their turn
        self._turns_end_at = 0
        self._tokens = 0  # of all that came, but for those that nobody will compute any more
        if scheduler.has_work:
            self._plan_at(loop.now)

    def arrive(self, group: Group) -> None:
        """Queue a group, once it is its thread's turn; one that is refused has the refusal as its
        members' error.
        """
        self._tokens += sum([member.remaining_tokens for member in group])
        now, at = self._loop.now, max(self._loop.now, self._turns_end_at)
        self._turns_end_at = at + self.costs.request_turn
        if at == now:
            self._enqueue(group)
        else:
            self._coming.append((self._loop.at(at, COME, self._enqueue_next), group))

    def _enqueue_next(self) -> None:
        _, group = self._coming.popleft()
        self._enqueue(group)

    def _enqueue(self, group: Group) -> None:
        try:
            self.scheduler.enqueue(group, seconds(self._loop.now))
        except ServingError as refusal:
            for inference in group:
                inference.error = refusal
            self._end(group)
            return
        if self._stretch is None:
            self._plan_at(self._loop.now + self.costs.gap)
        elif self._stretch.n > 1:
            if not cannot_join(self.scheduler):
                self._cut(self._loop.now)
            elif (deadline := self.scheduler.next_deadline()) is not None:
                self._cut(not_before(deadline))

    def cancel(self, group: Group) -> None:
        """End a group now, wherever it is; whoever is over already stays as it is."""
        self._settle()
        error = Cancelled("The request was cancelled.")
        self._turn_away([group], error)
        self._end(self.scheduler.fail(group, error, seconds(self._loop.now)))
        if self._stretch is None and self.scheduler.has_work:
            self._plan_at(self._loop.now + self.costs.gap)

    def fail(self, error: ServingError) -> None:
        """End all that is here, and compute nothing any more."""
        self._settle()
        if self._next is not None:
            self._next.cancel()
        self._stretch = self._next = None
        self._turn_away([group for _, group in self._coming], error)
        ended = self.scheduler.fail(self.scheduler.in_flight(), error, seconds(self._loop.now))
        self._end(ended)

    def _turn_away(self, groups: list[Group], error: ServingError) -> None:
        """End those of them that are not queued yet."""
        away = [each for each in self._coming if each[1] in groups]
        self._coming = deque(each for each in self._coming if each[1] not in groups)
        for event, group in away:
            event.cancel()
            for inference in group:
                inference.error = error
            self._end(group)

    def _settle(self) -> None:
        """Apply what has ended by now; the iteration that is being computed goes on, alone."""
        if self._stretch is None or self._stretch.n == 1:
            return
        self._cut(self._loop.now)
        stretch, n = self._stretch, self._stretch.ended_by(self._loop.now)
        if n == 0:
            return
        assert self._next is not None
        self._next.cancel()
        rest = stretch.after(n)
        self._stretch = stretch.first_of(n)
        self._finish()
        if rest.n:
            self._stretch = rest
            if self._next is not None:
                self._next.cancel()
                self._planned_at = None
            self._next = self._loop.at(rest.end(0), END, self._finish)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._coming)

    @property
    def tokens_left(self) -> int:
        """Tokens that are not computed yet of all that are here."""
        done = self.scheduler.processed
        if self._stretch is not None and self._stretch.n > 1:
            done += self._stretch.tokens(self._stretch.ended_by(self._loop.now))
        return self._tokens - done

    def check_done(self) -> None:
        """Raises RuntimeError if work is left, once nothing is left to happen."""
        if self.has_work:
            raise RuntimeError(
                f"{self.scheduler.policy} neither runs nor waits for anything at "
                f"{seconds(self._loop.now):g} s, and work is left"
            )

    def _end(self, inferences: Iterable[Inference]) -> None:
        for inference in inferences:
            self._tokens -= inference.remaining_tokens
            at = max(self._loop.now, self._turns_end_at)
            self._turns_end_at = at + self.costs.answer_turn
            self._loop.add(self._ended(seconds(at), inference))

    def _plan_at(self, instant: int) -> None:
        """Plan then, unless a plan is due before; not before the engine is free."""
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
        self._end(scheduler.expire(now))
        if loop.somebody_comes_now:  # whoever was late is back at once
            self._plan_at(loop.now)
            return
        iteration, wake_at = scheduler.schedule(now)
        self._planned(now, iteration)
        if iteration.rows:
            self._begin(iteration)
            return
        times = [not_before(t) for t in (wake_at, scheduler.next_deadline()) if t is not None]
        if times and (soonest := min(times)) > loop.now:
            self._plan_at(soonest)

    def _begin(self, iteration: Iteration) -> None:
        costs = self.costs
        n = repeats(self.scheduler, iteration) if self._jump else 1
        following = costs.following(iteration) if n > 1 else None
        if following is None:
            n, following = 1, (0, 0)
        first, gap = costs.of(iteration), costs.between(iteration, 0)
        self._stretch = Stretch(iteration, self._loop.now, first, *following, gap, n)
        if n > 1 and (deadline := self.scheduler.next_deadline()) is not None:
            self._cut(not_before(deadline))
        else:
            self._next = self._loop.at(self._stretch.end(n - 1), END, self._finish)

    def _cut(self, instant: int) -> None:
        """Of the stretch only those are computed that begin before then."""
        stretch = self._stretch
        assert stretch is not None
        n = max(1, stretch.begun_before(max(instant, self._loop.now)))
        if n < stretch.n or self._next is None:
            if self._next is not None:
                self._next.cancel()
            self._stretch = stretch = stretch.first_of(n)
            # in the gap behind it that is past
            self._next = self._loop.at(max(stretch.end(n - 1), self._loop.now), END, self._finish)

    def _finish(self) -> None:
        stretch = self._stretch
        assert stretch is not None
        self._stretch = self._next = None
        iteration, ends = stretch.iteration, stretch.ends()
        times = [seconds(end) for end in ends]
        answered = apply_repeated(self.scheduler, iteration, self._generate(iteration), times)
        self._free_at = ends[-1] + self.costs.between(iteration, len(answered))
        self._computed(stretch)
        self._end(answered)
        if self.scheduler.has_work:
            self._plan_at(self._free_at)
