"""What a run measured. Runs add up: those of several replicas are one, with the percentiles of all
their values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from observers.tallies import ENDINGS, KEPT, Tally
from stats import DEFINITIONS, ROW_KINDS, distribution, throughputs

Named = Mapping[str, tuple[Tally, np.ndarray]]  # by user or priority, with the TIMES that are kept


@dataclass
class Run:
    """Times are seconds on one clock. `samples`: values of measures, those that are kept."""

    first_arrival: float = float("inf")
    last_ending: float = float("-inf")
    counts: Counter[str] = field(default_factory=Counter)  # of requests, tokens and preemptions
    reasons: Counter[str] = field(default_factory=Counter)  # for which batches were formed
    by_tokens: Counter[int] = field(default_factory=Counter)  # answers, by the tokens asked for
    latency_by_tokens: dict[int, float] = field(default_factory=dict)  # their sum, by the same
    normalized_sum: float = 0.0
    rows: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(ROW_KINDS, 0)))
    busy_s: float = 0.0
    occupied_s: float = 0.0
    preempted_s: float = 0.0
    paused_s: float = 0.0
    largest_batch: int = 0
    samples: Mapping[str, np.ndarray] = field(default_factory=dict)
    users: Named = field(default_factory=dict)
    priorities: Named = field(default_factory=dict)

    def later(self, seconds: float) -> Run:
        """The same on a clock that shows so much more."""
        first, last = self.first_arrival + seconds, self.last_ending + seconds
        return replace(self, first_arrival=first, last_ending=last)

    def __add__(self, other: Run) -> Run:
        """Of both. The largest batch is the larger one's: batches do not add up."""
        a, b = self, other
        return Run(
            min(a.first_arrival, b.first_arrival),
            max(a.last_ending, b.last_ending),
            _sum(a.counts, b.counts),
            _sum(a.reasons, b.reasons),
            _sum(a.by_tokens, b.by_tokens),
            {
                tokens: a.latency_by_tokens.get(tokens, 0.0) + b.latency_by_tokens.get(tokens, 0.0)
                for tokens in {**a.latency_by_tokens, **b.latency_by_tokens}
            },
            a.normalized_sum + b.normalized_sum,
            _sum(a.rows, b.rows),
            a.busy_s + b.busy_s,
            a.occupied_s + b.occupied_s,
            a.preempted_s + b.preempted_s,
            a.paused_s + b.paused_s,
            max(a.largest_batch, b.largest_batch),
            {
                name: np.concatenate([run.samples[name] for run in (a, b) if name in run.samples])
                for name in {**a.samples, **b.samples}
            },
            _together(a.users, b.users),
            _together(a.priorities, b.priorities),
        )

    def told(self) -> dict[str, Any]:
        """What /stats answers."""
        counts, n = self.counts, self.counts["finished"]
        # -inf as long as nothing has ended
        wall = max(0.0, self.last_ending - self.first_arrival)
        rates = throughputs(n, counts["prompt_tokens"], counts["completion_tokens"], wall)
        rows, busy = self.rows, self.busy_s
        result: dict[str, Any] = {
            "latency-per-token": self.normalized_sum / n if n else 0.0,
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
            "largest_batch": self.largest_batch,
            "occupancy": self.occupied_s / busy if busy else 0.0,
            "useful_fraction": rows["live"] / rows.total() if rows["live"] else 0.0,
            **{f"{kind}_rows": n for kind, n in rows.items()},
            "preemptions": counts["preemptions"],
            "preempted_s": self.preempted_s,
            "paused_s": self.paused_s,
            "recomputed_tokens": counts["recomputed_tokens"],
            "cached_tokens": counts["cached_tokens"],
            "busy_s": busy,
            "batches_formed": dict(self.reasons),
            "latency-by-requested-tokens": {
                str(tokens): {
                    "requests": count,
                    "mean_latency_s": self.latency_by_tokens[tokens] / count,
                }
                for tokens, count in sorted(self.by_tokens.items())
            },
        }
        for name, values in self.samples.items():
            result |= distribution(name, values) if len(values) else {}
        for kind, named in (("users", self.users), ("priorities", self.priorities)):
            result[kind] = {name: _measures(*each) for name, each in named.items()}
        return result | {"definitions": DEFINITIONS}


def added(runs: Sequence[Run]) -> Run:
    """All of them, of which there must be one at least. Two and two, and so on: one after another,
    the first one's values would be copied as often as there are others.
    """
    while len(runs) > 1:
        pairs = [a + b for a, b in zip(runs[::2], runs[1::2])]
        runs = [*pairs, *runs[len(pairs) * 2 :]]
    return runs[0]


def _sum(a: Counter[Any], b: Counter[Any]) -> Counter[Any]:
    """Counter's own + drops what is 0."""
    both = Counter(a)
    both.update(b)
    return both


def _together(a: Named, b: Named) -> Named:
    both = dict(a)
    for name, (tally, times) in b.items():
        if name in both:
            before, earlier = both[name]
            both[name] = before + tally, np.concatenate([earlier, times])
        else:
            both[name] = tally, times
    return both


def _measures(tally: Tally, times: np.ndarray) -> dict[str, Any]:
    """What /stats tells of a user or a priority; `times`: TIMES of the latest answers."""
    n = tally.counts["finished"]
    counted = (*ENDINGS[1:], "prompt_tokens", "completion_tokens")
    result: dict[str, Any] = {"completed": n} | {name: tally.counts[name] for name in counted}
    for measure in KEPT:
        latest = distribution(measure.name, times[measure.name])
        mean, *keys = (f"{statistic}_{measure.name}_ms" for statistic in ("mean", "p50", "p99"))
        result[mean] = round(tally.seconds[measure.name] / n * 1e3, 3) if n else None
        result |= {key: latest[key] for key in keys}
    return result
