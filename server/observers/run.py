"""Counts of a run. Runs add up: those of several replicas are one, with the percentiles of all
their values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from scheduling.inference import Inference
from scheduling.latency import Times
from scheduling.records import IterationRecord
from server.observers.tallies import ENDINGS, KEPT, Tallies, Tally
from stats import DEFINITIONS, ROW_KINDS, distribution, throughputs

OF_TOKENS = ("recomputed_tokens", "cached_tokens", "draft_tokens", "accepted_tokens")
# counts, as /stats names them
REPORTED = (*ENDINGS[1:], "invalid", "preemptions", *OF_TOKENS, "adapter_loads")


@dataclass
class Run:
    """Times are seconds on one clock. `samples`: the values of measures that are kept."""

    first_arrival: float = float("inf")
    last_ending: float = float("-inf")
    counts: Counter[str] = field(default_factory=Counter)  # requests by ENDINGS, tokens, rows …
    seconds: Any = field(default_factory=Counter)  # sums
    reasons: Counter[str] = field(default_factory=Counter)  # for which batches were formed
    finish_reasons: Counter[str] = field(default_factory=Counter)
    by_tokens: Counter[int] = field(default_factory=Counter)  # answers, by the tokens asked for
    latency_by_tokens: Any = field(default_factory=Counter)  # sums of seconds, by the same
    largest_batch: int = 0
    accepted_at: Counter[int] = field(default_factory=Counter)  # draft tokens, by position from 0
    samples: dict[str, np.ndarray] = field(default_factory=dict)
    tallies: Tallies = field(default_factory=Tallies)  # counted by the owner of the run

    def iteration(self, record: IterationRecord, max_batch_size: int) -> None:
        iteration, rows = record.iteration, record.rows
        for kind, n in rows.items():
            if n:
                self.counts[f"{kind}_rows"] += n * record.n
        self.counts["preemptions"] += iteration.preempted
        self.counts["adapter_loads"] += len(iteration.loads)
        if rows["recomputed"]:
            self.counts["recomputed_tokens"] += sum([row.recomputed for row in iteration.rows])
        if drafts := record.drafts:
            self.counts["drafts"] += len(drafts)
            self.counts["draft_tokens"] += sum([n for n, _ in drafts])
            self.counts["accepted_tokens"] += rows["live"] - record.live
            self.accepted_at.update(i for _, accepted in drafts for i in range(accepted))
        self.seconds["busy"] += record.seconds
        self.seconds["occupied"] += record.seconds * record.live / max_batch_size
        self.largest_batch = max(self.largest_batch, iteration.running)
        if iteration.reason:
            self.reasons[iteration.reason] += 1

    def ended(self, inference: Inference, times: Times | None) -> None:
        """Count an inference that ended; times: of one that was answered."""
        assert inference.answered_at is not None
        self.first_arrival = min(self.first_arrival, inference.arrived_at)
        self.last_ending = max(self.last_ending, inference.answered_at)
        self.counts[inference.state.value] += 1
        self.seconds["preempted"] += inference.interruptions.preempted_s
        self.seconds["paused"] += inference.interruptions.paused_s
        if times is None:
            return
        self.finish_reasons[inference.finish_reason] += 1
        if inference.leader is None:  # a prompt counts once
            self.counts["prompt_tokens"] += len(inference.prompt_ids)
            self.counts["cached_tokens"] += inference.cached_tokens
        self.counts["completion_tokens"] += times.completion_tokens
        e2e_s = times.answered_at - times.started_at
        self.seconds["normalized"] += e2e_s / times.completion_tokens
        self.by_tokens[inference.num_tokens] += 1
        self.latency_by_tokens[inference.num_tokens] += e2e_s

    def add(self, other: Run) -> None:
        """Add another run."""
        self.add_counts(other)
        for name, values in other.samples.items():
            self.samples[name] = np.concatenate([self.samples.get(name, values[:0]), values])
        self.tallies.add(other.tallies)

    def add_counts(self, other: Run) -> None:
        """Add the counts of another run, neither samples nor tallies. The largest batch is the
        largest of both: batches do not add up.
        """
        self.first_arrival = min(self.first_arrival, other.first_arrival)
        self.last_ending = max(self.last_ending, other.last_ending)
        self.largest_batch = max(self.largest_batch, other.largest_batch)
        for name in COUNTERS:
            getattr(self, name).update(getattr(other, name))

    def later(self, seconds: float) -> Run:
        """Return these counts on a clock that is so many seconds ahead."""
        first, last = self.first_arrival + seconds, self.last_ending + seconds
        return replace(self, first_arrival=first, last_ending=last)

    def report(self) -> dict[str, Any]:
        """The answer of /stats."""
        counts, n, busy = self.counts, self.counts["finished"], self.seconds["busy"]
        # -inf as long as nothing has ended
        wall = max(0.0, self.last_ending - self.first_arrival)
        rates = throughputs(n, counts["prompt_tokens"], counts["completion_tokens"], wall)
        rows = {f"{kind}_rows": counts[f"{kind}_rows"] for kind in ROW_KINDS}
        live = counts["live_rows"]
        result: dict[str, Any] = {
            "latency-per-token": self.seconds["normalized"] / n if n else 0.0,
            "throughput": rates["output_throughput"],
            "total-tokens-handled": counts["completion_tokens"],
            "total-elapsed-time": wall,
            "completed": n,
            **{name: counts[name] for name in REPORTED},
            "total_input_tokens": counts["prompt_tokens"],
            "total_output_tokens": counts["completion_tokens"],
            **rates,
            "largest_batch": self.largest_batch,
            "occupancy": self.seconds["occupied"] / busy if busy else 0.0,
            "useful_fraction": live / sum(rows.values()) if live else 0.0,
            **rows,
            **{f"{name}_s": self.seconds[name] for name in ("preempted", "paused", "busy")},
            "batches_formed": dict(self.reasons),
            "latency-by-requested-tokens": {
                str(tokens): {"requests": k, "mean_latency_s": self.latency_by_tokens[tokens] / k}
                for tokens, k in sorted(self.by_tokens.items())
            },
        }
        for name, values in self.samples.items():
            result |= distribution(name, values) if len(values) else {}
        for kind, names in self.tallies.items():
            result[kind] = {name: _measures(tally) for name, tally in names.items()}
        return result | {"definitions": DEFINITIONS}


COUNTERS = [each.name for each in fields(Run) if each.default_factory is Counter]


def added(runs: Sequence[Run]) -> Run:
    """Return the sum of runs, with all of their names and times."""
    latest = sum(run.tallies["users"].latest for run in runs)
    total = Run(tallies=Tallies(latest, math.inf))
    for run in runs:
        total.add(run)
    return total


def _measures(tally: Tally) -> dict[str, Any]:
    """Measures of a user, a priority or an adapter."""
    n = tally.counts["finished"]
    counted = (*ENDINGS[1:], "prompt_tokens", "completion_tokens")
    result: dict[str, Any] = {"completed": n} | {name: tally.counts[name] for name in counted}
    kept = tally.latest.kept()
    for name in KEPT:
        latest = distribution(name, kept[name])
        mean, *keys = (f"{statistic}_{name}_ms" for statistic in ("mean", "p50", "p99"))
        result[mean] = round(tally.seconds[name] / n * 1e3, 3) if n else None
        result |= {key: latest[key] for key in keys}
    return result
