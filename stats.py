"""What each number means: time stamps in, metrics out. Shared by server, client and reports; pure.

Every result carries `DEFINITIONS`. Percentiles are linear (numpy). Seconds inside, milliseconds in
keys that end in `_ms`; keys follow vLLM's benchmark JSON where it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from scheduling.inference import Inference

DEFINITIONS = {
    "queue_time_ms": "admitted - arrived, at the server",
    "ttft_ms": "first token - start; of a plain answer, at the client: e2el - (answered - first "
    "token, at the server)",
    "ttft_from_schedule_ms": "the same from the instant the request was scheduled to be sent",
    "tpot_ms": "(last token - first token) / (n - 1), for n >= 2 completion tokens",
    "itl_ms": "each gap between consecutive tokens, pooled over requests, of a sample where there "
    "is one; of a stream, between its events",
    "sample": "requests in NAME.json, where more than 100,000 are simulated: those of 20,000 drawn "
    "that ended; none where all are there",
    "held_time_ms": "answered - last token: waiting for batch mates",
    "e2el_ms": "answer - start; start at the client: just before the request is sent; at the "
    "server: its arrival",
    "e2el_from_schedule_ms": "answer - the instant the request was scheduled to be sent",
    "normalized_latency_ms": "e2el / completion tokens (Orca)",
    "request_throughput": "answered requests / wall-clock of the run",
    "output_throughput": "completion tokens / wall-clock of the run, tok/s",
    "total_token_throughput": "(prompt + completion tokens) / wall-clock of the run, tok/s",
    "wall_clock_s": "first send (at the server: first arrival) to the last ending, an answer's or "
    "a failure's",
    "goodput": "requests per second that meet every stated limit; failed and refused ones miss",
    "attainment": "share of all requests that meet every stated limit; goodput and it are measured "
    "from the schedule",
    "schedule_lag_ms": "sent - scheduled; its p99 over 10 ms marks a run client_limited; a later "
    "turn of a conversation is scheduled think_s after the answer before it",
    "requested_rate": "requests a second as scheduled: (n - 1) / (last - first); none where "
    "answers say what is sent when",
    "achieved_rate": "requests a second as sent: (n - 1) / (last - first)",
    "offered_throughput": "completion tokens a second that a trace asks for: requested_rate * its "
    "mean_num_tokens",
    "nominal_num_tokens": "mean completion tokens of the distribution that a trace is drawn from",
    "index_of_dispersion": "variance / mean of arrivals counted in windows of ten mean gaps; 1 for "
    "Poisson",
    "mean_in_flight": "requests sent and not ended, counted at a random instant of each 50 ms from "
    "the first send to the last "
    "ending, averaged",
    "littles_law": "in_flight: mean_in_flight; rate_x_latency: request_throughput * mean e2el at "
    "the server; must be equal",
    "growth": "seconds that each second of sending adds to TTFT: least squares over ten blocks, "
    "less the slope's error; of conversations until the last begins",
    "growth_in_flight": "part of what is sent that stays in flight: least squares over ten blocks "
    "once the rows could fill, "
    "less twice the slope's error; of conversations until the last begins",
    "busy_s": "the longest stretch from admission to admission in which requests were always "
    "waiting",
    "busy_throughput": "completion tokens made in that stretch / its seconds, tok/s",
    "capacity": "requests a second that a server completes while requests are always waiting: "
    "busy_throughput / "
    "nominal_num_tokens, over the busy_s of all rates of a sweep beyond it",
    "goodput_rate": "the highest sustained rate of a sweep at which 90% of requests meet every "
    "limit (DistServe's goodput); "
    "rates are 9% apart, and traces are scaled to them",
    "expected_useful_fraction": "of live and idle rows: sum of B * mean(g) / sum of B * E[max of B "
    "draws of g], B: batch sizes",
    "latency_line": "least squares of e2el on completion tokens: intercept (queueing), slope "
    "(service), r",
    "by_length": "requests by the completion tokens that they ask for: quartile 1 is the shortest "
    "quarter of the trace, 4 the longest; equal lengths are in one, that of their middle; of up to "
    "four lengths each is one",
    "by_user": "requests by user; output_throughput: completion tokens of the user's answers / "
    "wall-clock of the run, so that users add up to the run's",
    "by_priority": "requests by level of priority, 1 the highest; 0: they name none",
    "refused": "of the failed, those that were answered 429: the queue was full, or their user "
    "beyond a limit",
    "mean_paused_ms": "mean of paused_s over answers; likewise mean_preempted_ms of preempted_s",
    "largest_batch": "most inferences admitted at once",
    "occupancy": "live rows / max_batch_size, weighted by iteration time",
    "useful_fraction": "live rows / computed rows (live, idle, padding and recomputed)",
    "recomputed_rows": "rows that computed tokens once more, after a preemption",
    "recomputed_tokens": "tokens computed once more, after a preemption",
    "cached_tokens": "prompt tokens found in the prefix cache, and not computed again",
    "cached_fraction": "cached_tokens / prompt tokens, of answered requests",
    "preemptions": "times that a request gave its KV blocks up and waited again",
    "preempted_s": "seconds that it waited again; they lie inside ttft, decode time and gaps; of a "
    "run, those of all requests that ended",
    "paused_s": "seconds that it ran without being computed, its KV blocks kept; they lie inside "
    "ttft, decode time and gaps; of a run, those of all requests that ended",
    "users": "measures of each `user`, under an empty name those of requests without one; of the "
    "first 32 names in a run, and of all later ones together as (others); completed, tokens and "
    "means are exact, p50 and p99 of the last 1,000 answers",
    "priorities": "the same of each priority; 0 where levels have no meaning and none was said",
    "kv_blocks": "KV blocks in the pool",
    "padding_rows": "rows of nobody, computed to fill a decoder batch size in iterations of decode "
    "rows",
    "latency-per-token": "mean of e2el / completion tokens, seconds",
    "throughput": "completion tokens / total-elapsed-time, tok/s",
    "total-tokens-handled": "completion tokens of answered requests",
    "total-elapsed-time": "first arrival to the last ending, an answer's or a failure's, seconds",
}
_MOMENTS: dict[str, Callable[[np.ndarray], Any]] = {
    "mean": np.mean, "std": np.std, "min": np.min, "max": np.max,
}  # fmt: skip
_PERCENTILES = (50, 90, 95, 99)
ROW_KINDS = ("live", "idle", "padding", "recomputed")  # what a computed row is
CLIENT_LIMITED_MS = 10.0  # a p99 schedule lag beyond this marks a run as limited by its client


class Times(NamedTuple):
    """The time stamps of one answered request, in seconds on one clock, and what
    follows from them.
    """

    arrived_at: float
    admitted_at: float
    token_times: Sequence[float]
    answered_at: float

    @property
    def queue_s(self) -> float:
        return self.admitted_at - self.arrived_at

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.arrived_at

    @property
    def decode_s(self) -> float:
        return self.token_times[-1] - self.token_times[0]

    @property
    def held_s(self) -> float:
        return self.answered_at - self.token_times[-1]

    @property
    def e2e_s(self) -> float:
        return self.answered_at - self.arrived_at

    @property
    def itl_s(self) -> np.ndarray:
        made = np.array(self.token_times)
        return made[1:] - made[:-1]


def times_of(inference: Inference) -> Times:
    """The time stamps of a FINISHED inference."""
    assert inference.admitted_at is not None and inference.answered_at is not None
    return Times(
        inference.arrived_at, inference.admitted_at, inference.token_times, inference.answered_at
    )


def distribution(name: str, seconds: Iterable[float]) -> dict[str, float | None]:
    """{"mean_NAME_ms": …, std, min, max, p50, p90, p95, p99} of values in seconds; of none, each
    None.
    """
    values = seconds if isinstance(seconds, np.ndarray) else np.fromiter(seconds, float)
    values = values * 1e3
    measures = [*_MOMENTS, *(f"p{p}" for p in _PERCENTILES)]
    if not values.size:
        return {f"{measure}_{name}_ms": None for measure in measures}
    found = [*(of(values) for of in _MOMENTS.values()), *np.percentile(values, _PERCENTILES)]
    return {
        f"{measure}_{name}_ms": round(float(value), 3) for measure, value in zip(measures, found)
    }


def tpot_s(decode_s: float, completion_tokens: int) -> float | None:
    return decode_s / (completion_tokens - 1) if completion_tokens >= 2 else None


def throughputs(
    requests: int, prompt_tokens: int, completion_tokens: int, wall_clock_s: float
) -> dict[str, float]:
    """The three throughputs of a run; zero for an empty one."""
    wall = wall_clock_s or float("inf")
    return {
        "request_throughput": requests / wall,
        "output_throughput": completion_tokens / wall,
        "total_token_throughput": (prompt_tokens + completion_tokens) / wall,
    }


def latency_line(
    tokens: Sequence[int] | np.ndarray, seconds: Sequence[float] | np.ndarray
) -> dict[str, float] | None:
    """Least squares of latency on completion tokens; None where no line is defined."""
    x, y = np.array(tokens, float), np.array(seconds, float)
    if not x.size or x.min() == x.max():
        return None
    slope, intercept = np.polyfit(x, y, 1)
    r = float(np.corrcoef(x, y)[0, 1]) if y.std() > 0 else 0.0
    return {"intercept_s": float(intercept), "slope_s_per_token": float(slope), "r": r}


class Answer(NamedTuple):
    """One request as the client saw it, in seconds since the run's start; `timings` are the
    server's own, if it gave them.

    `itl_s` are the gaps between the arrivals of a stream's events, or between tokens at the server
    for a plain answer.
    """

    id: int
    scheduled_at: float
    sent_at: float
    first_token_at: float
    last_token_at: float
    answered_at: float
    prompt_tokens: int
    completion_tokens: int
    itl_s: Sequence[float] | np.ndarray
    timings: Mapping[str, Any] | None

    @property
    def e2e_s(self) -> float:
        return self.answered_at - self.sent_at

    @property
    def ttft_s(self) -> float:
        return self.first_token_at - self.sent_at

    @property
    def tpot_s(self) -> float | None:
        return tpot_s(self.last_token_at - self.first_token_at, self.completion_tokens)

    @property
    def lag_s(self) -> float:
        return self.sent_at - self.scheduled_at


def occupancy_over_time(
    iterations: Sequence[Sequence[float]],
    bins: int = 120,
    span: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """Mean rows of each kind in equal time bins, from rows of [started_at, seconds, live, idle,
    padding, recomputed].

    Time without an iteration counts as no rows, so the means are over wall-clock. span: of the
    bins, if it is not that of these iterations.
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
