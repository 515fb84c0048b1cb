"""Virtual time: the server's own scheduler without its thread, its clock and its tensors.

Knows no torch, no HTTP and no clock. Tests, benchmarks and what else plans ahead drive the
scheduler by one loop, which does what the handler thread of `batching` does.

loop      what happens when
replica   a scheduler, and the time that its engine takes
costs     how long an iteration takes, as calibrated
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from scheduling.inference import Iteration
from scheduling.scheduler import Scheduler
from simulate.loop import Arrival, Ended, Loop, nobody
from simulate.replica import Replica, any_ids, unplanned
from simulate.time import PS, seconds

__all__ = ["PS", "Arrival", "Loop", "Replica", "any_ids", "drive", "seconds"]


class _Stepped:
    """What each iteration takes by a function that knows nothing of the next one."""

    gap = request_turn = answer_turn = 0

    def __init__(self, cost_s: Callable[[Iteration], float]):
        self._cost_s = cost_s

    def between(self, iteration: Iteration, answered: int) -> int:
        return 0

    def of(self, iteration: Iteration) -> int:
        return round(self._cost_s(iteration) * PS)

    def following(self, iteration: Iteration) -> None:
        return None


def drive(
    scheduler: Scheduler,
    arrivals: Iterable[Arrival],
    cost_s: Callable[[Iteration], float],
    generate: Callable[[Iteration], Iterable[int]] = any_ids,
    planned: Callable[[float, Iteration], None] = unplanned,
    ended: Ended = nobody,
) -> float:
    """Serve groups of inferences to the end by one scheduler, an iteration at a time, and return
    the time at which it is.

    They have their stamps and tokens then. arrivals: (seconds, group), by time, drawn as they come.
    cost_s: how long an iteration takes. planned: told of each iteration before it is computed, and
    when. ended: told of each inference that is answered, expired or refused, and when; what it
    returns arrives too, no earlier than that, such as the next turn of a conversation. A group that
    is refused keeps the refusal as its members' `error`. Raises RuntimeError if nothing runs and
    nothing is waited for while work is left.
    """
    loop = Loop()
    replica = Replica(loop, scheduler, _Stepped(cost_s), generate, planned, ended=ended)
    loop.serve(arrivals, replica.arrive)
    loop.run()
    replica.check_done()
    return seconds(loop.now)
