"""What the parts share: a part, and a trace served by the server's own scheduler at the cost of
`--model fake`.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from benchmarks.studies import Cases, Study
from client.data import PromptData, Request
from client.report.drawing import PALETTE, Look
from config import Config, build
from generate.fake import cost_s
from scheduling import scheduler
from scheduling.inference import Inference, Iteration, Sampling, State
from simulate import drive
from stats import times_of

GREY, ORANGE, PURPLE, GREEN, BLUE, PINK = PALETTE
FCFS = Look(GREY, "--", "s")
Settings = dict[str, Any]


class Part(NamedTuple):
    """A question, what answers it, and how that is told."""

    study: Study
    told_of: str  # the trace, in words; {n}: its requests
    requests: int  # of a trace
    settings: dict[str, Any]  # what the numbers are kept with
    cases: Callable[[], list[dict[str, Any]]]
    serve: Callable[[dict[str, Any], int, int], dict[str, Any]]  # a case, requests, seed
    tables: Callable[[Cases], str]
    figure: Callable[[Cases, str], Figure]


def part_of(name: str, title: str, drawn: str) -> Study:
    return Study("benchmarks.orders", name, title, drawn)


def data_of(lengths: str, seed: int) -> PromptData:
    return PromptData(lengths, seed=seed, prompts="ids")


def config_of(mode: str, settings: Settings) -> Config:
    return build(mode, {"model": "fake", "max_waiting": 10**6, **settings}, {})


def asked(requests: Sequence[Request], seed: int, **who: Any) -> list[Inference]:
    """The requests as a server queues them. Their own seeds, by which lengths are mispredicted,
    differ from trace to trace.
    """
    return [
        Inference(r.ids, r.num_tokens, Sampling(seed=seed * 10**6 + r.id), **who) for r in requests
    ]


def serve(
    config: Config,
    requests: Sequence[Request],
    inferences: Sequence[Inference],
    planned: Callable[[float, Iteration], None] = lambda now, iteration: None,
) -> float:
    """Serve them in virtual time to the end; return when that is."""
    arrivals = [(request.at, [inference]) for request, inference in zip(requests, inferences)]
    return drive(scheduler.build(config), arrivals, cost_s, planned=planned)


def latencies(inferences: Sequence[Inference]) -> list[float]:
    """Of those that were answered, in seconds."""
    return [times_of(i).e2e_s for i in inferences if i.state is State.FINISHED]


class Capacity(NamedTuple):
    """What `dynamic` with `fcfs` completes a second while requests always wait."""

    requests: float
    tokens: float  # completion tokens
    prompt_tokens: float


@functools.cache
def capacity(rows: int, lengths: str, kv_blocks: int | None = None, n: int = 2000) -> Capacity:
    burst = data_of(lengths, 2**31).requests(n, "burst", scaled=True)
    config = config_of("dynamic", {"max_batch_size": rows, "kv_blocks": kv_blocks})
    rate = n / serve(config, burst, asked(burst, 0))
    tokens = statistics.mean(request.num_tokens for request in burst)
    return Capacity(rate, rate * tokens, rate * statistics.mean(len(r.ids) for r in burst))


def style_of(its: Look) -> dict[str, Any]:
    return {"color": its.colour, "ls": its.line, "marker": its.marker, "capsize": 3}
