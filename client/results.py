"""Declarations of a result's numbers: where each is repeated, and how tables show it.

NAME.json has more; a summary, and each rate of a sweep, repeat the numbers declared here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stats import MEASURES, ROW_KINDS


@dataclass(frozen=True, slots=True)
class Key:
    """A number of a result.

    heading: in report.md; empty: in no table. scale: factor there. short: heading in the terminal;
    empty: not shown there. rare: shown only where a result has more than zero.
    """

    name: str
    heading: str = ""
    scale: float = 1
    form: str = "{:,.0f}"
    short: str = ""
    rare: bool = False

    def shown(self, value: float) -> str:
        """Format a value that is scaled already."""
        return share(value) if self.scale == 100 else self.form.format(value)


def share(percent: float, digits: int = 0) -> str:
    """Format a share; with more digits where it would be shown as 0 or as 100 and is neither.

    399 of 400 are 99.8%, and not 100%.
    """
    part = 1e-9 < percent < 100 - 1e-9  # more of it is an error of floating point
    while part and float(f"{percent:.{digits}f}") in (0, 100):
        digits += 1
    return f"{percent:,.{digits}f}"


UNITS = {"s": (1e-3, "{:.2f}"), "ms": (1, "{:,.0f}")}  # scale and form of milliseconds


def _percentiles(name: str, short: str, form: str = "") -> list[Key]:
    """Return the keys of a measure's percentiles. short: its name in the terminal."""
    unit = MEASURES[name].unit
    return [_of(name, p, form, short=f"{short}\n{p}\n{unit}") for p in ("p50", "p95", "p99")]


def _of(name: str, statistic: str, form: str = "", **more: Any) -> Key:
    """Return the key of a mean or percentile, with the measure's heading and unit."""
    measure = MEASURES[name]
    heading = f"{measure.heading} {statistic}, {measure.unit}"
    scale, usual = UNITS[measure.unit]
    return Key(f"{statistic}_{name}_ms", heading, scale, form or usual, **more)


def _without_column(names: str) -> list[Key]:
    return [Key(name) for name in names.split()]


OF_POINT = [  # of each rate of a sweep, and the summary
    *_without_column(
        "completed failed errors resent client_limited wall_clock_s requested_rate mean_num_tokens "
        "request_throughput busy_s mean_queue_time_ms p50_schedule_lag_ms p99_schedule_lag_ms "
        "mean_in_flight draft_tokens accepted_tokens"
    ),
    Key("achieved_rate", "as sent, requests/s", 1, "{:.4g}"),
    Key("offered_throughput", "asked for, tok/s"),
    Key("output_throughput", "throughput, tok/s", short="tok/s"),
    Key("busy_throughput", "while requests wait, tok/s"),
    Key("goodput", "goodput, requests/s", 1, "{:.2f}", short="goodput\nreq/s"),
    Key("attainment", "within limits, %", 100, short="within\nlimits %"),
    _of("e2el", "mean", short="latency\nmean\ns"),
    *_percentiles("ttft", "ttft"),
    *_percentiles("itl", "itl", "{:,.1f}"),
    *_percentiles("e2el", "latency"),
    _of("tpot", "mean", "{:,.1f}", short="tpot\nms"),
    _of("normalized_latency", "mean", "{:,.1f}"),
    _of("normalized_latency", "p50", "{:,.1f}"),
    Key("growth", "growth, s/s", 1, "{:.2f}"),
    Key("growth_in_flight", "growth in flight, %", 100),
    Key("useful_fraction", "useful rows, %", 100, short="useful\n%"),
    Key("occupancy", "occupancy, %", 100),
    Key("preemptions", "preemptions", rare=True),
    Key("recomputed_tokens", "recomputed tokens", rare=True),
    Key("cached_tokens", "prompt tokens found cached", rare=True),
    Key("cached_fraction", "prompt tokens found cached, %", 100, rare=True),
    Key("acceptance", "draft tokens accepted, %", 100),
    Key("adapter_loads", "adapters loaded", rare=True),
]
OF_SUMMARY = [  # of the summary alone
    *_without_column(
        "total_token_throughput p50_ttft_from_schedule_ms mean_held_time_ms "
        "expected_useful_fraction live_rows idle_rows padding_rows recomputed_rows rejected_rows "
        "latency_line littles_law by_length by_user by_priority by_class partial cut "
        "sample other_length"
    ),
    Key("p99_e2el_from_schedule_ms", "", *UNITS["s"]),
    _of("ttft", "mean"),
    Key("largest_batch", "largest batch, rows", short="largest\nbatch"),
]
OF_PRICE = [  # of both, where --price is given
    Key("cost_per_million_tokens", "cost per million tokens", 1, "{:,.3f}", "cost per\nM tokens"),
    Key("cost_per_thousand_within", "cost per 1,000 requests within limits", 1, "{:,.3f}",
        "cost per\n1,000 in\nlimits"),
]  # fmt: skip
OF_SWEEP = [  # of a rate, or of a sweep as a whole
    Key("rate", "requests/s", 1, "{:g}"),
    Key("requests", "requests", 1, "{:g}"),
    Key("capacity", "capacity, requests/s", 1, "{:.3g}"),
    Key("goodput_rate", "highest rate within the limits, requests/s", 1, "{:.3g}"),
]
OF_GROUP = [_of("preempted", "mean", rare=True), _of("paused", "mean", rare=True)]
KEYS = {key.name: key for key in (*OF_POINT, *OF_SUMMARY, *OF_PRICE, *OF_SWEEP, *OF_GROUP)}
OF_ROWS = [f"{kind}_rows" for kind in ROW_KINDS]
ENGINE = (  # as /stats of our own servers has them
    "useful_fraction occupancy largest_batch preemptions recomputed_tokens cached_tokens "
    f"draft_tokens accepted_tokens adapter_loads {' '.join(OF_ROWS)}"
).split()
OF_STATS = [  # further numbers that are read there, the first of which client.py shows
    *("latency-per-token", "throughput", "total-tokens-handled", "total-elapsed-time"),
    *("completed", "failed", "total_input_tokens", "total_output_tokens", "kv_blocks", "busy_s"),
]
SHOWN_OF_STATS = [*OF_STATS[:4], "largest_batch", "occupancy", "useful_fraction"]
# of our own servers alone, and what follows from them
OURS = [*ENGINE, "cached_fraction", "acceptance", "expected_useful_fraction", "littles_law"]


def keys(names: str) -> list[Key]:
    """Return the declared keys of names with spaces between. Raises KeyError for another name."""
    return [KEYS[name] for name in names.split()]


def of_point(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a measurement that a rate of a sweep has. Raises KeyError."""
    return {key.name: result[key.name] for key in OF_POINT} | _present(OF_PRICE, result)


def of_summary(result: Mapping[str, Any], swept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a result, and of its sweep, that a summary has. Raises KeyError."""
    numbers = {key.name: result[key.name] for key in (*OF_POINT, *OF_SUMMARY)}
    return numbers | _present(OF_PRICE, result) | _present(OF_SWEEP, swept)


def _present(keys: Iterable[Key], numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {key.name: numbers[key.name] for key in keys if key.name in numbers}
