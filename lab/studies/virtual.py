"""Traces served in virtual time by the server's own scheduler, at stated costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from client.outcomes import Outcomes
from client.traces import Request
from generate.auto import build
from scheduling.inference import Inference
from scheduling.latency import Times
from scheduling.records import IterationRecord
from simulate.costs import FAKE, Costs
from simulate.server import SimulatedServer

VIRTUAL = "virtual time, with the iteration times of `--model fake`"
CAPACITY_SEED = 2**31
Settings = Mapping[str, Any]  # a server's; "mode", if it is not dynamic, among them
SETTINGS: Settings = {"model": "fake", "max_waiting": 10**6}


class Seen:
    """Observer that keeps all iterations of a trace, and the inferences that were answered."""

    def __init__(self) -> None:
        self.records: list[IterationRecord] = []
        self.inferences: list[Inference] = []

    def iteration(self, record: IterationRecord) -> None:
        self.records.append(record)

    def answered(self, inference: Inference) -> None:
        self.inferences.append(inference)


def server(settings: Settings, costs: Costs = FAKE, **more: Any) -> SimulatedServer:
    """Return a simulated server. more: its other arguments."""
    flags = {**SETTINGS, **settings}
    mode = flags.pop("mode", "dynamic")
    return SimulatedServer(mode, build(mode, flags, {}), costs, **more)


def served(settings: Settings, requests: Sequence[Request], **more: Any) -> tuple[Outcomes, Seen]:
    """Serve a trace; return what the client and what an observer saw."""
    seen = Seen()
    return server(settings, observe=lambda scheduler: seen, **more).replay(requests), seen


def pool(kv_blocks: int | None) -> Settings:
    """Return the setting of so many KV blocks; None: the server's default."""
    return {"kv_cache": f"{kv_blocks}blocks"} if kv_blocks else {}


def by_time(requests: Sequence[Request]) -> list[Request]:
    """Return requests in the order of their arrivals, and numbered so."""
    ordered = sorted(requests, key=lambda request: request.at)
    return [request.model_copy(update={"id": i}) for i, request in enumerate(ordered)]


def while_waiting(times: Times) -> float:
    """Return the requests completed per second until the last one is admitted. times: of a trace in
    which requests wait all the time until then.
    """
    end = float(np.max(times.admitted_at))
    return float(np.sum(times.answered_at <= end)) / end
