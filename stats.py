"""What each number means: time stamps in, metrics out. Shared by server, client and reports; pure but for `ServerStats`.

Every result carries `DEFINITIONS`. Percentiles are linear (numpy). Seconds inside, milliseconds in keys that
end in `_ms`; keys follow vLLM's benchmark JSON where it has one.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from inference import Inference, IterationRecord

DEFINITIONS = {
    "queue_time_ms": "admitted - arrived, at the server",
    "ttft_ms": "first token - start; of a plain answer, at the client: e2el - (answered - first token, at the server)",
    "ttft_from_schedule_ms": "the same from the instant the request was scheduled to be sent",
    "tpot_ms": "(last token - first token) / (n - 1), for n >= 2 completion tokens",
    "itl_ms": "each gap between consecutive tokens, pooled over requests; of a stream, between its events",
    "held_time_ms": "answered - last token: waiting for batch mates",
    "e2el_ms": "answer - start; start at the client: just before the request is sent; at the server: its arrival",
    "e2el_from_schedule_ms": "answer - the instant the request was scheduled to be sent",
    "normalized_latency_ms": "e2el / completion tokens (Orca)",
    "request_throughput": "answered requests / wall-clock of the run",
    "output_throughput": "completion tokens / wall-clock of the run, tok/s",
    "total_token_throughput": "(prompt + completion tokens) / wall-clock of the run, tok/s",
    "wall_clock_s": "first send (at the server: first arrival) to the last ending, an answer's or a failure's",
    "goodput": "requests per second that meet every stated limit; failed and refused ones miss",
    "attainment": "share of all requests that meet every stated limit; goodput and it are measured from the schedule",
    "schedule_lag_ms": "sent - scheduled; its p99 over 10 ms marks a run client_limited",
    "requested_rate": "requests a second as scheduled: (n - 1) / (last - first)",
    "achieved_rate": "requests a second as sent: (n - 1) / (last - first)",
    "offered_throughput": "completion tokens a second that a trace asks for: requested_rate * its mean_num_tokens",
    "nominal_num_tokens": "mean completion tokens of the distribution that a trace is drawn from",
    "index_of_dispersion": "variance / mean of arrivals counted in windows of ten mean gaps; 1 for Poisson",
    "mean_in_flight": "requests sent and not ended, counted at a random instant of each 50 ms from the first send to the last "
    "ending, averaged",
    "littles_law": "in_flight: mean_in_flight; rate_x_latency: request_throughput * mean e2el at the server; must be equal",
    "growth": "seconds that each second of sending adds to TTFT: least squares over ten blocks, less the slope's error",
    "growth_in_flight": "part of what is sent that stays in flight: least squares over ten blocks once the rows could fill, "
    "less twice the slope's error",
    "busy_s": "the longest stretch from admission to admission in which requests were always waiting",
    "busy_throughput": "completion tokens made in that stretch / its seconds, tok/s",
    "capacity": "requests a second that a server completes while requests are always waiting: busy_throughput / "
    "nominal_num_tokens, over the busy_s of all rates of a sweep beyond it",
    "goodput_rate": "the highest sustained rate of a sweep at which 90% of requests meet every limit (DistServe's goodput); "
    "rates are 9% apart, and traces are scaled to them",
    "expected_useful_fraction": "of live and idle rows: sum of B * mean(g) / sum of B * E[max of B draws of g], B: batch sizes",
    "fairness": "least squares of e2el on completion tokens: intercept (queueing), slope (service), r",
    "largest_batch": "most inferences admitted at once",
    "occupancy": "live rows / max_batch_size, weighted by iteration time",
    "useful_fraction": "live rows / computed rows (live, idle and padding)",
    "kv_blocks": "KV blocks in the pool",
    "padding_rows": "rows of nobody, computed to fill a decoder batch size in iterations of decode rows",
    "latency-per-token": "mean of e2el / completion tokens, seconds",
    "throughput": "completion tokens / total-elapsed-time, tok/s",
    "total-tokens-handled": "completion tokens of answered requests",
    "total-elapsed-time": "first arrival to the last ending, an answer's or a failure's, seconds",
}
ROWS = ("live", "idle", "padding")  # what a computed row is
CLIENT_LIMITED_MS = 10.0  # a p99 schedule lag beyond this marks a run as limited by its client


@dataclass(frozen=True, slots=True)
class Times:
    """The time stamps of one answered request, in seconds on one clock, and what follows from them."""

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
    def itl_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:])]


def times_of(inference: Inference) -> Times:
    """The time stamps of a FINISHED inference."""
    assert inference.admitted_at is not None and inference.answered_at is not None
    return Times(inference.arrived_at, inference.admitted_at, inference.token_times, inference.answered_at)


def describe(name: str, seconds: Iterable[float]) -> dict[str, float]:
    """{"mean_NAME_ms": …, std, min, p50, p90, p95, p99, max} of values in seconds; empty without values."""
    values = np.fromiter(seconds, float) * 1e3
    if not values.size:
        return {}
    measures = {"mean": values.mean(), "std": values.std(), "min": values.min(), "max": values.max()}
    measures |= {f"p{p}": np.percentile(values, p) for p in (50, 90, 95, 99)}
    return {f"{measure}_{name}_ms": round(float(value), 3) for measure, value in measures.items()}


def tpot_s(decode_s: float, completion_tokens: int) -> float | None:
    return decode_s / (completion_tokens - 1) if completion_tokens >= 2 else None


def throughputs(requests: int, prompt_tokens: int, completion_tokens: int, wall_clock_s: float) -> dict[str, float]:
    """The three throughputs of a run; zero for an empty one."""
    wall = wall_clock_s or float("inf")
    return {
        "request_throughput": requests / wall,
        "output_throughput": completion_tokens / wall,
        "total_token_throughput": (prompt_tokens + completion_tokens) / wall,
    }


def fairness(tokens: Sequence[int], seconds: Sequence[float]) -> dict[str, float] | None:
    """Least squares of latency on completion tokens; None where no line is defined."""
    if len(set(tokens)) < 2:
        return None
    x, y = np.array(tokens, float), np.array(seconds, float)
    slope, intercept = np.polyfit(x, y, 1)
    r = float(np.corrcoef(x, y)[0, 1]) if y.std() > 0 else 0.0
    return {"intercept_s": float(intercept), "slope_s_per_token": float(slope), "r": r}


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as the client saw it, in seconds since the run's start; `timings` are the server's own, if it gave them.

    `itl_s` are the gaps between the arrivals of a stream's events, or between tokens at the server for a plain answer.
    """

    id: int
    scheduled_at: float
    sent_at: float
    first_token_at: float
    last_token_at: float
    answered_at: float
    prompt_tokens: int
    completion_tokens: int
    itl_s: Sequence[float]
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


def summarise(
    answers: Sequence[Answer], sends: Sequence[tuple[float, float, float]], goodput: Mapping[str, float]
) -> dict[str, Any]:
    """METRICS of one run from the client's side.

    sends: (scheduled, sent, ended) of every request, the failed ones too. goodput: limits in ms.
    """
    sent_at = [sent for _, sent, _ in sends]
    start = min(sent_at, default=0.0)
    wall = max((ended for *_, ended in sends), default=start) - start
    prompt, completion = sum(a.prompt_tokens for a in answers), sum(a.completion_tokens for a in answers)
    result: dict[str, Any] = {"completed": len(answers), "failed": len(sent_at) - len(answers), "wall_clock_s": wall}
    result |= {"total_input_tokens": prompt, "total_output_tokens": completion}
    result |= throughputs(len(answers), prompt, completion, wall)
    good = sum(_meets(a, goodput) for a in answers)
    result["goodput"] = (good / wall if wall else 0.0) if goodput and sends else None
    result["attainment"] = good / len(sends) if goodput and sends else None
    result |= describe("ttft", (a.ttft_s for a in answers))
    result |= describe("ttft_from_schedule", (a.ttft_s + a.lag_s for a in answers))
    result |= describe("tpot", (t for a in answers if (t := a.tpot_s) is not None))
    result |= describe("itl", (gap for a in answers for gap in a.itl_s))
    result |= describe("e2el", (a.e2e_s for a in answers))
    result |= describe("e2el_from_schedule", (a.e2e_s + a.lag_s for a in answers))
    result |= describe("normalized_latency", (a.e2e_s / a.completion_tokens for a in answers))
    result |= describe("queue_time", (a.timings["queue_s"] for a in answers if a.timings))
    result |= describe("held_time", (a.timings["held_s"] for a in answers if a.timings))
    result |= describe("schedule_lag", (sent - scheduled for scheduled, sent, _ in sends))
    result["client_limited"] = result.get("p99_schedule_lag_ms", 0.0) > CLIENT_LIMITED_MS
    span = max(sent_at, default=0.0) - start
    result["achieved_rate"] = (len(sent_at) - 1) / span if span else None
    result["fairness"] = fairness([a.completion_tokens for a in answers], [a.e2e_s for a in answers])
    return result


def _meets(answer: Answer, limits_ms: Mapping[str, float]) -> bool:
    """From the schedule: a late client must not make a server look better."""
    measured = {"ttft": answer.ttft_s + answer.lag_s, "tpot": answer.tpot_s or 0.0, "e2el": answer.e2e_s + answer.lag_s}
    return all(measured[name] * 1e3 <= limit for name, limit in limits_ms.items())


def occupancy_over_time(iterations: Sequence[Sequence[float]], bins: int = 120) -> dict[str, Any]:
    """Mean live, idle and padding rows in equal time bins, from rows of [started_at, seconds, live, idle, padding].

    Time without an iteration counts as no rows, so the means are over wall-clock.
    """
    if not iterations:
        return {"started_at": 0.0, "bin_s": 0.0, **{kind: [] for kind in ROWS}}
    started, seconds, *counts = np.array(iterations, float).T
    first, last = started[0], (started + seconds).max()
    edges = np.linspace(first, last, bins + 1)
    width = edges[1] - edges[0]

    def binned(rows: np.ndarray) -> list[float]:
        # rows × seconds done until each instant, interpolated inside an iteration; differences are the bins
        done = np.concatenate([[0.0], np.cumsum(rows * seconds)])
        k = np.searchsorted(started, edges, side="right") - 1
        part = np.clip(edges - started[k], 0.0, seconds[k])
        return [round(float(x), 4) for x in np.diff(done[k] + rows[k] * part) / width]

    return {"started_at": float(first), "bin_s": float(width)} | {kind: binned(rows) for kind, rows in zip(ROWS, counts)}


class ServerStats:
    """What /stats answers: an observer of the manager. Counts are exact; distributions cover the last `window` values.

    A run begins with the first request that arrives after `reset`; those in flight at the reset are left out.
    Thread-safe: the handler thread observes, HTTP threads read.
    """

    def __init__(self, max_batch_size: int, window: int = 100_000):
        self._lock = threading.Lock()
        self._max_batch_size = max_batch_size
        self._window = window
        self.reset(float("-inf"))

    def reset(self, now: float) -> None:
        """Start a new run at `now`, on the clock of the records."""
        with self._lock:
            self._since = now
            self._first_arrival = float("inf")
            self._last_ending = float("-inf")
            self._counts: Counter[str] = Counter()
            self._reasons: Counter[str] = Counter()
            self._by_tokens: dict[int, list[float]] = defaultdict(lambda: [0, 0.0])  # tokens: [requests, Σ latency]
            self._normalized_sum = 0.0
            self._samples: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=self._window))
            self._iterations: deque[tuple[float, float, int, int, int]] = deque(maxlen=4 * self._window)
            self._rows = dict.fromkeys(ROWS, 0)
            self._busy_s = self._occupied_s = 0.0
            self._largest_batch = 0

    def count(self, what: str) -> None:
        """Count a request that never became an inference: "refused" or "invalid"."""
        with self._lock:
            self._counts[what] += 1

    def iteration(self, record: IterationRecord) -> None:
        live = record.live_rows
        rows = (live, record.idle_rows, record.padding_rows)
        with self._lock:
            if record.started_at < self._since:
                return
            self._iterations.append((record.started_at, record.seconds, *rows))
            for kind, n in zip(ROWS, rows):
                self._rows[kind] += n
            self._busy_s += record.seconds
            self._occupied_s += record.seconds * live / self._max_batch_size
            self._largest_batch = max(self._largest_batch, record.iteration.running)
            if record.iteration.reason:
                self._reasons[record.iteration.reason] += 1

    def answered(self, inference: Inference) -> None:
        with self._lock:
            if inference.arrived_at < self._since:
                return
            assert inference.answered_at is not None
            self._first_arrival = min(self._first_arrival, inference.arrived_at)
            self._last_ending = max(self._last_ending, inference.answered_at)
            self._counts[inference.state.value] += 1
            if inference.error is None:
                self._finished(inference)

    def _finished(self, inference: Inference) -> None:
        times, n = times_of(inference), len(inference.tokens)
        self._counts["prompt_tokens"] += len(inference.prompt_ids)
        self._counts["completion_tokens"] += n
        self._normalized_sum += times.e2e_s / n
        entry = self._by_tokens[inference.num_tokens]
        entry[0] += 1
        entry[1] += times.e2e_s
        samples = self._samples
        samples["ttft"].append(times.ttft_s)
        samples["itl"].extend(times.itl_s)
        samples["e2el"].append(times.e2e_s)
        samples["normalized_latency"].append(times.e2e_s / n)
        samples["queue_time"].append(times.queue_s)
        samples["held_time"].append(times.held_s)
        if (tpot := tpot_s(times.decode_s, n)) is not None:
            samples["tpot"].append(tpot)

    def iterations(self) -> list[tuple[float, float, int, int, int]]:
        """[started_at, seconds, live, idle, padding rows] of the run's iterations, the last 400,000 of them."""
        with self._lock:
            return list(self._iterations)

    def snapshot(self) -> dict[str, Any]:
        """The run so far; changes nothing."""
        with self._lock:
            counts, n = self._counts, self._counts["finished"]
            wall = max(0.0, self._last_ending - self._first_arrival)  # -inf as long as nothing has ended
            rates = throughputs(n, counts["prompt_tokens"], counts["completion_tokens"], wall)
            rows, busy = self._rows, self._busy_s
            result: dict[str, Any] = {
                "latency-per-token": self._normalized_sum / n if n else 0.0,
                "throughput": rates["output_throughput"],
                "total-tokens-handled": counts["completion_tokens"],
                "total-elapsed-time": wall,
                "completed": n,
                **{what: counts[what] for what in ("failed", "cancelled", "expired", "refused", "invalid")},
                "total_input_tokens": counts["prompt_tokens"],
                "total_output_tokens": counts["completion_tokens"],
                **rates,
                "largest_batch": self._largest_batch,
                "occupancy": self._occupied_s / busy if busy else 0.0,
                "useful_fraction": rows["live"] / sum(rows.values()) if rows["live"] else 0.0,
                **{f"{kind}_rows": n for kind, n in rows.items()},
                "busy_s": busy,
                "batches_formed": dict(self._reasons),
                "latency-by-requested-tokens": {
                    str(tokens): {"requests": count, "mean_latency_s": total / count}
                    for tokens, (count, total) in sorted(self._by_tokens.items())
                },
            }
            samples = {name: list(values) for name, values in self._samples.items()}
        for name, values in samples.items():  # numpy on up to 100,000 values: not under the lock
            result |= describe(name, values)
        return result | {"definitions": DEFINITIONS}
