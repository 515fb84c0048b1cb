"""What one run's instants say: whether its queue grew, what the server can do, its rows over time,
and what theory expects of it. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import numpy as np

from client.load import TICK_S
from client.outcomes import Outcomes
from client.results import Json, Result, share
from client.summary import client_behind
from stats import ROW_KINDS

BLOCKS = 10
GROWTH = 0.05  # beyond it a queue only grows: seconds of waiting that a second of sending adds
FEWEST = 100  # answers: with fewer, rows that fill look like growth of what is in flight
# answers of all seeds: GROWTH judges 95% of runs of so many at 0.9 and at 1.1 of capacity rightly
# (nobatch, static and dynamic in virtual time), and of runs of 100 up to 45% wrongly
ENOUGH = 3_000
SEEDS = 5  # whose mean growth says that a queue does not grow
APART = 0.1  # by which the two sides of Little's law may differ
OUTSIDE_S = 0.005  # a request's time in HTTP and the client, which the server does not see
TOGETHER_S = 1e-4  # requests admitted within so little are admitted together


def growth(answers: Outcomes) -> float:
    """Seconds of waiting that each second of sending adds.

    That is the slope of TTFT on the instant of sending, less its error.

    It tends to rate / capacity - 1 where the rate is beyond the capacity, else to 0. Waits of
    neighbours are alike, so slope and error are of the means of ten blocks of requests.
    """
    answers = answers.only(~np.isnan(answers.ttft_s))
    ordered = np.argsort(answers["sent_at"], kind="stable")
    blocks = [block for block in np.array_split(ordered, BLOCKS) if len(block)]
    at, ttft_s = (
        np.array([values[block].mean() for block in blocks])
        for values in (answers["sent_at"], answers.ttft_s)
    )
    return _slope(at, ttft_s)


def growth_in_flight(
    sent: Sequence[float] | np.ndarray, ended: Sequence[float] | np.ndarray, fill_s: float
) -> float:
    """The share of sent requests that stay in flight: the slope of the number in flight, less twice
    its error, over the rate of sending.

    It tends to 1 - capacity / rate where the rate is beyond the capacity, else to 0. sent, ended:
    instants of every request, in seconds. fill_s: the first seconds of sending, in which an empty
    server fills; that is no growth. At most half of the sending is left out as such.
    """
    sends, ends = np.sort(sent), np.sort(ended)
    if len(sends) < 2 or sends[-1] == sends[0]:
        return 0.0
    start = min(sends[0] + fill_s, (sends[0] + sends[-1]) / 2)
    edges = np.linspace(start, sends[-1], BLOCKS + 1)
    width = edges[1] - edges[0]

    def mean_count(instants: np.ndarray) -> np.ndarray:
        """Instants before a moment of each block, averaged over its moments."""
        sums = np.concatenate([[0.0], np.cumsum(instants)])
        n = np.searchsorted(instants, edges)
        return np.diff(n * edges - sums[n]) / width

    in_flight = mean_count(sends) - mean_count(ends)
    return (
        _slope((edges[1:] + edges[:-1]) / 2, in_flight, 2)
        * float(sends[-1] - sends[0])
        / (len(sends) - 1)
    )


def queue_grows(result: Result) -> bool:
    """True where the queue only grew in a measurement (of `measure.judged`), by the larger of the
    two growths. One whose client sent most requests late says nothing, and one with few answers
    says nothing of what is in flight.
    """
    return max(_growths([result])) > GROWTH


def overloaded(*results: Result) -> bool | None:
    """True of a server whose queue only grows; None where its answers are too few to know that.

    results: its measurements or their summaries, one a seed; all of them decide together. Chance
    alone lets a queue grow by about 1 / sqrt(answers), so of few answers the growth must be larger.
    """
    known = [r for r in results if not client_behind(r)]
    few = max(1.0, (ENOUGH / max(1, sum(r.completed for r in known))) ** 0.5)
    if (grew := max(_growths(known))) > GROWTH * few:
        return True
    # others came at no rate (a burst, a closed loop), or have no answer
    rated = [r for r in known if r.completed and r.requested_rate and r.achieved_rate]
    if few == 1 or not rated:
        return False
    waited, took = (fmean(_of_sending(of, r) for r in rated) for of in ("ttft", "e2el"))
    calm = (
        (waited < GROWTH / few and took < 1 / 2)
        or (waited < GROWTH and took < 2 * GROWTH)
        or (len(rated) >= SEEDS and grew < GROWTH / 2)
    )
    return False if calm and grew <= GROWTH else None


def _of_sending(measure: str, result: Result) -> float:
    """Return the p99 of a measure as a part of the time of sending."""
    assert result.achieved_rate
    sending_s = result.ended / result.achieved_rate
    return float(result.number(f"p99_{measure}_ms")) / 1e3 / sending_s


def _growths(results: Iterable[Result]) -> tuple[float, float]:
    """Return the mean growth of the wait and of what is in flight, of results that say any."""
    known = [r for r in results if not client_behind(r)]
    many = [r for r in known if r.completed >= FEWEST]
    wait, in_flight = (r.growth for r in known), (r.growth_in_flight for r in many)
    return fmean(wait) if known else 0.0, fmean(in_flight) if many else 0.0


def overload(results: Sequence[Result]) -> str | None:
    """Return what an overload did to a server and its numbers; None where none is known."""
    if not overloaded(*results):
        return None
    wait, in_flight = _growths(results)
    grew = f"its queue grew by {wait:.2f} s per second"
    if wait <= GROWTH:
        grew = f"{share(100 * in_flight)}% of what was sent stayed in flight"
    seconds = fmean(result.wall_clock_s for result in results)
    return f"overloaded: {grew}; its latencies are those of a run of {seconds:.1f} s"


def overload_unknown(servers: Mapping[str, Sequence[Result]]) -> str | None:
    """Return which servers may have been overloaded, and how many answers say; None if all do."""
    names = [name for name, results in servers.items() if overloaded(*results) is None]
    if not names:
        return None
    return (
        f"It cannot be known from so few answers whether {' and '.join(names)} overloaded: near a "
        f"server's capacity that takes {ENOUGH:,}, of one seed or of several."
    )


def _slope(x: np.ndarray, y: np.ndarray, errors: float = 1) -> float:
    """Slope of the least-squares line, less its standard error; 0 at least, and without a line."""
    if len(x) < 3 or x.std() < 1e-3:
        return 0.0
    slope, intercept = np.polyfit(x, y, 1)
    residuals = y - slope * x - intercept
    error = float(np.sqrt(residuals.var() / (len(x) - 2))) / float(x.std())
    return max(0.0, float(slope) - errors * error)


def always_waiting(answers: Outcomes) -> tuple[int, float]:
    """The tokens and the seconds of the longest stretch from admission to admission that never left
    the queue empty; no seconds where there is none.

    From its first admission on, all rows are full, and request-level batches are whole, so tokens /
    seconds is what the server can do. Instants are the server's own, if it gave them; else a
    request waits until its first token, as this client saw it; where it saw none, there is no
    stretch. Tokens whose gaps are not known come at equal intervals.
    """
    server, client = answers.times_at_server, answers.times
    known = ~np.isnan(server.started_at)
    arrived_at = np.where(known, server.started_at, client.started_at)
    first = np.where(known, server.first_token_at, client.first_token_at)
    admitted_at = np.where(known, server.admitted_at, first)
    if np.isnan(admitted_at).any():
        return 0, 0.0
    arrived, admitted = np.sort(arrived_at), np.sort(admitted_at)
    last = np.flatnonzero(np.diff(admitted, append=np.inf) > TOGETHER_S)  # the last of each group
    waiting_after = np.searchsorted(arrived, admitted[last], side="right") - (last + 1)
    best = (0.0, 0.0)
    start = None
    for instant, waiting in zip(admitted[last].tolist(), waiting_after.tolist()):
        if start is not None and instant - start > best[1] - best[0]:
            best = (start, instant)
        start = None if not waiting else instant if start is None else start
    if best[0] == best[1]:
        return 0, 0.0
    inside = _tokens_between(answers, first, best[0] + TOGETHER_S, best[1] + TOGETHER_S)
    return inside, best[1] - best[0]


def _tokens_between(answers: Outcomes, first: np.ndarray, begin: float, end: float) -> int:
    """Tokens that were made after `begin`, until `end`; first: when each answer's first one was."""
    seen, decode_s = answers.times, answers.reported("decode_s")
    seen_s = seen.last_token_at - seen.first_token_at
    last = first + np.where(np.isnan(decode_s), seen_s, decode_s)
    whole = (first > begin) & (last <= end)
    tokens = int(answers["completion_tokens"][whole].sum())
    for i in np.flatnonzero((last > begin) & (first <= end) & ~whole):
        answer = answers.kept.get(int(i))
        if answer and answer.timings and "itl_s" in answer.timings:
            made = first[i] + np.cumsum([0.0, *answer.timings["itl_s"]])
            tokens += int(((made > begin) & (made <= end)).sum())
        else:
            n = int(answers["completion_tokens"][i])
            gap = (last[i] - first[i]) / max(n - 1, 1)
            before, until = np.clip(np.floor((np.array([begin, end]) - first[i]) / gap), -1, n - 1)
            tokens += int(until - before)
    return tokens


def slowest_row_s(answers: Outcomes) -> float:
    """Return the longest time from admission to answer, in which an empty server fills."""
    queue_s = answers.reported("queue_s")
    waited_s = np.nan_to_num(np.where(np.isnan(queue_s), answers.ttft_s, queue_s))
    served_s = answers.e2e_s - waited_s
    return float(served_s.max(initial=0.0))


def batch_sizes(answers: Outcomes) -> list[int]:
    """Rows of each request-level batch: requests that the server admitted at the same instant."""
    admitted = answers.times_at_server.admitted_at
    admitted = np.sort(admitted[~np.isnan(admitted)])
    starts = np.flatnonzero(np.diff(admitted, prepend=-np.inf) > TOGETHER_S)
    return [int(n) for n in np.diff(starts, append=len(admitted))]


def expected_useful_fraction(
    lengths: Sequence[int] | np.ndarray, sizes: Sequence[int]
) -> float | None:
    """The share of their rows that request-level batches of these sizes use.

        Σ B · mean(g) / Σ B · E[max of B draws of g]

    lengths: the completion tokens g of the trace, in order of arrival, whose own distribution the
    draws are from. None where they are no draws: sorted lengths have batches of equals.
    """
    falls = np.diff(lengths)
    if not sizes or (np.all(falls <= 0) and np.any(falls)):
        return None
    values, counts = np.unique(lengths, return_counts=True)
    below = np.concatenate([[0.0], np.cumsum(counts) / len(lengths)])
    computed = sum(
        n * b * float(np.dot(values, np.diff(below**b))) for b, n in Counter(sizes).items()
    )
    return sum(sizes) * float(np.mean(lengths)) / computed


def littles_law(result: Result) -> dict[str, float] | None:
    """L, the mean of what this client counted at random instants, and λ · W with the server's W."""
    server, in_flight = result.server, result.mean_in_flight
    whole = not result.failed and not result.partial
    if not whole or not in_flight or not server or not server["completed"]:
        return None
    # over all answers: its other latencies are those of the last ones
    lengths = server["latency-by-requested-tokens"].values()
    total_s = sum(length["requests"] * length["mean_latency_s"] for length in lengths)
    rate_x_latency = result.request_throughput * total_s / server["completed"]
    return {"in_flight": in_flight, "rate_x_latency": rate_x_latency}


def breaks_littles_law(result: Result) -> bool:
    """True where the two sides of `littles_law` differ by more than chance, HTTP and a tenth.

    Chance: a request is counted once for each instant that finds it in flight, at random in each
    TICK_S; so its time is off by half of that at most, as a standard deviation.
    """
    law = result.littles_law
    assert law
    chance_s = 3 * TICK_S / 2 / result.completed**0.5
    slack = (chance_s + OUTSIDE_S) * result.request_throughput
    apart = abs(law["in_flight"] - law["rate_x_latency"])
    return bool(apart > max(APART * law["rate_x_latency"], slack))


def occupancy_over_time(
    iterations: Sequence[Sequence[float]], bins: int = 120, span: tuple[float, float] | None = None
) -> Json:
    """Mean rows of each kind in equal time bins, from rows of [started_at, seconds, live, idle,
    padding, recomputed, rejected].

    Time without an iteration counts as no rows, so the means are over wall-clock. span:
    begin and end of the bins, if not those of these iterations.
    """
    if not iterations:
        return {"started_at": 0.0, "bin_s": 0.0, **{kind: [] for kind in ROW_KINDS}}
    started, seconds, *counts = np.array(iterations, float).T
    first, last = span or (started[0], (started + seconds).max())
    edges = np.linspace(first, last, bins + 1)
    width = edges[1] - edges[0]

    def binned(rows: np.ndarray) -> list[float]:
        # rows × seconds done until each instant, interpolated inside an iteration; differences are
        # the bins
        done = np.concatenate([[0.0], np.cumsum(rows * seconds)])
        k = np.maximum(np.searchsorted(started, edges, side="right") - 1, 0)
        part = np.clip(edges - started[k], 0.0, seconds[k])
        return [round(float(x), 4) for x in np.diff(done[k] + rows[k] * part) / width]

    return {"started_at": float(first), "bin_s": float(width)} | {
        kind: binned(rows) for kind, rows in zip(ROW_KINDS, counts)
    }
