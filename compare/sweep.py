"""A sweep: one server at rates from light to beyond its capacity.

A burst shows roughly where the capacity is, and rates around it where the queue begins to grow. The
capacity is what the server completed while requests were always waiting, at all rates beyond.
All rates lie on one lattice, 2^(k/8) requests per second, so that modes meet at the same rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from client.analysis import queue_grows
from client.draws import at_rate
from client.results import OF_RATE, Point, Result
from client.summary import client_behind
from client.traces import Request
from client.workloads import Workload
from compare.analysis import ATTAINMENT

OCTAVE = 8  # steps of the lattice in which the rate doubles; neighbours are 9% apart
STEP = 2 ** (1 / OCTAVE) - 1  # by which a rate of the lattice is below the next
AMPLE = 1.3  # times the burst's throughput: there the queue grows from the start
LEAST_REQUESTS = 200  # at a rate
FEWEST_REQUESTS = 30  # where so many would take too long, or --seconds says for how long
LEAST_SECONDS, MOST_SECONDS = 10.0, 300.0  # seconds of sending at a rate
FILLS = 2  # times that a server which begins empty can fill, at each rate
MOST_OCTAVES = 16  # above the first rate
FEWEST_OCTAVES = 4  # below it
LOST = 0.01  # a rate at which more requests fail is beyond the capacity
Replay = Callable[[str, Sequence[Request]], Result]


def requests_at(rate: float, seconds: float) -> int:
    """Return how many requests are sent in `seconds`, a few at least."""
    return max(FEWEST_REQUESTS, math.ceil(rate * seconds))


def enough_requests(rate: float, slowest_row_s: float) -> int:
    """Return how many requests show a server at a rate, if sending them is not too long."""
    enough = max(LEAST_REQUESTS, requests_at(rate, max(LEAST_SECONDS, FILLS * slowest_row_s)))
    return min(enough, requests_at(rate, MOST_SECONDS))


def sweep(
    replay: Replay,
    data: Workload,
    arrival: str,
    burst: int,
    seconds: float | None,
    measured: Callable[[Point], None],
) -> None:
    """Measure one server at the rates of a sweep, and call `measured` with each point.

    replay: measures a trace under a title, and returns the result of `client.measure.judged`.
    burst: requests that come at once, and more than the server has rows for. seconds: how long
    a rate is sent, if not as long as its numbers need.
    """
    first = replay("all at once", data.requests(burst, "burst", scaled=True))
    if not first.completed:
        return

    def at(rate: float) -> Point:
        n = requests_at(rate, seconds) if seconds else enough_requests(rate, first.slowest_row_s)
        process = at_rate(arrival, rate)
        result = replay(f"at {rate:g}/s", data.requests(n, process, scaled=True))
        point = Point.of(result.json(OF_RATE) | {
            "rate": rate, "arrival": process, "nominal_num_tokens": data.mean_num_tokens,
            "saturated": saturated(result), "client_behind": client_behind(result),
        })  # fmt: skip
        measured(point)
        return point

    rough = first.busy_throughput and first.busy_throughput / data.mean_num_tokens
    search(at, rough or first.request_throughput or 0.0)


def saturated(result: Result) -> bool:
    """Return whether a rate is beyond the server's capacity: its queue only grew, or requests
    failed. If this client sent most requests late, and not just one in a hundred, the growth says
    nothing about the server.
    """
    return result.failed > LOST * result.ended or queue_grows(result)


def in_words(point: Point) -> str:
    """Return the verdict on a rate as a report shows it."""
    text = "sustained"
    if point.saturated:
        text = "requests failed" if point.failed else "the queue only grows"
    if point.client_behind:
        text = "the client is behind"
    return f"{text}, client late" if point.client_limited else text


def search(measure: Callable[[float], Point], about: float) -> None:
    """Call `measure` at the rates that a sweep needs.

    measure: rate → point. about: the capacity, roughly. Above it the rate doubles until the queue
    only grows, or this client is the limit; then bisection finds where that begins, and the highest
    rate that meets the goodput, each within a step of the lattice. A rate an octave or two below
    shows the server at ease. No rate is measured twice.
    """
    points: dict[int, Point] = {}

    def at(k: int) -> Point:
        if k not in points:
            points[k] = measure(float(f"{2 ** (k / OCTAVE):.4g}"))
        return points[k]

    def bisect(low: int, high: int, good: Callable[[Point], bool]) -> None:
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if good(at(middle)) else (low, middle)

    first = k = math.ceil(OCTAVE * math.log2(AMPLE * about))
    while sustained(at(k)) and k < first + MOST_OCTAVES * OCTAVE:
        k += OCTAVE
    high = k
    while not sustained(at(k)) and k > first - FEWEST_OCTAVES * OCTAVE:
        k -= OCTAVE
    if not sustained(at(k)):
        return
    if k < high:
        bisect(k, k + OCTAVE, sustained)
    while k > first - FEWEST_OCTAVES * OCTAVE and (k > high - 2 * OCTAVE or misses(at(k))):
        k -= OCTAVE
        at(k)
    best = max((k for k, point in points.items() if meets(point)), default=None)
    if best is not None and (missing := [k for k in points if k > best]):
        bisect(best, min(missing), meets)


def sustained(point: Point) -> bool:
    return not point.saturated and not point.client_behind


def meets(point: Point) -> bool:
    """Return whether nine in ten of a rate's requests meet the limits, and no queue grows."""
    return not point.saturated and (point.attainment or 0.0) >= ATTAINMENT


def misses(point: Point) -> bool:
    return point.attainment is not None and not meets(point)


def capacity_of(points: Sequence[Point]) -> float | None:
    """Return the requests per second that a server completes while requests are always waiting,
    over all stretches of these points.

    A request counts by its tokens: as many as the distribution's mean request has. None where
    nothing waited.
    """
    busy_s = sum(p.busy_s for p in points)
    requests = sum((p.busy_throughput or 0.0) * p.busy_s / p.nominal_num_tokens for p in points)
    return requests / busy_s if busy_s else None


@dataclass(frozen=True, slots=True)
class Swept:
    """The outcome of a sweep: the most that the server completes, the last rate that it sustains
    and the first that it does not, and the same of the limits; None where there is none.

    capacity: None where no rate was beyond it: interrupted, or this client was the limit.
    """

    capacity: float | None
    sustained: Point | None
    saturated_rate: float | None
    goodput_rate: float | None
    missed_rate: float | None


def outcome(points: Sequence[Point]) -> Swept:
    beyond = [p for p in points if p.saturated]
    lowest = min((p.rate for p in beyond), default=math.inf)
    below = [p for p in points if p.rate < lowest and not p.client_behind]
    good = max((p.rate for p in points if meets(p)), default=0.0)
    return Swept(
        capacity_of([p for p in beyond if p.busy_throughput]),
        max(below, key=lambda p: p.rate, default=None),
        lowest if beyond else None,
        good or None,
        min((p.rate for p in points if misses(p) and p.rate > good), default=None),
    )
