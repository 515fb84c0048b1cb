"""GET /metrics: what this server does, for Prometheus, under vLLM's names where it has one, so that its dashboards work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from flask import Blueprint, Response, request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from batching import BatchingManager, Inference, IterationRecord
from config import Config
from inference import State
from stats import times_of, tpot_s

# finer below 10 ms than vLLM's: a whole iteration of a small model lies there
SECONDS = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25,
    0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
TOKENS = tuple(2**i for i in range(13))
REASONS = {State.CANCELLED: "abort", State.EXPIRED: "timeout", State.FAILED: "error"}  # FINISHED has its own finish_reason


class Metrics:
    """An observer of the manager, with a registry of its own: two apps in one process share nothing."""

    def __init__(self, config: Config, manager: BatchingManager):
        self.registry = CollectorRegistry()
        self._max_batch_size = config.max_batch_size
        labels = {"model_name": config.model_name, "mode": config.mode}

        def metric(kind: Any, name: str, meaning: str, *also: str, **extra: Any) -> Any:
            made = kind(name, meaning, (*labels, *also), registry=self.registry, **extra)
            return (lambda value: made.labels(*labels.values(), value)) if also else made.labels(*labels.values())

        def seconds(name: str, meaning: str) -> Histogram:
            return metric(Histogram, name, meaning, buckets=SECONDS)

        self._ttft = seconds("vllm:time_to_first_token_seconds", "first token - arrival")
        self._tpot = seconds("vllm:request_time_per_output_token_seconds", "(last token - first token) / (n - 1)")
        self._e2e = seconds("vllm:e2e_request_latency_seconds", "answered - arrival")
        self._queue = seconds("vllm:request_queue_time_seconds", "admitted - arrival")
        self._prefill = seconds("vllm:request_prefill_time_seconds", "first token - admitted")
        self._decode = seconds("vllm:request_decode_time_seconds", "last token - first token")
        self._held = seconds("request_held_time_seconds", "answered - last token: waiting for batch mates")
        self._tokens = metric(Histogram, "vllm:iteration_tokens_total", "tokens of an iteration's live rows", buckets=TOKENS)
        self._ended = metric(Counter, "vllm:request_success", "requests that ended", "finished_reason")
        self._flush = metric(Counter, "batching_flush", "times that requests were admitted", "reason")
        self._rows = metric(Gauge, "batching_rows", "rows of the latest iteration", "kind")
        self._computed = metric(Counter, "batching_computed_rows", "rows of all iterations", "kind")
        self._occupancy = metric(Gauge, "batching_occupancy", "live rows of the latest iteration / max_batch_size")
        for reason in ("stop", "length", *REASONS.values()):
            self._ended(reason)  # shown as 0 until it happens
        for kind in ("live", "idle", "padding"):
            self._rows(kind), self._computed(kind)
        self._now = _Now(manager, labels)
        self.registry.register(self._now)

    def iteration(self, record: IterationRecord) -> None:
        live, idle = record.live_rows, record.idle_rows
        for kind, n in (("live", live), ("idle", idle)):
            self._rows(kind).set(n)
            self._computed(kind).inc(n)
        self._occupancy.set(live / self._max_batch_size)
        self._tokens.observe(sum(row.n_tokens for row in record.iteration.rows if not row.idle))
        if record.iteration.reason:
            self._flush(record.iteration.reason).inc()

    def answered(self, inference: Inference) -> None:
        if inference.state is not State.FINISHED:
            self._ended(REASONS[inference.state]).inc()
            return
        self._ended(inference.finish_reason).inc()
        times = times_of(inference)
        self._ttft.observe(times.ttft_s)
        self._e2e.observe(times.e2e_s)
        self._queue.observe(times.queue_s)
        self._prefill.observe(times.ttft_s - times.queue_s)
        self._decode.observe(times.decode_s)
        self._held.observe(times.held_s)
        if (tpot := tpot_s(times.decode_s, len(inference.tokens))) is not None:
            self._tpot.observe(tpot)
        self._now.gaps(times.itl_s)

    def blueprint(self) -> Blueprint:
        routes = Blueprint("metrics", __name__)

        @routes.get("/metrics")
        def metrics() -> Response:
            encode, content_type = choose_encoder(request.headers.get("Accept", ""))
            return Response(encode(self.registry), content_type=content_type)

        return routes


class _Now:
    """What is read from the scheduler when Prometheus asks, and the gaps between tokens.

    These come in by the hundred with each answer: counted with numpy, they cost the handler thread a tenth of
    as many calls of Histogram.observe.
    """

    def __init__(self, manager: BatchingManager, labels: dict[str, str]):
        self._manager = manager
        self._labels = labels
        self._lock = threading.Lock()
        self._counts = np.zeros(len(SECONDS) + 1, np.int64)
        self._sum = 0.0

    def gaps(self, seconds: list[float]) -> None:
        where = np.searchsorted(SECONDS, seconds)
        with self._lock:
            self._counts += np.bincount(where, minlength=len(self._counts))
            self._sum += sum(seconds)

    def collect(self) -> Iterator[Metric]:
        names, values = tuple(self._labels), tuple(self._labels.values())
        now = self._manager.snapshot()
        for kind, name, meaning, value in (
            (GaugeMetricFamily, "vllm:num_requests_running", "requests admitted and not answered", now.running),
            (GaugeMetricFamily, "vllm:num_requests_waiting", "requests waiting to be admitted", now.waiting),
            (GaugeMetricFamily, "vllm:kv_cache_usage_perc", "KV blocks reserved / all", now.blocks_used / now.n_blocks),
            (CounterMetricFamily, "vllm:prompt_tokens", "prompt tokens computed", now.prompt_tokens),
            (CounterMetricFamily, "vllm:generation_tokens", "completion tokens computed", now.completion_tokens),
        ):
            family = kind(name, meaning, labels=names)
            family.add_metric(values, value)
            yield family
        with self._lock:
            cumulative, total = np.cumsum(self._counts).tolist(), self._sum
        gaps = HistogramMetricFamily("vllm:inter_token_latency_seconds", "gaps between consecutive tokens", labels=names)
        bounds = [*map(str, SECONDS), "+Inf"]
        gaps.add_metric(values, [*zip(bounds, cumulative)], sum_value=total)
        yield gaps
