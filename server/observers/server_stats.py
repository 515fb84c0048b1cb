"""Statistics of a server, for /stats and /metrics: counts, and the last values in rings."""

from __future__ import annotations

import copy
import math
import threading
from typing import Any

import numpy as np

from scheduling.inference import Inference
from scheduling.latency import times_of
from scheduling.records import IterationRecord
from server.observers.run import Run
from server.observers.tallies import KEPT, Ring, Tallies
from stats import IN_RESULTS, ROW_KINDS

ITERATION = np.dtype(
    [("started_at", float), ("seconds", float), *((kind, np.int32) for kind in ROW_KINDS)]
)
WINDOW = 100_000  # values that a distribution is of
LATEST = 1_000  # answers of each user and priority, for percentiles
# iterations of a page: while they are written as JSON no other thread runs, for 20 to 50 ms
PAGE = 10_000


class ServerStats:
    """An observer of the manager. Counts are exact; distributions cover the last `window` values,
    and iterations are kept for four times as many.

    A run begins with the first request that arrives after `reset`; those in flight at the reset are
    counted in `total` alone, which goes on. Thread-safe: the handler thread observes, HTTP threads
    read. Its memory, 20 MB, is taken at the start; users, priorities and adapters add 16 kB each
    until as many are known as have measures of their own, 1.5 MB in all.
    """

    def __init__(self, max_batch_size: int, window: int = WINDOW):
        self._lock = threading.Lock()
        self._max_batch_size = max_batch_size
        self._samples = {each.name: Ring(window, np.dtype(float)) for each in IN_RESULTS}
        kept = [(each, self._samples[each.name]) for each in IN_RESULTS]
        self._single = [(each.of, ring.append) for each, ring in kept if not each.pooled]
        self._pooled = [(each.of, ring.extend) for each, ring in kept if each.pooled]
        self._iterations = Ring(4 * window, ITERATION)
        self._latest = min(window, LATEST)
        self._since, self._run = float("-inf"), Run(tallies=Tallies(self._latest))
        self._earlier = Run()  # what was counted before the run, or is left out of it; no names
        # since the start: a name has its own tally, or is one of the others, for good
        self._tallies = Tallies()

    def reset(self, now: float) -> None:
        """Start a new run at `now`, on the clock of the records."""
        with self._lock:
            self._earlier.add_counts(self._run)
            self._since, self._run = now, Run(tallies=Tallies(self._latest))
            for ring in (*self._samples.values(), self._iterations):
                ring.clear()

    def invalid(self) -> None:
        """Count a request that could not be read or never be served."""
        with self._lock:
            self._run.counts["invalid"] += 1

    def refused(self, inference: Inference | None = None) -> None:
        """Count a refused request, of which this is the first inference, if it has one."""
        with self._lock:
            self._run.counts["refused"] += 1
            if inference is not None:
                for tallies in (self._run.tallies, self._tallies):
                    tallies.refused(inference)

    def iteration(self, record: IterationRecord) -> None:
        with self._lock:
            run = self._run_of(record.started_at)
            run.iteration(record, self._max_batch_size)
            if run is self._run:
                row = (record.started_at, record.seconds, *record.rows.values())
                self._iterations.append(row)

    def answered(self, inference: Inference) -> None:
        times = times_of(inference) if inference.error is None else None
        values = () if times is None else tuple([each.of(times) for each in KEPT.values()])
        with self._lock:
            run = self._run_of(inference.arrived_at)
            run.ended(inference, times)
            self._tallies.ended(inference, values)
            if run is not self._run:
                return
            run.tallies.ended(inference, values)
            if times is None:
                return
            for value_of, append in self._single:
                if not math.isnan(value := value_of(times)):
                    append(value)
            for values_of, extend in self._pooled:
                extend(values_of(times))

    def _run_of(self, begun: float) -> Run:
        return self._run if begun >= self._since else self._earlier

    def iterations(self, since: int = 0) -> dict[str, Any]:
        """A page of the run's iterations from number `since` on, at most PAGE of them.

        {"iterations": [(started_at, seconds, live, idle, padding, recomputed, rejected rows)],
        "iterations_lost": how many from `since` on are no longer kept, "next_iteration": number of
        the first one after this page, None where it is the last}
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

    def run(self) -> Run:
        """The run so far, on the clock of the records; changes nothing."""
        with self._lock:
            run = copy.deepcopy(self._run)
            run.samples = {name: ring.kept() for name, ring in self._samples.items()}
        return run

    def total(self) -> Run:
        """The counts since the server's start, without distributions; changes nothing."""
        total = Run()
        with self._lock:
            for run in (self._earlier, self._run):
                total.add_counts(run)
            total.tallies.add(self._tallies)
        return total
