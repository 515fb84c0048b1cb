"""A simulated replica that is one iteration ahead: it plans and launches the next iteration while
its engine computes one, as `server.asynchronous.AsynchronousManager` does.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from scheduling.asynchronous import without_ended
from scheduling.errors import ServingError
from scheduling.extensions import Group
from scheduling.inference import Inference, Iteration
from simulate.jump import apply_repeated, cannot_join, repeats, reserve_repeated
from simulate.loop import END, PS, not_before, seconds
from simulate.replica import SimulatedReplica, Stretch


class AsynchronousReplica(SimulatedReplica):
    """A replica of which an iteration takes the longer of two times and not their sum: that of the
    engine, and that of the thread which answers, plans and launches. It jumps where the host takes
    no time: all iterations of a stretch are applied when the last one begins, and what arrives
    before is in the plan after it.

    An iteration is applied when the one before has ended, with the time at which it will end. Stop
    strings, which a replayed trace has, are then known at once: no row is wasted as on a server.
    """

    def __init__(self, *args: Any, **settings: Any):
        self._answered: list[Inference] = []  # with the iteration that is computed now
        self._following: Stretch | None = None  # launched beside it
        # the iteration that is computed now, after those of its stretch that no observer saw yet
        self._unobserved: Stretch | None = None
        super().__init__(*args, **settings)
        costs = self.costs
        if costs.gap or costs.gap_row or costs.gap_stream or costs.gap_stream_row:
            self._jump = False

    @property
    def has_work(self) -> bool:
        return self._stretch is not None or super().has_work

    @property
    def _awaits_blocks(self) -> bool:
        return self._stretch is not None or super()._awaits_blocks

    def fail(self, error: ServingError) -> None:
        answered, self._answered, self._following = self._answered, [], None
        if (unobserved := self._unobserved) is not None and unobserved.n > 1:
            self._computed(unobserved._replace(n=unobserved.n - 1))
        for inference, *_ in self._stretch.iteration.rows if self._stretch else ():
            times = inference.token_times
            if times and not_before(times[-1]) > self._loop.now:
                del times[-1], inference.tokens[-1]
        super().fail(error)
        for inference in answered:
            inference.error = error
        self._end(answered)

    def _expire(self) -> None:
        if self._stretch is None:  # else once it has ended
            super()._expire()

    def _plan(self) -> None:
        computes = self._stretch is not None
        super()._plan()
        if computes and self._following is None and self._planned_at != self._loop.now:
            self._land_next()  # nothing can be launched before

    @property
    def remaining_tokens(self) -> int:
        stretch, rest = self._stretch, super().remaining_tokens
        if stretch is not None and stretch.n > 1:  # what is computed now is applied, without jumps
            ended = stretch.ended_by(self._loop.now)
            rest -= stretch.tokens(ended + 1) - stretch.tokens(ended)
        return rest

    def _enqueue(self, group: Group) -> None:
        stretch = self._stretch
        if stretch is not None and stretch.n > 1:
            k = stretch.ended_by(self._loop.now)
            if k and stretch.begins(k) == self._loop.now:  # what ends now has ended before it
                self._stretch = stretch._replace(n=k + 1)
                if self._next is not None:
                    self._next.cancel()
                self._leap()
        super()._enqueue(group)
        if self._following is not None and not cannot_join(self.scheduler):
            self._following = self._following._replace(n=1)

    def _begin(self, iteration: Iteration) -> None:
        now, before = self._loop.now, self._stretch
        begun = now if before is None else max(now, before.end(0))
        n = repeats(self.scheduler, iteration) if self._jump else 1
        more = self.costs.following(iteration) if n > 1 else (0, 0)
        launched = Stretch(iteration, begun, self.costs.of(iteration), *more, 0, n)
        if before is None:
            self._compute(launched)
            self._plan_next(now + self.costs.between(iteration, 0))
        else:
            self._following = launched
            self._land_next()

    def _compute(self, stretch: Stretch) -> None:
        """Begin to compute. A single iteration is applied at once, with the time of its end."""
        iteration = without_ended(stretch.iteration)
        # the next plan has no blocks of a row that expired while it was idle
        freed = any(row.idle and row.blocks is not row.inference.blocks for row in iteration.rows)
        if stretch.n > 1 and iteration is stretch.iteration and not freed:
            self._stretch, self._answered = stretch, []
            deadline = self.scheduler.next_deadline()
            self._cut(stretch.end(stretch.n) if deadline is None else not_before(deadline))
            return
        if stretch.n > 1 or iteration is not stretch.iteration:
            stretch = stretch._replace(iteration=iteration, n=1)
        self._stretch = self._unobserved = stretch
        ids, end = self._generate(iteration), stretch.end(0) / PS
        self._answered = self.scheduler.apply(iteration, ids, end)

    def _plan_next(self, at: int) -> None:
        """Plan what follows on the iteration that is computed now, unless it is one of many."""
        if self._stretch is not None and self._stretch.n > 1:
            return
        if self.scheduler.has_work:
            self._plan_at(at)
        elif self._stretch is not None:
            self._land_next()

    def _cut(self, instant: int) -> None:
        """Compute of the stretch those iterations that begin before an instant, and the one that is
        planned by then.
        """
        stretch = self._stretch
        assert stretch is not None
        last = max(instant, self._loop.now) - 1  # those that begin later are left out
        begun = bisect_right(range(stretch.n), last, key=stretch.begins)
        n = min(stretch.n, begun + 1)
        if n < stretch.n:
            self._stretch = stretch._replace(n=n)
        if self._next is not None:
            self._next.cancel()
        at = max(self._loop.now, stretch.begins(n - 1))
        self._next = self._loop.at(at, END, self._leap)

    def _leap(self) -> None:
        """Apply all iterations of the stretch, of which the last begins now; that one apart if a
        request expires before it.
        """
        stretch, scheduler, now = self._stretch, self.scheduler, self._loop.now
        assert stretch is not None
        self._next = None
        iteration, n = stretch.iteration, stretch.n - 1
        takes, deadline = stretch.end(n) - stretch.begins(n), scheduler.next_deadline()
        last = Stretch(iteration, now, takes, 0, 0, 0, 1)
        if n and (deadline is None or deadline > seconds(now)):
            self._apply_ahead(stretch)
            self._stretch, self._unobserved = last, stretch
        else:
            if n:
                reserve_repeated(scheduler, iteration, n)  # the last one's, too
                self._apply_ahead(done := stretch._replace(n=n))
                self._computed(done)
                self._stretch = None
                self._expire()
            self._compute(last._replace(iteration=iteration._replace(rows=stretch.rows(n))))
        self._plan_next(now)

    def _apply_ahead(self, stretch: Stretch) -> None:
        """Apply the iterations of a stretch; those that end later with the times of their ends."""
        iteration, times = stretch.iteration, [end / PS for end in stretch.ends()]
        ids = self._generate(iteration)
        self._answered = apply_repeated(self.scheduler, iteration, ids, times)
        self._free_at = self._loop.now

    def _land_next(self) -> None:
        """End the iteration that is computed now as soon as it has ended."""
        assert self._stretch is not None
        if self._next is not None:
            self._next.cancel()
        self._planned_at = None
        at = max(self._loop.now, self._free_at, self._stretch.end(0))
        self._next = self._loop.at(at, END, self._land)

    def _land(self) -> None:
        stretch, unobserved, following = self._stretch, self._unobserved, self._following
        assert stretch is not None and unobserved is not None
        self._next = self._stretch = self._unobserved = self._following = None
        self._computed(unobserved)
        self._free_at = self._loop.now + self.costs.between(stretch.iteration, len(self._answered))
        self._end(self._answered)
        self._expire()
        if following is not None:
            self._compute(following)
        self._plan_next(self._loop.now)
