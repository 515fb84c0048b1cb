"""What the parts share: a part, and a trace served by the server's own scheduler at the cost of
`--model fake`. `live` serves it by a real server.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from matplotlib.figure import Figure

from client.traces import Request
from client.workloads import Workload
from compare.report.drawing import PALETTE, Look
from config import build
from generate.fake import cost_s
from scheduling import scheduler
from scheduling.inference import Inference, Iteration, IterationRecord, Sampling, State
from simulate import drive
from stats import times_of
from studies.runner import Cases, Study

GREY, ORANGE, PURPLE, GREEN, BLUE, PINK = PALETTE
FCFS = Look(GREY, "--", "s")
Settings = dict[str, Any]
BURST = 2000  # requests by which a capacity is measured
OF_ALL: Settings = {"model": "fake", "max_waiting": 10**6}
Observer = Callable[[IterationRecord], None]


def unobserved(record: IterationRecord) -> None: ...


class Serve(Protocol):
    """Serves a trace to the end by a mode with settings, and returns when that is. Inferences have
    their stamps and tokens then. `observed` is told of every iteration.
    """

    def __call__(
        self,
        mode: str,
        settings: Settings,
        requests: Sequence[Request],
        inferences: Sequence[Inference],
        observed: Observer = unobserved,
    ) -> float: ...


class Part(NamedTuple):
    """A question, what answers it, and how that is told."""

    study: Study
    told_of: str  # the trace, in words; {n}: its requests
    requests: int  # of a trace
    settings: dict[str, Any]  # what the numbers are kept with
    cases: Callable[[], list[dict[str, Any]]]
    serve: Callable[..., dict[str, Any]]  # a case, requests, seed, and what serves them
    tables: Callable[[Cases], str]
    figure: Callable[[Cases, str], Figure]


def part_of(name: str, title: str, drawn: str) -> Study:
    return Study("studies.orders", name, title, drawn)


def data_of(lengths: str, seed: int) -> Workload:
    return Workload(lengths, seed=seed, prompts="ids")


def asked(requests: Sequence[Request], **who: Any) -> list[Inference]:
    """The requests as a server queues them."""
    return [Inference(r.ids, r.num_tokens, Sampling(seed=r.seed or 0), **who) for r in requests]


def serve(
    mode: str,
    settings: Settings,
    requests: Sequence[Request],
    inferences: Sequence[Inference],
    observed: Observer = unobserved,
    beyond_s: float = 0.0,
) -> float:
    """`Serve` in virtual time. beyond_s: how much longer than the fake engine's cost an iteration
    is.
    """

    def takes_s(iteration: Iteration) -> float:
        return cost_s(iteration) + beyond_s

    def planned(now: float, iteration: Iteration) -> None:
        seconds = takes_s(iteration) if iteration.rows else 0.0
        observed(IterationRecord(now, seconds, iteration))

    config = build(mode, OF_ALL | settings, {})
    arrivals = [(request.at, [inference]) for request, inference in zip(requests, inferences)]
    return drive(scheduler.build(config), arrivals, takes_s, planned=planned)


def latencies(inferences: Sequence[Inference]) -> list[float]:
    """Of those that were answered, in seconds."""
    return [times_of(i).e2e_s for i in inferences if i.state is State.FINISHED]


class Capacity(NamedTuple):
    """What `dynamic` with `fcfs` completes a second while requests always wait."""

    requests: float
    tokens: float  # completion tokens
    prompt_tokens: float


@functools.cache
def capacity(rows: int, lengths: str, kv_blocks: int | None = None) -> Capacity:
    burst = data_of(lengths, 2**31).requests(BURST, "burst", scaled=True)
    settings = {"max_batch_size": rows, "kv_cache": f"{kv_blocks}blocks" if kv_blocks else None}
    rate = BURST / serve("dynamic", settings, burst, asked(burst))
    tokens = statistics.mean(request.num_tokens for request in burst)
    return Capacity(rate, rate * tokens, rate * statistics.mean(len(r.ids) for r in burst))


def style_of(its: Look) -> dict[str, Any]:
    return {"color": its.colour, "ls": its.line, "marker": its.marker, "capsize": 3}
