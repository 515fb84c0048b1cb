"""The costs of iterations, from a server's report: which iterations they were, and the lines
through their times.

A server of ours reports when each iteration began, how long it took and how many rows it had, and
when each request was admitted. The order of admissions decides the rest, since the scheduler is a
state machine: driven once more, it makes the same iterations.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from client.results import Json
from config.config import Config
from scheduling.building import build_group, build_scheduler
from scheduling.inference import Iteration
from simulate import PS, any_ids
from simulate.costs import Costs, Line, streams, work
from simulate.least_squares import OUTLIER, nonnegative, relative

STALL_S = 5e-3  # a longer gap was not made by any of the server's threads
# A request's thread computes about so long when the request comes, and when it is answered; one
# thread after the other, since they share an interpreter
TURN_S = 1e-3
LEAST = 10  # iterations of decode rows alone that give their number of rows a line of its own


class Served(NamedTuple):
    """A request that was answered. Instants are seconds on one clock."""

    sent_at: float  # by the client, as `received_at` is
    arrived_at: float  # at the server, as the next two
    admitted_at: float
    answered_at: float
    received_at: float
    prompt_tokens: int
    completion_tokens: int
    streamed: bool = False


@dataclass(frozen=True, slots=True)
class Observed:
    """An iteration of a server and the requests' threads beside it. Times are seconds."""

    iteration: Iteration
    started_at: float
    seconds: float
    gap: float | None  # until the next one began; None: there was no work
    answered: int  # requests, by it
    beside: bool  # turns of requests' threads fell into it or its gap

    @property
    def rows(self) -> int:
        return len(self.iteration.rows) + self.iteration.padding

    @property
    def decodes(self) -> bool:
        return all(row.decodes for row in self.iteration.rows)

    @property
    def whole(self) -> float:
        """Seconds of the iteration with its gap."""
        return self.seconds + (self.gap or 0.0)

    @property
    def calm(self) -> bool:
        """Return whether no thread ran beside it."""
        return not (self.beside or streams(self.iteration))


def observe(
    config: Config, served: Sequence[Served], iterations: Sequence[Sequence[float]]
) -> list[Observed]:
    """Return the iterations that a server without prefix caching reported of a run.

    served: all requests of the run. iterations: [started_at, seconds, live rows, …] each, on the
    clock of `served`. Raises ValueError where the two do not go together.
    """
    again = build_scheduler(config)
    waiting = deque(sorted(served, key=lambda request: request.arrived_at))
    turns = _turns([t for each in served for t in (each.arrived_at, each.answered_at)])
    observed: list[Observed] = []
    for k, (started_at, seconds, live, *_) in enumerate(iterations):
        while waiting and waiting[0].admitted_at <= started_at:
            request = waiting.popleft()
            prompt, n = [0] * request.prompt_tokens, request.completion_tokens
            group = build_group(config, [prompt], n, keys=[()], streamed=request.streamed)
            again.enqueue(group, started_at)
        iteration, _ = again.schedule(started_at)
        if len(iteration.rows) != live:
            raise ValueError(
                f"iteration {k} had {live:g} rows and not {len(iteration.rows)}: another client "
                f"used this server, or the machine's clock was set; run it again"
            )
        next_at = ended_at = started_at + seconds
        answered = len(again.apply(iteration, any_ids(iteration), ended_at))
        gap = None
        if again.has_work and k + 1 < len(iterations):
            next_at = iterations[k + 1][0]
            gap = next_at - ended_at
        beside = bisect_right(turns, started_at - TURN_S) < bisect_left(turns, next_at)
        observed.append(Observed(iteration, started_at, seconds, gap, answered, beside))
    return observed


def _turns(instants: Sequence[float]) -> list[float]:
    """Beginnings of threads' turns, each due at one of the instants."""
    begun: list[float] = []
    for instant in sorted(instants):
        begun.append(max(instant, begun[-1] + TURN_S) if begun else instant)
    return begun


def fit(
    name: str,
    observed: Sequence[Observed],
    sizes: Sequence[int],
    mixed: Sequence[Sequence[Observed]],
) -> Costs:
    """The costs of an engine and of the server around it, without HTTP's.

    sizes: numbers of rows of which decode rows alone have a line each, if they occur; prompts then
    add to these. mixed: runs in which requests come and go all the time. The time that requests'
    threads take from the iterations beside which they run is charged to those that answer them: by
    a run's sum, since which iteration a thread delayed is not known. Bursts are not mixed: in them
    requests share turns, as few do in traffic.
    """
    calm = [each for each in observed if each.calm]
    decode = _by_rows([each for each in calm if each.decodes], sizes)
    # a server of two rows admits every request at once: of its prefills few are calm, or none
    others, noisy = (
        [each for each in some if not (decode and each.decodes)] for some in (calm, observed)
    )
    others = others or noisy
    amounts = [work(each.iteration) for each in others]
    terms = np.array([(1, each.rows, *each[2:]) for each in amounts], float)
    seconds = np.array([each.seconds for each in others])
    costs = Costs.straight(name, *_picoseconds(relative(terms, seconds)))
    if decode:
        costs = replace(costs, decode=decode, prompts=Line())
        known = np.array([costs.of_work(each) for each in amounts]) / PS
        added = np.column_stack([terms[:, 0], terms[:, 3:]])
        iteration, *chunks = _picoseconds(relative(added, seconds, known))
        costs = replace(costs, prompts=Line(iteration, 0, *chunks))

    gaps = [each for each in calm if each.gap and each.gap < STALL_S and not each.answered]
    terms = _straight([each.rows for each in gaps])
    gap, gap_row = _picoseconds(relative(terms, np.array([each.gap for each in gaps])))
    costs = replace(costs, gap=gap, gap_row=gap_row)

    rows, late_s = [], []  # an answered request's rows and delay, in each run
    for run in mixed:
        kept, late, _ = _late(costs, [each for each in run if each.beside])
        answering = [each for each in kept if each.answered and each.gap]
        if n := sum(each.answered for each in answering):
            rows.append(sum(each.answered * each.rows for each in answering) / n)
            late_s.append(late.sum() / n)
    terms = _straight([-n for n in rows])
    answer, answer_row = _picoseconds(nonnegative(terms, np.array(late_s), np.ones(len(rows))))
    costs = replace(costs, gap_answer=answer, gap_answer_row=answer_row)

    sent = [each for each in observed if streams(each.iteration) and each.gap and not each.beside]
    kept, late, due = _late(costs, sent)
    terms = _straight([streams(each.iteration) for each in kept])
    stream, stream_row = _picoseconds(nonnegative(terms, late, 1 / due))
    return replace(costs, gap_stream=stream, gap_stream_row=stream_row)


def _straight(values: Sequence[float]) -> np.ndarray:
    """Terms of a straight line: a constant and a slope."""
    return np.column_stack([np.ones(len(values)), values])


def _late(
    costs: Costs, observed: Sequence[Observed]
) -> tuple[list[Observed], np.ndarray, np.ndarray]:
    """Return the iterations that the machine did not delay; the seconds by which each, with its
    gap, was longer than expected; and the expected seconds.
    """
    due = expected_s(costs, observed)
    late = np.array([each.whole for each in observed]) - due
    inside = late < np.maximum(STALL_S, due)
    return [each for each, is_in in zip(observed, inside) if is_in], late[inside], due[inside]


def expected_s(costs: Costs, observed: Sequence[Observed]) -> np.ndarray:
    """Seconds of each iteration with its gap, by the costs."""
    gaps = [costs.between(o.iteration, o.answered) if o.gap else 0 for o in observed]
    return np.array([costs.of(o.iteration) + gap for o, gap in zip(observed, gaps)]) / PS


def _by_rows(observed: Sequence[Observed], sizes: Sequence[int]) -> dict[int, Line]:
    """A time for each number of rows, rising with it, and one slope over context for all."""
    rows = np.array([each.rows for each in observed])
    knots = [n for n in sorted(sizes) if (rows == n).sum() >= LEAST]
    if not knots:
        return {}
    inside = (knots[0] <= rows) & (rows <= knots[-1])
    # the first one's time, and how much of the way from each to the next
    ways = [np.interp(rows, pair, (0, 1)) for pair in pairwise(knots)]
    context = [work(each.iteration).context for each in observed]
    terms = np.column_stack([np.ones(len(rows)), *ways, context])[inside]
    *steps, slope = relative(terms, np.array([each.seconds for each in observed])[inside])
    times = _picoseconds(np.cumsum(steps))
    return {n: Line(time, context=round(slope * PS)) for n, time in zip(knots, times)}


def _picoseconds(seconds: np.ndarray) -> list[int]:
    return [round(each * PS) for each in seconds.tolist()]


def residuals(costs: Costs, runs: Sequence[Sequence[Observed]]) -> Json:
    """Errors of the costs over runs, in percent of them.

    Of all the time in which there was work, gaps and requests' threads included; of each run, p5,
    p50 and p95; and of the iterations beside which nothing happened.
    """
    spent = np.array([sum(each.whole for each in run) for run in runs])
    expected = np.array([expected_s(costs, run).sum() for run in runs])
    calm = [each for each in chain(*runs) if each.calm]
    result: dict[str, Any] = {
        "iterations": sum(map(len, runs)),
        "whole_percent": 100 * (float(spent.sum() / expected.sum()) - 1),
        "of_runs_percent": np.percentile(100 * (spent / expected - 1), (5, 50, 95)).tolist(),
        "calm": len(calm),
    }
    if calm:
        errors = 100 * np.array([each.seconds * PS / costs.of(each.iteration) - 1 for each in calm])
        result |= {f"p{p}_percent": float(np.percentile(errors, p)) for p in (5, 50, 95)}
        result |= {
            "mean_absolute_percent": float(np.abs(errors).mean()),
            "outliers_percent": 100 * float((errors > 100 * (OUTLIER - 1)).mean()),
        }
    return result
