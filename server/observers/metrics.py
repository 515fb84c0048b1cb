"""Prometheus metrics of a server, each declared once: those of requests in `stats.MEASURES`, the
others in `Metrics`. Names are vLLM's where it has one, so that panels of its dashboards work.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from scheduling.inference import Inference, Iteration, State
from scheduling.latency import times_of
from scheduling.records import IterationRecord, Snapshot
from server.observers.run import Run
from server.observers.server_stats import ServerStats
from server.observers.tallies import ENDINGS
from stats import DEFINITIONS, MEASURES, ROW_KINDS, gaps_s

if TYPE_CHECKING:
    from batching import BatchingManager
    from config.config import Config

# finer below 10 ms than vLLM's: an iteration of a small model takes so little
SECONDS = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06,
    0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
TOKENS = tuple(2**i for i in range(13))
# FINISHED has its own finish_reason
REASONS = {State.CANCELLED: "abort", State.EXPIRED: "timeout", State.FAILED: "error"}
GAUGE, COUNTER, SUMMARY = GaugeMetricFamily, CounterMetricFamily, SummaryMetricFamily
Value = float | tuple[int, float] | dict[str, int]  # (n, sum) of a summary; by label


class Declared(NamedTuple):
    """A metric: its type, name and meaning, and its value; `label` tells several values apart."""

    kind: type[Any]
    name: str
    meaning: str
    value: Callable[..., Value]
    label: str = ""

    def family(self, labels: Iterable[str], prefix: str = "", of: str = "") -> Any:
        names = (*labels, self.label) if self.label else labels
        return self.kind(prefix + self.name, self.meaning + of, labels=names)

    def add(self, family: Any, labels: Iterable[str], value: Value) -> None:
        if isinstance(value, dict):
            for name, n in value.items():
                family.add_metric((*labels, name), n)
        else:
            family.add_metric(labels, *(value if isinstance(value, tuple) else (value,)))


class Seen(NamedTuple):
    """A server at one instant, for the values of metrics."""

    now: Snapshot
    run: Run  # since the server's start
    latest: IterationRecord
    max_batch_size: int
    caches: bool  # without, prefix queries and hits are of several completions of one prompt
    most_drafts: int  # draft tokens of a row at most


OF_SERVER = (
    Declared(GAUGE, "vllm:num_requests_running", "requests admitted and not answered",
             lambda seen: seen.now.running),
    Declared(GAUGE, "vllm:num_requests_waiting", "requests waiting to be admitted",
             lambda seen: seen.now.waiting),
    Declared(GAUGE, "vllm:kv_cache_usage_perc", "KV blocks reserved / all",
             lambda seen: seen.now.blocks_used / seen.now.n_blocks),
    Declared(COUNTER, "vllm:prompt_tokens", "prompt tokens computed or found cached",
             lambda seen: seen.now.prompt_tokens),
    Declared(COUNTER, "vllm:generation_tokens", "completion tokens computed",
             lambda seen: seen.now.completion_tokens),
    Declared(COUNTER, "vllm:prefix_cache_queries", "prompt tokens looked for in the prefix cache",
             lambda seen: seen.now.prefix_queries if seen.caches else 0),
    Declared(COUNTER, "vllm:prefix_cache_hits", "prompt tokens found in the prefix cache",
             lambda seen: seen.now.prefix_hits if seen.caches else 0),
    Declared(COUNTER, "vllm:num_preemptions", DEFINITIONS["preemptions"],
             lambda seen: seen.run.counts["preemptions"]),
    Declared(COUNTER, "batching_recomputed_tokens", DEFINITIONS["recomputed_tokens"],
             lambda seen: seen.run.counts["recomputed_tokens"]),
    Declared(COUNTER, "vllm:request_success", "requests that ended",
             lambda seen: _endings(seen.run), "finished_reason"),
    Declared(COUNTER, "batching_flush", "times that requests were admitted",
             lambda seen: dict(seen.run.reasons), "reason"),
    Declared(GAUGE, "batching_rows", "rows of the latest iteration",
             lambda seen: seen.latest.rows, "kind"),
    Declared(COUNTER, "batching_computed_rows", "rows of all iterations",
             lambda seen: {kind: seen.run.counts[f"{kind}_rows"] for kind in ROW_KINDS}, "kind"),
    Declared(GAUGE, "batching_occupancy", "live rows of the latest iteration / max_batch_size",
             lambda seen: seen.latest.live / seen.max_batch_size),
)  # fmt: skip
# metrics of a server that speculates, named as vLLM's
OF_SPECULATION = (
    Declared(COUNTER, "vllm:spec_decode_num_drafts", "rows that verified draft tokens",
             lambda seen: seen.run.counts["drafts"]),
    Declared(COUNTER, "vllm:spec_decode_num_draft_tokens", DEFINITIONS["draft_tokens"],
             lambda seen: seen.run.counts["draft_tokens"]),
    Declared(COUNTER, "vllm:spec_decode_num_accepted_tokens", DEFINITIONS["accepted_tokens"],
             lambda seen: seen.run.counts["accepted_tokens"]),
    Declared(COUNTER, "vllm:spec_decode_num_accepted_tokens_per_pos",
             "accepted tokens by their place among a row's draft tokens, from 0",
             lambda seen: {str(i): seen.run.accepted_at[i] for i in range(seen.most_drafts)},
             "position"),
)  # fmt: skip
# metrics of each user, priority and adapter
OF_TALLIES = (
    Declared(COUNTER, "requests", "requests that ended or were refused",
             lambda tally: {ending: tally.counts[ending] for ending in ENDINGS}, "state"),
    Declared(COUNTER, "prompt_tokens", "prompt tokens of answered requests",
             lambda tally: tally.counts["prompt_tokens"]),
    Declared(COUNTER, "completion_tokens", "completion tokens of answered requests",
             lambda tally: tally.counts["completion_tokens"]),
    Declared(SUMMARY, "e2e_latency_seconds", "answered - arrival",
             lambda tally: (tally.counts["finished"], tally.seconds["e2el"])),
    Declared(SUMMARY, "queue_time_seconds", "admitted - arrival",
             lambda tally: (tally.counts["finished"], tally.seconds["queue_time"])),
)  # fmt: skip
# histograms: of iterations, and of answered requests
OF_TOKENS = {
    "vllm:iteration_tokens_total": "tokens of an iteration's live rows",
    "vllm:request_prompt_tokens": "prompt tokens of an answered request",
    "vllm:request_generation_tokens": "completion tokens of an answered request",
}
MEANS_ADAPTERS = "adapters of requests that run and wait; its value is the time"
ADAPTERS = "vllm:lora_requests_info", MEANS_ADAPTERS
OF_ADAPTERS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")  # labels


class Metrics:
    """An observer of the manager, and a collector in a registry of its own, so that two apps in
    one process share nothing.

    Plain numbers become metrics when Prometheus asks; histograms alone are counted here.
    """

    def __init__(
        self,
        config: Config,
        manager: BatchingManager,
        stats: ServerStats,
        replica: str | None = None,
    ):
        """stats: counts, which are not counted again. replica: its name among others, a label."""
        self.registry = CollectorRegistry()
        self._manager, self._stats = manager, stats
        self._max_batch_size = config.max_batch_size
        self._caches, self._most_drafts = config.prefix_caching, config.speculate
        self._declared = OF_SERVER + (OF_SPECULATION if self._most_drafts else ())
        self._max_lora = config.lora_slots
        self._labels = {"model_name": config.model_name, "mode": config.mode}
        if replica is not None:
            self._labels["replica"] = replica
        self._histograms = [
            (measure, self._histogram(measure.metric, measure.formula_at_server, SECONDS))
            for measure in MEASURES.values()
            if measure.metric and not measure.pooled
        ]
        most = config.max_model_len  # lengths have vLLM's buckets
        lengths = [n * 10**i for i in range(len(str(most))) for n in (1, 2, 5) if n * 10**i <= most]
        self._of_iteration, self._of_prompt, self._of_completion = (
            self._histogram(*each, buckets)
            for each, buckets in zip(OF_TOKENS.items(), (TOKENS, lengths, lengths))
        )
        self._latest = IterationRecord(0.0, 0.0, Iteration([], 0, 0, 0))
        self._lock = threading.Lock()  # guards what follows
        self._gaps = np.zeros(len(SECONDS) + 1, np.int64)  # between tokens, by bucket
        self._gaps_s = 0.0
        self.registry.register(self)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            name, meaning, self._labels, buckets=buckets, registry=self.registry
        ).labels(**self._labels)

    def iteration(self, record: IterationRecord) -> None:
        rows = record.iteration.rows
        self._of_iteration.observe(sum(row.n_tokens for row in rows if not row.idle))
        self._latest = record

    def answered(self, inference: Inference) -> None:
        if inference.error is not None:
            return
        times = times_of(inference)
        self._of_prompt.observe(len(inference.prompt_ids))
        self._of_completion.observe(len(inference.tokens))
        for measure, histogram in self._histograms:
            if not math.isnan(seconds := measure.of(times)):
                histogram.observe(seconds)
        gaps = np.bincount(np.searchsorted(SECONDS, gaps_s(times)), minlength=len(SECONDS) + 1)
        with self._lock:
            self._gaps += gaps
            self._gaps_s += times.last_token_at - times.first_token_at

    def collect(self) -> Iterator[Metric]:
        """Metrics of the plain counts, for the registry."""
        names, values = tuple(self._labels), tuple(self._labels.values())
        now, run = self._manager.snapshot(), self._stats.total()
        seen = Seen(now, run, self._latest, self._max_batch_size, self._caches, self._most_drafts)
        for declared in self._declared:
            declared.add(family := declared.family(names), values, declared.value(seen))
            yield family
        with self._lock:
            gaps, gaps_s = np.cumsum(self._gaps).tolist(), self._gaps_s
        itl = MEASURES["itl"]
        family = HistogramMetricFamily(itl.metric, itl.formula_at_server, labels=names)
        family.add_metric(values, [*zip([*map(str, SECONDS), "+Inf"], gaps)], sum_value=gaps_s)
        yield family
        for label, by_name in zip(("user", "priority", "adapter"), run.tallies.values()):
            for declared in OF_TALLIES:
                family = declared.family(
                    (*names, label), f"batching_{label}_", f", of each {label}"
                )
                for name, tally in by_name.items():
                    declared.add(family, (*values, name), declared.value(tally))
                yield family
        if self._max_lora:
            yield self._adapters_now(names, values)

    def _adapters_now(self, names: Sequence[str], values: Sequence[str]) -> Metric:
        """Return vLLM's gauge of adapters with requests."""
        family = GAUGE(*ADAPTERS, labels=(*names, *OF_ADAPTERS))
        groups = self._manager.inspect(lambda s: [[*s.running.values()], [*s.waiting.values()]])
        used = [",".join(sorted({i.adapter for i in group} - {""})) for group in groups]
        family.add_metric((*values, str(self._max_lora), *used), time.time())
        return family


def _endings(run: Run) -> dict[str, int]:
    finished = {reason: run.finish_reasons[reason] for reason in ("stop", "length")}
    return finished | {reason: run.counts[state.value] for state, reason in REASONS.items()}
