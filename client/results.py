"""Declarations of a result's numbers: where each is repeated, and how tables show it.

NAME.json has more; a summary, and each rate of a sweep, repeat the numbers declared here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stats import MEASURES, ROW_KINDS

Part = Literal["point", "summary", "sweep", "group"]


@dataclass(frozen=True, slots=True)
class Key:
    """A number of a result.

    part: its places: each rate of a sweep and the summary ("point"), the "summary" alone, a rate or
    a sweep as a whole ("sweep"), a "group" of requests alone. heading: in report.md; empty: in no
    table. scale: factor there. short: heading in the terminal; empty: not shown there. rare: shown
    only where a result has more than zero.
    """

    name: str
    part: Part = "point"
    heading: str = ""
    scale: float = 1
    form: str = "{:,.0f}"
    short: str = ""
    rare: bool = False

    def of(self, result: Mapping[str, Any]) -> Any:
        """Return the number in a result; None where it has none."""
        return result.get(self.name)


UNITS = {"s": (1e-3, "{:.2f}"), "ms": (1, "{:,.0f}")}  # scale and form of milliseconds


def _of(
    name: str, statistic: str, part: Part = "point", short: str = "", rare: bool = False,
    form: str = "",
) -> Key:  # fmt: skip
    """Return the key of a mean or percentile, with the measure's heading and unit."""
    measure = MEASURES[name]
    heading = f"{measure.heading} {statistic}, {measure.unit}"
    scale, usual = UNITS[measure.unit]
    return Key(f"{statistic}_{name}_ms", part, heading, scale, form or usual, short, rare)


WITHOUT_COLUMN = (  # of each rate of a sweep and the summary
    "completed", "failed", "errors", "client_limited", "wall_clock_s", "requested_rate",
    "mean_num_tokens", "request_throughput", "busy_s",
    "mean_queue_time_ms", "p50_schedule_lag_ms", "p99_schedule_lag_ms", "mean_in_flight",
    "draft_tokens", "accepted_tokens",
)  # fmt: skip
SUMMARY_ALONE = (
    "total_token_throughput", "p50_ttft_from_schedule_ms",
    "mean_held_time_ms", "expected_useful_fraction", "live_rows", "idle_rows", "padding_rows",
    "recomputed_rows", "rejected_rows", "latency_line", "littles_law", "by_length", "by_user",
    "by_priority", "by_class", "partial", "sample", "other_length",
)  # fmt: skip
KEYS = {key.name: key for key in (
    *(Key(name) for name in WITHOUT_COLUMN),
    *(Key(name, "summary") for name in SUMMARY_ALONE),
    Key("achieved_rate", "point", "as sent, requests/s", 1, "{:.4g}"),
    Key("offered_throughput", "point", "asked for, tok/s"),
    Key("output_throughput", "point", "throughput, tok/s", short="tok/s"),
    Key("busy_throughput", "point", "while requests wait, tok/s"),
    Key("goodput", "point", "goodput, requests/s", 1, "{:.2f}"),
    Key("attainment", "point", "within limits, %", 100, short="within\nlimits %"),
    _of("e2el", "mean", short="latency\nmean s"),
    _of("e2el", "p50"),
    _of("e2el", "p99", short="latency\np99 s"),
    Key("p99_e2el_from_schedule_ms", "summary", "", *UNITS["s"]),
    _of("ttft", "mean", "summary"),
    _of("ttft", "p50", short="ttft\np50 ms"),
    _of("ttft", "p99"),
    _of("tpot", "mean", short="tpot\nms", form="{:,.1f}"),
    _of("normalized_latency", "mean", short="latency\nms/token", form="{:,.1f}"),
    _of("normalized_latency", "p50", form="{:,.1f}"),
    Key("growth", "point", "growth, s/s", 1, "{:.2f}"),
    Key("growth_in_flight", "point", "growth in flight, %", 100),
    Key("useful_fraction", "point", "useful rows, %", 100, short="useful\n%"),
    Key("occupancy", "point", "occupancy, %", 100),
    Key("largest_batch", "summary", "largest batch, rows", short="largest\nbatch"),
    Key("preemptions", "point", "preemptions", rare=True),
    Key("recomputed_tokens", "point", "recomputed tokens", rare=True),
    Key("cached_tokens", "point", "prompt tokens found cached", rare=True),
    Key("cached_fraction", "point", "prompt tokens found cached, %", 100, rare=True),
    Key("acceptance", "point", "draft tokens accepted, %", 100),
    Key("adapter_loads", "point", "adapters loaded", rare=True),
    _of("preempted", "mean", "group", rare=True),
    _of("paused", "mean", "group", rare=True),
    Key("rate", "sweep", "requests/s", 1, "{:g}"),
    Key("requests", "sweep", "requests", 1, "{:g}"),
    Key("capacity", "sweep", "capacity, requests/s", 1, "{:.3g}"),
    Key("goodput_rate", "sweep", "highest rate within the limits, requests/s", 1, "{:.3g}"),
)}  # fmt: skip
ENGINE = (  # as /stats of our own servers has them
    "useful_fraction", "occupancy", "largest_batch", "preemptions", "recomputed_tokens",
    "cached_tokens", "draft_tokens", "accepted_tokens", "adapter_loads",
    *(f"{kind}_rows" for kind in ROW_KINDS),
)  # fmt: skip
SHOWN_OF_STATS = (  # by client.py
    "latency-per-token", "throughput", "total-tokens-handled", "total-elapsed-time",
    "largest_batch", "occupancy", "useful_fraction",
)  # fmt: skip
OF_STATS = (  # numbers that are read of /stats
    *ENGINE, *SHOWN_OF_STATS, "completed", "failed", "total_input_tokens", "total_output_tokens",
    "kv_blocks", "busy_s",
)  # fmt: skip
# of our own servers alone, and what follows from them
OURS = (*ENGINE, "cached_fraction", "acceptance", "expected_useful_fraction", "littles_law")


def keys(names: str) -> list[Key]:
    """Return the declared keys of names with spaces between. Raises KeyError for another name."""
    return [KEYS[name] for name in names.split()]


def of_point(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a measurement that a rate of a sweep has. Raises KeyError."""
    return {name: result[name] for name, key in KEYS.items() if key.part == "point"}


def of_summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a measurement that a summary has. Raises KeyError."""
    return {name: result[name] for name, key in KEYS.items() if key.part in ("point", "summary")}
