"""Requests with limits on their latency: classes of them, and shedding of those that cannot meet
theirs (SLOs-Serve's admission control, arXiv 2504.08784, with an estimate in place of its plan).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any

from scheduling.admission import has_begun
from scheduling.errors import DeadlinePassed, InvalidRequest, Overloaded, ServingError
from scheduling.extensions import Extension, Group
from scheduling.history import History
from scheduling.inference import Inference, Slo
from scheduling.policies.deadlines import read_slo_classes
from scheduling.queue import Timers


class SloClasses(Extension):
    """Limits of the classes, for requests that name one; a request's own limit wins."""

    def __init__(self, classes: str):
        self._classes = read_slo_classes(classes)

    def check(self, group: Group, now: float) -> None:
        """Fill in the limits of the class. Raises InvalidRequest for a class that is not defined.

        Without any classes a name is a mere label, where the request states its limits itself.
        """
        ttft_ms, tpot_ms, name = group[0].slo
        if name is None or ((ttft_ms or tpot_ms) and not self._classes):
            return
        if name not in self._classes:
            known = ", ".join(self._classes) or "none; start it with --slo-classes"
            raise InvalidRequest(
                f"slo_class: there is no class {name[:100]!r} here; name one of those that this "
                f"server has ({known}), or state slo_ttft_ms and slo_tpot_ms.",
                param="slo_class",
            )
        of_class = self._classes[name]
        for member in group:
            member.slo = Slo(ttft_ms or of_class.ttft_ms, tpot_ms or of_class.tpot_ms, name)


class Shedding(Extension):
    """Refusal of requests that would get their first token too late, by the time of past
    iterations; and the end of those that still wait when it is due.

    Without that end late requests would be the earliest due, and make others late.
    """

    remembers = (History,)
    timers: Timers[Group]

    def __init__(self) -> None:
        self.timers = Timers(has_begun)

    def attach(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._history: History = scheduler.memories[History]

    def check(self, group: Group, now: float) -> None:
        """Raise Overloaded for a request whose first token would come after its limit."""
        limit_ms = group[0].slo.ttft_ms
        if limit_ms is None or not self._history.is_known:
            return
        for member in group:
            member.arrived_at = now
        if self.wait_s(group[0], limit_ms / 1e3) > limit_ms / 1e3:
            raise Overloaded(
                f"The requests that wait would delay this one's first token beyond its limit of "
                f"{limit_ms:g} ms; try again later, or state a larger slo_ttft_ms."
            )

    def arrive(self, group: Group, now: float) -> None:
        if (limit_ms := group[0].slo.ttft_ms) is not None:
            self.timers.add(now + limit_ms / 1e3, group)

    def expire(self, now: float) -> list[tuple[Inference, ServingError]]:
        """Return the requests that wait although their first token was due."""
        late = [member for group in self.timers.due(now) for member in group]
        text = "The first token was due after {:g} ms, and the request still waited."
        return [(member, DeadlinePassed(text.format(member.slo.ttft_ms))) for member in late]

    def wait_s(self, newcomer: Inference, enough_s: float) -> float:
        """Return an estimate of the time to the first token of a request that arrives now; one
        beyond `enough_s` may be too small.

        A request joins at once where a row and KV blocks for its whole life are free, else in place
        of the next one that ends. Paused rows and others take turns.
        """
        scheduler, limits = self._scheduler, self._scheduler.limits
        running = scheduler.running.values()
        decode_rows = min(limits.max_batch_size, len(running))
        turns = max(1.0, len(running) / limits.max_batch_size)
        ends = [turns * _iterations_left(each) for each in running]
        heapify(ends)
        rows = math.inf if scheduler.order.preemptive else limits.max_batch_size - len(running)
        blocks = scheduler.pool.free_blocks
        joins, prompt_tokens, wait_s = 0.0, 0, 0.0  # joins: after so many iterations
        for inference in chain(self._before(newcomer), [newcomer]):
            needed = limits.blocks(inference.total_tokens)
            if rows > 0 and needed <= blocks:
                rows, blocks = rows - 1, blocks - needed
            elif ends:
                blocks = 0  # none overtakes one that does not fit
                joins = max(joins, heappop(ends))
            heappush(ends, joins + turns * _iterations_left(inference))
            prompt_tokens += inference.uncomputed
            wait_s = self._history.seconds(joins + 1, decode_rows, prompt_tokens)
            if wait_s > enough_s:
                break
        return wait_s

    def _before(self, newcomer: Inference) -> Iterator[Inference]:
        """Return the waiting requests that go before one that arrives now."""
        [queue] = self._scheduler.queue.queues
        last = (*self._scheduler.order.turn(newcomer)[:-1], math.inf)
        return (queue.by_key[key] for key in queue.by_key.irange(maximum=last))


def _iterations_left(inference: Inference) -> int:
    """Return about how many more iterations it runs."""
    return max(1, inference.standing.predicted_tokens - len(inference.tokens))
