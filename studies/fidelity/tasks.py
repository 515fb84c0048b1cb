"""What is asked of real servers, and in which order. Knows no server and no clock."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from client.draws import TokenIds
from client.traces import Request
from client.workloads import Workload
from compare.variants import Variant

LOADS = (0.5, 0.7, 0.85, 0.95, 1.2)  # parts of the capacity, as a burst on a real server shows it
FIRST_SEED = 1000  # calibration draws from smaller ones
# of a trace, and of one for nobatch: eight runs, of which p99 is, have 2,000 requests
REQUESTS, ONE_BY_ONE = 250, 30
START_S = 5.0  # of a server, and its end, roughly
EVERY = 3  # of long prompts: each third one is
LONG = (200, 700)  # tokens

# so few blocks that rows are preempted
FEW_BLOCKS = {"kv_reservation": "demand", "kv_cache": "160blocks"}
VARIANTS = {
    "nobatch": Variant("nobatch", {}),
    "static": Variant("static", {}),
    "windowed": Variant("windowed", {}),
    "dynamic": Variant("dynamic", {}),
    "dynamic, demand": Variant("dynamic", FEW_BLOCKS),
    "dynamic, prefix caching": Variant("dynamic", {"prefix_caching": True}),
    "dynamic, sjf": Variant("dynamic", {"order": "sjf"}),
}


class Kind(NamedTuple):
    """Of a trace: what is drawn, and how it arrives at a rate."""

    drawn: Mapping[str, Any]
    arrival: str = "poisson:{:g}"


PLAIN = "plain"
KINDS = {
    PLAIN: Kind({}),
    "other lengths": Kind({"lengths": "lognormal:60:1:700"}),
    "bursty": Kind({}, "gamma:{:g}:3"),
    "shared prefixes": Kind({"prefixes": "8:128:1"}),
    "long prompts": Kind({"prompts": "ids"}),
}


class Case(NamedTuple):
    """A server and the kind of its traces."""

    part: str
    variant: str
    kind: str


class Part(NamedTuple):
    """A model, and which cases it is asked at which loads."""

    model: str
    costs: str  # by name, of the machine at hand
    seconds: float  # that a trace takes at capacity, roughly
    loads: Sequence[float]  # of plain traces, all variants
    other_loads: Sequence[float]
    others: Mapping[str, Sequence[str]]  # kind: variants

    def cases(self) -> dict[tuple[str, str], Sequence[float]]:
        """(variant, kind): loads"""
        plain = {(name, PLAIN): self.loads for name in VARIANTS}
        return plain | {
            (name, kind): self.other_loads for kind, names in self.others.items() for name in names
        }


PARTS = {
    "fake": Part(
        "fake",
        "fake-server",
        4.5,
        LOADS,
        (0.85, 1.2),
        {
            "other lengths": ("static", "dynamic", "dynamic, sjf"),
            "bursty": ("windowed", "dynamic"),
            "shared prefixes": ("dynamic, prefix caching",),
            "long prompts": ("static", "dynamic", "dynamic, demand"),
        },
    ),
    "demo": Part(
        "demo",
        "demo",
        6.0,
        (0.5, 0.85, 1.2),
        (0.85,),
        {
            "other lengths": ("dynamic",),
            "bursty": ("dynamic",),
            "shared prefixes": ("dynamic, prefix caching",),
            "long prompts": ("dynamic",),
        },
    ),
}


class Task(NamedTuple):
    """One trace by one server."""

    case: Case
    seed: int
    repeat: int
    load: float | None  # None: all at once, which shows the capacity
    requests: int

    def told(self) -> dict[str, Any]:
        return self.case._asdict() | dict(zip(self._fields[1:], self[1:]))

    @property
    def seconds(self) -> float:
        """How long it takes, roughly."""
        return PARTS[self.case.part].seconds / (self.load or 1.0)


def of(told: Mapping[str, Any]) -> Task:
    """The task that `told` tells."""
    case = Case(*(told[name] for name in Case._fields))
    return Task(case, *(told[name] for name in Task._fields[1:]))


def requests_of(variant: str) -> int:
    """Of a trace."""
    return ONE_BY_ONE if VARIANTS[variant].mode == "nobatch" else REQUESTS


def tasks(parts: Sequence[str], seeds: int, repeats: int) -> Iterator[list[Task]]:
    """What each server is asked, one after the other: a burst first, then the loads.

    All cases take turns, so that a run that is stopped has as much of each, and a machine that is
    slow for a while is so for all.
    """
    for seed, repeat in itertools.product(range(seeds), range(repeats)):
        for part in parts:
            for (variant, kind), loads in PARTS[part].cases().items():
                case = Case(part, variant, kind)
                yield [
                    Task(case, seed, repeat, load, requests_of(variant)) for load in (None, *loads)
                ]


def trace(task: Task, rate: float | None) -> Sequence[Request]:
    """What is sent, at so many requests a second; none: all at once."""
    kind, seed = KINDS[task.case.kind], FIRST_SEED + task.seed
    arrival = kind.arrival.format(rate) if rate else "burst"
    requests = Workload(seed=seed, **kind.drawn).requests(task.requests, arrival, scaled=True)
    if task.case.kind != "long prompts":
        return requests
    rng = np.random.default_rng([seed, 10])
    lengths = rng.integers(*LONG, len(requests), endpoint=True)
    own = TokenIds(rng, lengths)
    return [
        request
        if request.id % EVERY
        else request.model_copy(update={"prompt_ids": own[request.id]})
        for request in requests
    ]


def mean_tokens(kind: str) -> float:
    """Completion tokens of a request on average."""
    return Workload(**KINDS[kind].drawn).mean_num_tokens
