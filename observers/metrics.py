"""What a server does, for Prometheus.

Names are vLLM's where it has one, so that its dashboards work.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from observers.tallies import ENDINGS, Tallies, Tally
from scheduling.inference import Inference, IterationRecord, State
from stats import ROW_KINDS, times_of, tpot_s

if TYPE_CHECKING:
    from batching import BatchingManager
    from config import Config

# finer below 10 ms than vLLM's: a whole iteration of a small model lies there
SECONDS = (
    0.0005,
    0.001,
    0.0015,
    0.002,
    0.003,
    0.004,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.06,
    0.08,
    0.1,
    0.15,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
)
TOKENS = tuple(2**i for i in range(13))
# FINISHED has its own finish_reason
REASONS = {State.CANCELLED: "abort", State.EXPIRED: "timeout", State.FAILED: "error"}
Family = CounterMetricFamily | GaugeMetricFamily


class Metrics:
    """An observer of the manager, and a collector in a registry of its own.

    So two apps in one process share nothing.

    The handler thread tells it of every iteration and token, so what it counts it counts in plain
    numbers, and they become metrics when Prometheus asks; only what is observed once a request goes
    through the library's histograms.
    """

    def __init__(self, config: Config, manager: BatchingManager, replica: str | None = None):
        """replica: its name among others, which becomes a label."""
        self.registry = CollectorRegistry()
        self._manager = manager
        self._max_batch_size = config.max_batch_size
        # else what is looked for is completions of one prompt
        self._caches = config.prefix_caching
        self._labels = {"model_name": config.model_name, "mode": config.mode}
        if replica is not None:
            self._labels["replica"] = replica

        def histogram(name: str, meaning: str, buckets: Sequence[float] = SECONDS) -> Histogram:
            return Histogram(
                name, meaning, self._labels, buckets=buckets, registry=self.registry
            ).labels(**self._labels)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "first token - arrival")
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "(last token - first token) / (n - 1)"
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "answered - arrival")
        self._queue = histogram("vllm:request_queue_time_seconds", "admitted - arrival")
        self._prefill = histogram("vllm:request_prefill_time_seconds", "first token - admitted")
        self._decode = histogram("vllm:request_decode_time_seconds", "last token - first token")
        self._held = histogram(
            "request_held_time_seconds", "answered - last token: waiting for batch mates"
        )
        self._tokens = histogram(
            "vllm:iteration_tokens_total", "tokens of an iteration's live rows", TOKENS
        )

        self._lock = threading.Lock()  # of all that follows
        self._ended = Counter(dict.fromkeys(("stop", "length", *REASONS.values()), 0))
        self._tallies = Tallies()
        self._flushes: Counter[str] = Counter()
        self._rows = self._computed = dict.fromkeys(ROW_KINDS, 0)
        self._preemptions = self._recomputed = 0
        self._gaps = np.zeros(len(SECONDS) + 1, np.int64)  # between tokens, by bucket
        self._gaps_s = 0.0
        self.registry.register(self)

    def iteration(self, record: IterationRecord) -> None:
        rows = record.iteration.rows
        self._tokens.observe(sum(row.n_tokens for row in rows if not row.idle))
        with self._lock:
            self._rows = record.rows
            self._preemptions += record.iteration.preempted
            self._recomputed += sum(row.recomputed for row in rows)
            self._computed = {kind: self._computed[kind] + n for kind, n in self._rows.items()}
            if record.iteration.reason:
                self._flushes[record.iteration.reason] += 1

    def answered(self, inference: Inference) -> None:
        finished = inference.state is State.FINISHED
        with self._lock:
            self._ended[inference.finish_reason if finished else REASONS[inference.state]] += 1
            self._tallies.ended(inference)
        if not finished:
            return
        times, n = times_of(inference), len(inference.tokens)
        self._ttft.observe(times.ttft_s)
        self._e2e.observe(times.e2e_s)
        self._queue.observe(times.queue_s)
        self._prefill.observe(times.ttft_s - times.queue_s)
        self._decode.observe(times.decode_s)
        self._held.observe(times.held_s)
        if (tpot := tpot_s(times.decode_s, n)) is not None:
            self._tpot.observe(tpot)
            gaps = np.bincount(np.searchsorted(SECONDS, times.itl_s), minlength=len(SECONDS) + 1)
            with self._lock:
                self._gaps += gaps
                self._gaps_s += times.decode_s

    def refused(self, inference: Inference) -> None:
        """Count a request that was turned away, of which this is the first inference."""
        with self._lock:
            self._tallies.refused(inference)

    def collect(self) -> Iterator[Metric]:
        """What was counted in plain numbers, for the registry."""
        names, values = tuple(self._labels), tuple(self._labels.values())
        now = self._manager.snapshot()
        with self._lock:
            ended, flushes, rows, computed = (
                dict(self._ended),
                dict(self._flushes),
                self._rows,
                self._computed,
            )
            gaps, gaps_s = np.cumsum(self._gaps).tolist(), self._gaps_s
            preemptions, recomputed = self._preemptions, self._recomputed
            tallies = {
                "user": self._tallies.users.tallies(),
                "priority": self._tallies.priorities.tallies(),
            }

        def one(kind: type[Family], name: str, meaning: str, value: float) -> Metric:
            family = kind(name, meaning, labels=names)
            family.add_metric(values, value)
            return family

        def by(
            label: str, kind: type[Family], name: str, meaning: str, counts: dict[str, int]
        ) -> Metric:
            family = kind(name, meaning, labels=(*names, label))
            for what, n in counts.items():
                family.add_metric((*values, what), n)
            return family

        yield one(
            GaugeMetricFamily,
            "vllm:num_requests_running",
            "requests admitted and not answered",
            now.running,
        )
        yield one(
            GaugeMetricFamily,
            "vllm:num_requests_waiting",
            "requests waiting to be admitted",
            now.waiting,
        )
        yield one(
            GaugeMetricFamily,
            "vllm:kv_cache_usage_perc",
            "KV blocks reserved / all",
            now.blocks_used / now.n_blocks,
        )
        yield one(
            CounterMetricFamily,
            "vllm:prompt_tokens",
            "prompt tokens computed or found cached",
            now.prompt_tokens,
        )
        yield one(
            CounterMetricFamily,
            "vllm:generation_tokens",
            "completion tokens computed",
            now.completion_tokens,
        )
        yield one(
            CounterMetricFamily,
            "vllm:prefix_cache_queries",
            "prompt tokens looked for in the prefix cache",
            now.prefix_queries if self._caches else 0,
        )
        yield one(
            CounterMetricFamily,
            "vllm:prefix_cache_hits",
            "prompt tokens found in the prefix cache",
            now.prefix_hits if self._caches else 0,
        )
        yield one(
            CounterMetricFamily,
            "vllm:num_preemptions",
            "times that a request gave its KV blocks up and waited again",
            preemptions,
        )
        yield one(
            CounterMetricFamily,
            "batching_recomputed_tokens",
            "tokens computed once more, after a preemption",
            recomputed,
        )
        yield by(
            "finished_reason",
            CounterMetricFamily,
            "vllm:request_success",
            "requests that ended",
            ended,
        )
        yield by(
            "reason",
            CounterMetricFamily,
            "batching_flush",
            "times that requests were admitted",
            flushes,
        )
        yield by("kind", GaugeMetricFamily, "batching_rows", "rows of the latest iteration", rows)
        yield by(
            "kind",
            CounterMetricFamily,
            "batching_computed_rows",
            "rows of all iterations",
            computed,
        )
        yield one(
            GaugeMetricFamily, "batching_occupancy",
            "live rows of the latest iteration / max_batch_size",
            rows["live"] / self._max_batch_size,
        )  # fmt: skip
        family = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "gaps between consecutive tokens", labels=names
        )
        family.add_metric(values, [*zip([*map(str, SECONDS), "+Inf"], gaps)], sum_value=gaps_s)
        yield family
        for label, by_name in tallies.items():
            yield from _tallied(label, by_name, self._labels)


def _tallied(
    label: str, tallies: Mapping[str, Tally], labels: Mapping[str, str]
) -> Iterator[Metric]:
    """What became of the requests of each `label`, a user or a priority."""
    names = (*labels, label)
    prefix, of = f"batching_{label}", f"of each {label}"
    requests = CounterMetricFamily(
        f"{prefix}_requests", f"requests that ended or were refused, {of}", labels=(*names, "state")
    )
    prompt = CounterMetricFamily(
        f"{prefix}_prompt_tokens", f"prompt tokens of answered requests, {of}", labels=names
    )
    completion = CounterMetricFamily(
        f"{prefix}_completion_tokens", f"completion tokens of answered requests, {of}", labels=names
    )
    e2e = SummaryMetricFamily(
        f"{prefix}_e2e_latency_seconds", f"answered - arrival, {of}", labels=names
    )
    queue = SummaryMetricFamily(
        f"{prefix}_queue_time_seconds", f"admitted - arrival, {of}", labels=names
    )
    for name, tally in tallies.items():
        values = (*labels.values(), name)
        for ending in ENDINGS:
            requests.add_metric((*values, ending), tally.endings[ending])
        prompt.add_metric(values, tally.prompt_tokens)
        completion.add_metric(values, tally.completion_tokens)
        n = tally.endings["finished"]
        e2e.add_metric(values, n, tally.e2e_s)
        queue.add_metric(values, n, tally.queue_s)
    yield from (requests, prompt, completion, e2e, queue)
