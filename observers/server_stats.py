"""What a server measures of itself, for /stats.

It is an observer that keeps counts for ever, and the last values in rings.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from typing import Any

import numpy as np

from observers.ring import Ring
from observers.tallies import ENDINGS, Tallies, Tally
from scheduling.inference import Inference, IterationRecord
from stats import DEFINITIONS, ROW_KINDS, distribution, throughputs, times_of, tpot_s

DISTRIBUTIONS = ("ttft", "itl", "e2el", "normalized_latency", "queue_time", "held_time", "tpot")
ITERATION = np.dtype(
    [("started_at", float), ("seconds", float), *((kind, np.int32) for kind in ROW_KINDS)]
)
LATEST = 1_000  # answers of each user and priority, of which percentiles are told
# iterations told at once: while they are written as JSON no other thread runs, for 20 to 50 ms
PAGE = 10_000


class ServerStats:
    """What /stats answers: an observer of the manager.

    Counts are exact; distributions cover the last `window` values, and iterations
    are kept for four times as many.

    A run begins with the first request that arrives after `reset`; those in flight at the reset are
    left out. Thread-safe: the handler thread observes, HTTP threads read. Its memory, 17 MB, is
    taken at the start; users and priorities add 16 kB each until as many are known as have measures
    of their own, 1 MB in all.
    """

    def __init__(self, max_batch_size: int, window: int = 100_000):
        self._lock = threading.Lock()
        self._max_batch_size = max_batch_size
        self._samples = {name: Ring(window, np.dtype(float)) for name in DISTRIBUTIONS}
        self._iterations = Ring(4 * window, ITERATION)
        self._latest = min(window, LATEST)
        self.reset(float("-inf"))

    def reset(self, now: float) -> None:
        """Start a new run at `now`, on the clock of the records."""
        with self._lock:
            self._since = now
            self._first_arrival = float("inf")
            self._last_ending = float("-inf")
            self._counts: Counter[str] = Counter()
            self._tallies = Tallies(self._latest)
            self._reasons: Counter[str] = Counter()
            # tokens: [requests, Σ latency]
            self._by_tokens: dict[int, list[float]] = defaultdict(lambda: [0, 0.0])
            self._normalized_sum = 0.0
            for ring in (*self._samples.values(), self._iterations):
                ring.clear()
            self._rows = dict.fromkeys(ROW_KINDS, 0)
            self._busy_s = self._occupied_s = 0.0
            self._preempted_s = self._paused_s = 0.0
            self._largest_batch = 0

    def invalid(self) -> None:
        """Count a request that could not be read or never be served."""
        with self._lock:
            self._counts["invalid"] += 1

    def refused(self, inference: Inference) -> None:
        """Count a request that was turned away, of which this is the first inference."""
        with self._lock:
            self._counts["refused"] += 1
            self._tallies.refused(inference)

    def iteration(self, record: IterationRecord) -> None:
        rows, iteration = record.rows, record.iteration
        recomputed = sum([row.recomputed for row in iteration.rows]) if rows["recomputed"] else 0
        with self._lock:
            if record.started_at < self._since:
                return
            self._iterations.append((record.started_at, record.seconds, *rows.values()))
            for kind, n in rows.items():
                self._rows[kind] += n * record.n
            self._counts["preemptions"] += iteration.preempted
            self._counts["recomputed_tokens"] += recomputed
            self._busy_s += record.seconds
            self._occupied_s += record.seconds * rows["live"] / self._max_batch_size
            self._largest_batch = max(self._largest_batch, iteration.running)
            if iteration.reason:
                self._reasons[iteration.reason] += 1

    def answered(self, inference: Inference) -> None:
        with self._lock:
            if inference.arrived_at < self._since:
                return
            assert inference.answered_at is not None
            self._first_arrival = min(self._first_arrival, inference.arrived_at)
            self._last_ending = max(self._last_ending, inference.answered_at)
            self._counts[inference.state.value] += 1
            self._tallies.ended(inference)
            self._preempted_s += inference.preempted_s
            self._paused_s += inference.paused_s
            if inference.error is None:
                self._finished(inference)

    def _finished(self, inference: Inference) -> None:
        times, n = times_of(inference), len(inference.tokens)
        if inference.leader is None:  # a prompt counts once
            self._counts["prompt_tokens"] += len(inference.prompt_ids)
            self._counts["cached_tokens"] += inference.cached_tokens
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

    def iterations(self, since: int = 0) -> dict[str, Any]:
        """A page of the run's iterations from number `since` on, at most PAGE of them.

        {"iterations": [(started_at, seconds, live, idle, padding, recomputed rows)],
        "iterations_lost": how many from `since` on are no longer kept, "next_iteration": the number
        to go on from, None where this page is the last}
        """
        with self._lock:
            ring = self._iterations
            first, seen = max(since, ring.lost), ring.seen
            page = ring.between(first, first + PAGE)
        following = first + len(page)
        return {
            "iterations": page.tolist(),
            "iterations_lost": first - since,
            "next_iteration": following if following < seen else None,
        }

    def snapshot(self) -> dict[str, Any]:
        """The run so far; changes nothing."""
        with self._lock:
            counts, n = self._counts, self._counts["finished"]
            # -inf as long as nothing has ended
            wall = max(0.0, self._last_ending - self._first_arrival)
            rates = throughputs(n, counts["prompt_tokens"], counts["completion_tokens"], wall)
            rows, busy = self._rows, self._busy_s
            result: dict[str, Any] = {
                "latency-per-token": self._normalized_sum / n if n else 0.0,
                "throughput": rates["output_throughput"],
                "total-tokens-handled": counts["completion_tokens"],
                "total-elapsed-time": wall,
                "completed": n,
                **{
                    what: counts[what]
                    for what in ("failed", "cancelled", "expired", "refused", "invalid")
                },
                "total_input_tokens": counts["prompt_tokens"],
                "total_output_tokens": counts["completion_tokens"],
                **rates,
                "largest_batch": self._largest_batch,
                "occupancy": self._occupied_s / busy if busy else 0.0,
                "useful_fraction": rows["live"] / sum(rows.values()) if rows["live"] else 0.0,
                **{f"{kind}_rows": n for kind, n in rows.items()},
                "preemptions": counts["preemptions"],
                "preempted_s": self._preempted_s,
                "paused_s": self._paused_s,
                "recomputed_tokens": counts["recomputed_tokens"],
                "cached_tokens": counts["cached_tokens"],
                "busy_s": busy,
                "batches_formed": dict(self._reasons),
                "latency-by-requested-tokens": {
                    str(tokens): {"requests": count, "mean_latency_s": total / count}
                    for tokens, (count, total) in sorted(self._by_tokens.items())
                },
            }
            samples = {name: ring.between(0, ring.seen) for name, ring in self._samples.items()}
            by_name = {
                kind: (names.tallies(), names.times())
                for kind, names in (
                    ("users", self._tallies.users),
                    ("priorities", self._tallies.priorities),
                )
            }
        for name, values in samples.items():  # numpy on up to 100,000 values: not under the lock
            result |= distribution(name, values) if len(values) else {}
        for kind, (tallies, times) in by_name.items():
            result[kind] = {name: _measures(tally, times[name]) for name, tally in tallies.items()}
        return result | {"definitions": DEFINITIONS}


def _measures(tally: Tally, times: np.ndarray) -> dict[str, Any]:
    """What /stats tells of a user or a priority; `times`: TIMES of the latest answers."""
    n = tally.endings["finished"]
    result: dict[str, Any] = {
        "completed": n,
        **{ending: tally.endings[ending] for ending in ENDINGS if ending != "finished"},
        "prompt_tokens": tally.prompt_tokens,
        "completion_tokens": tally.completion_tokens,
    }
    for name, total in (("e2el", tally.e2e_s), ("queue_time", tally.queue_s)):
        result[f"mean_{name}_ms"] = round(total / n * 1e3, 3) if n else None
        latest = np.percentile(times[name], (50, 99)) * 1e3 if n else (None, None)
        for p, value in zip((50, 99), latest):
            result[f"p{p}_{name}_ms"] = None if value is None else round(float(value), 3)
    return result
