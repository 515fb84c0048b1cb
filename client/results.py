"""A result: the numbers of one measured variant. Each is declared once, with which JSON has it and
how tables show it.
"""

# ruff: noqa: RUF009 - defaults are declared by a function

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NamedTuple, Self

from stats import MEASURES, ROW_KINDS

Json = Mapping[str, Any]  # an object of a file, or of a server's answer
UNITS = {"s": (1e-3, "{:.2f}"), "ms": (1, "{:,.0f}")}  # scale and form of milliseconds
GROUPS = ("by_length", "by_user", "by_priority", "by_class")
# a number is in other JSON; in NAME.json; also in the summary; also in each rate of a sweep
OTHER, FILE, SUMMARY, RATE = range(4)


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


class Distribution(NamedTuple):
    """A measure over requests, in milliseconds; None each where no request has it. In JSON each
    statistic has its own name, as p99_ttft_ms.
    """

    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None


def _number(
    *shown: Any, at: int = RATE, default: Any = None, sparse: bool = False, **more: Any
) -> Any:
    """Declare a number. shown, more: fields of its Key. sparse: left out of JSON where empty."""
    how = {"default_factory": dict} if default == {} else {"default": default}
    return field(**how, metadata={"at": at, "sparse": sparse, "key": (shown, more)})


def _latency(of: Mapping[int, str], short: str = "", form: str = "", **more: Any) -> Any:
    """Declare a distribution. of: its statistics, by where they are. short: its name in the
    terminal, which shows those that each rate has. more: fields of each Key.
    """
    how = {"at": max(of), "of": of, "short": short, "form": form, "more": more}
    return field(default=Distribution(), metadata=how)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The numbers of a server and a trace, or of a group of its requests, by their names in
    stats.DEFINITIONS; None where one is not known.

    warm_up: requests that no number counts. cut: the bound that was reached (`at`), and requests
    that were left (`in_flight`, `unsent`). server, config, occupancy_over_time: as a server of ours
    reports them. costs_changed: numbers by the factor of a simulation's costs. requests: a record
    of each one, in NAME.json.
    """

    variant: str | None = _number(at=FILE)
    completed: int = _number(default=0)
    failed: int = _number(default=0)
    refused: int = _number(default=0, at=OTHER)
    least_tokens: int | None = _number(at=OTHER, sparse=True)
    most_tokens: int | None = _number(at=OTHER, sparse=True)
    wall_clock_s: float = _number(default=0.0)
    total_input_tokens: int = _number(at=FILE, default=0)
    total_output_tokens: int = _number(at=FILE, default=0)
    request_throughput: float | None = _number()
    output_throughput: float | None = _number("throughput, tok/s", short="tok/s")
    total_token_throughput: float | None = _number(at=SUMMARY)
    goodput: float | None = _number("goodput, requests/s", 1, "{:.2f}", "goodput\nreq/s")
    attainment: float | None = _number("within limits, %", 100, short="within\nlimits %")
    queue_time: Distribution = _latency({RATE: "mean"})
    ttft: Distribution = _latency({RATE: "p50 p95 p99", SUMMARY: "mean"}, "ttft")
    ttft_from_schedule: Distribution = _latency({SUMMARY: "p50"})
    tpot: Distribution = _latency({RATE: "mean"}, "tpot", "{:,.1f}")
    itl: Distribution = _latency({RATE: "p50 p95 p99"}, "itl", "{:,.1f}")
    held_time: Distribution = _latency({SUMMARY: "mean"})
    e2el: Distribution = _latency({RATE: "mean p50 p95 p99"}, "latency")
    e2el_from_schedule: Distribution = _latency({SUMMARY: "p99"})
    normalized_latency: Distribution = _latency({RATE: "mean p50"}, form="{:,.1f}")
    schedule_lag: Distribution = _latency({RATE: "p50 p99"})
    preempted: Distribution = _latency({OTHER: "mean"}, rare=True)
    paused: Distribution = _latency({OTHER: "mean"}, rare=True)
    client_limited: bool = _number(default=False)
    achieved_rate: float | None = _number("as sent, requests/s", 1, "{:.4g}")
    latency_line: dict[str, float] | None = _number(at=SUMMARY)
    partial: bool = _number(default=False, at=SUMMARY)
    cut: Json | None = _number(at=SUMMARY)
    warm_up: int = _number(default=0, at=FILE)
    resent: int = _number(default=0, at=SUMMARY)
    sample: int | None = _number(at=SUMMARY)
    mean_in_flight: float | None = _number()
    useful_fraction: float | None = _number("useful rows, %", 100, short="useful\n%")
    occupancy: float | None = _number("occupancy, %", 100)
    largest_batch: int | None = _number("largest batch, rows", short="largest\nbatch", at=SUMMARY)
    live_rows: int | None = _number(at=SUMMARY)
    idle_rows: int | None = _number(at=SUMMARY)
    padding_rows: int | None = _number(at=SUMMARY)
    recomputed_rows: int | None = _number(at=SUMMARY)
    rejected_rows: int | None = _number(at=SUMMARY)
    preemptions: int | None = _number("preemptions", rare=True)
    recomputed_tokens: int | None = _number("recomputed tokens", rare=True)
    cached_tokens: int | None = _number("prompt tokens found cached", rare=True)
    cached_fraction: float | None = _number("prompt tokens found cached, %", 100, rare=True)
    draft_tokens: int | None = _number()
    accepted_tokens: int | None = _number()
    acceptance: float | None = _number("draft tokens accepted, %", 100)
    adapter_loads: int | None = _number("adapters loaded", rare=True)
    expected_useful_fraction: float | None = _number(at=SUMMARY)
    littles_law: dict[str, float] | None = _number(at=SUMMARY)
    requested_rate: float | None = _number()
    mean_num_tokens: float = _number(default=0.0)
    offered_throughput: float | None = _number("asked for, tok/s")
    growth: float = _number("growth, s/s", 1, "{:.2f}", default=0.0)
    slowest_row_s: float = _number(at=FILE, default=0.0)
    growth_in_flight: float = _number("growth in flight, %", 100, default=0.0)
    busy_s: float = _number(default=0.0)
    busy_throughput: float | None = _number("while requests wait, tok/s")
    by_length: Mapping[str, Result] = _number(default={}, at=SUMMARY)
    by_user: Mapping[str, Result] = _number(default={}, at=SUMMARY)
    by_priority: Mapping[str, Result] = _number(default={}, at=SUMMARY)
    by_class: Mapping[str, Result] = _number(default={}, at=SUMMARY)
    other_length: int = _number(default=0, at=SUMMARY)
    errors: dict[str, int] = _number(default={})
    cost_per_million_tokens: float | None = _number(
        "cost per million tokens", 1, "{:,.3f}", "cost per\nM tokens", sparse=True
    )
    cost_per_thousand_within: float | None = _number(
        "cost per 1,000 requests within limits",
        1,
        "{:,.3f}",
        "cost per\n1,000 in\nlimits",
        sparse=True,
    )
    capacity: float | None = _number("capacity, requests/s", 1, "{:.3g}", at=OTHER, sparse=True)
    goodput_rate: float | None = _number(
        "highest rate within the limits, requests/s", 1, "{:.3g}", at=OTHER, sparse=True
    )
    server: Json = _number(default={}, at=FILE, sparse=True)
    config: Json = _number(default={}, at=FILE, sparse=True)
    occupancy_over_time: Json = _number(default={}, at=FILE, sparse=True)
    costs_changed: Mapping[str, dict[str, float | None]] = _number(default={}, at=FILE, sparse=True)
    requests: Sequence[Json] = _number(default=(), at=FILE)

    @property
    def ended(self) -> int:
        """Requests that were answered or failed."""
        return self.completed + self.failed

    @classmethod
    def of(cls, numbers: Json) -> Self:
        """Read a result from JSON, also of an older version, which had fewer numbers."""
        known = {each.name: numbers[each.name] for each in fields(cls) if each.name in numbers}
        for name in DISTRIBUTIONS:
            values = (numbers.get(f"{each}_{name}_ms") for each in Distribution._fields)
            known[name] = Distribution(*values)
        for kind in GROUPS:
            known[kind] = {n: Result.of(group) for n, group in numbers.get(kind, {}).items()}
        return cls(**known)

    def number(self, name: str) -> Any:
        """Return a number by its name in JSON. Raises AttributeError for another name."""
        if name in OF_DISTRIBUTIONS:
            measure, statistic = OF_DISTRIBUTIONS[name]
            return getattr(getattr(self, measure), statistic)
        return getattr(self, name)

    def json(self, names: Iterable[str]) -> dict[str, Any]:
        """Return numbers by these names, as JSON has them."""
        values = {name: self.number(name) for name in names}
        for name in SPARSE & values.keys():
            if values[name] is None or values[name] == {}:
                del values[name]
        for kind in values.keys() & GROUPS:
            values[kind] = {name: group.json(OF_GROUP) for name, group in values[kind].items()}
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Point(Result):
    """A rate of a sweep. saturated: beyond the server's capacity. client_behind: beyond this
    client's. nominal_num_tokens: mean of the distribution that lengths were drawn from.
    """

    rate: float = _number("requests/s", 1, "{:g}", at=OTHER, default=MISSING)
    arrival: str = _number(at=OTHER, default=MISSING)
    nominal_num_tokens: float = _number(at=OTHER, default=MISSING)
    saturated: bool = _number(at=OTHER, default=MISSING)
    client_behind: bool = _number(at=OTHER, default=MISSING)


DECLARED = {each.name: each.metadata for each in fields(Point)}
DISTRIBUTIONS = [name for name, how in DECLARED.items() if "of" in how]
OF_DISTRIBUTIONS = {  # {p99_ttft_ms: (ttft, p99)}
    f"{each}_{name}_ms": (name, each) for name in DISTRIBUTIONS for each in Distribution._fields
}


def _keys() -> Iterator[tuple[Key, int]]:
    """Yield each number, and each declared statistic of a distribution; and where it is."""
    for name, how in DECLARED.items():
        if "key" in how:
            yield Key(name, *how["key"][0], **how["key"][1]), how["at"]
            continue
        measure = MEASURES.get(name.removesuffix("_from_schedule"))
        title, unit = (measure.heading, measure.unit) if measure else ("", "ms")
        scale, form = UNITS[unit if title else "ms"]
        for at, statistics in how["of"].items():
            for each in (several := statistics.split()):
                heading = f"{title} {each}, {unit}" if title and name in MEASURES else ""
                words = [how["short"], *[each] * (len(several) > 1), unit]
                short = "\n".join(words) if how["short"] and at == RATE else ""
                shown = heading, scale, how["form"] or form, short
                yield Key(f"{each}_{name}_ms", *shown, **how["more"]), at


_KEYS = dict(_keys())
KEYS = {key.name: key for key in _KEYS} | {"ended": Key("ended", "requests", 1, "{:g}")}
SPARSE = {name for name, how in DECLARED.items() if how.get("sparse")}
OF_RATE = [key.name for key, at in _KEYS.items() if at == RATE]
OF_POINT = [*OF_RATE, *Point.__slots__]
OF_SUMMARY = [key.name for key, at in _KEYS.items() if at >= SUMMARY] + ["capacity", "goodput_rate"]
OF_FILE = [name for name, how in DECLARED.items() if how["at"] >= FILE and "key" in how]
OF_FILE += [name for name, (of, _) in OF_DISTRIBUTIONS.items() if DECLARED[of]["at"] >= FILE]
OF_GROUP = [
    *("completed", "failed", "refused", "least_tokens", "most_tokens", "output_throughput"),
    *("goodput", "attainment", "mean_preempted_ms", "mean_paused_ms"),
    *(f"{each}_{name}_ms" for name in ("e2el", "ttft") for each in ("mean", "p50", "p99")),
]
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


def keys(names: str) -> list[Key]:
    """Return the declared keys of names with spaces between. Raises KeyError for another name."""
    return [KEYS[name] for name in names.split()]
