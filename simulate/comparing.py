"""A comparison in virtual time: the servers that it makes, and processes that share its tasks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from client.calls import ServerError
from client.load import Watch
from client.measure import measure
from client.progress import Progress
from client.results import Json
from compare.measuring import CostsChanged, GivenTraces, Measured, Measuring, Task, Traces
from compare.report.foreseen import NEAR_KEYS
from simulate.fleet import Layout
from simulate.jobs import Jobs, Reporting, lost
from simulate.layouts import described
from simulate.server import SimulatedServer
from simulate.simulation import Simulation
from simulate.vllm.comparing import RecordedTraces, foreseen

# factors of the costs, by which one sees how near to capacity a prediction lies: there small
# errors of costs become large ones of latency
CHANGED = (0.95, 1.05)
MOST_CHANGED = 10_000  # requests that show it; of a longer trace the first ones, with factor 1, too


class Simulated:
    """Servers in virtual time."""

    program = "./simulate.sh"
    has_texts = False

    def __init__(self, options: Simulation):
        self._options = options
        self._recorded: Json | None = None  # the recorded server beside its simulation
        # virtual time refuses no request, so that drawn ones must fit into the context
        self.traces: Traces = (
            RecordedTraces(options) if options.replays else GivenTraces(options, options.context)
        )

    @property
    def replicas(self) -> int:
        return self._options.layout.replicas

    alike = replicas

    def prepare(self, progress: Progress) -> None:
        """Simulate what was recorded of one's own server, and say how well it is foreseen."""
        if self._options.own:
            self._recorded = foreseen(self._options, progress)

    def target(self, name: str, seed: int) -> contextlib.nullcontext[SimulatedServer]:
        return contextlib.nullcontext(self._server(name, self._options.layout, seed))

    def alone(self, name: str) -> contextlib.nullcontext[SimulatedServer]:
        return contextlib.nullcontext(self._server(name, Layout(), self._options.seed))

    def _server(self, name: str, layout: Layout, seed: int, factor: float = 1.0) -> SimulatedServer:
        options, config, own = self._options, self._options.config(name), self._options.own
        if own:
            factor *= own.factor(seed - options.seed)
        costs, jump = options.costs.scaled(factor), own is None or own.can_jump(config)
        return SimulatedServer(name, config, costs, layout, stream=options.stream, jump=jump)

    def costs_changed(self, name: str, seed: int) -> CostsChanged:
        options, numbers = self._options, dict[str, dict[str, float | None]]()
        if (options.own or options.served) and seed == options.seed:
            whole = self.traces.requests(seed)
            requests = whole[:MOST_CHANGED]
            for factor in CHANGED if len(requests) == len(whole) else (*CHANGED, 1.0):
                server = self._server(name, options.layout, seed, factor)
                result, _ = measure(server, requests, {}, math.inf, Watch(), options.bounds)
                numbers[f"{factor:g}"] = result.json(NEAR_KEYS)
        return numbers

    def facts(self) -> Json:
        costs, layout = self._options.costs, described(self._options.layout)
        known = ("hardware", "commit", "date", "estimate", "fidelity", "recording")
        fitted = {key: costs.source.get(key) for key in known}
        engine = {"engine": costs.source.get("config")}
        simulated = {"costs": costs.name, "costs_sha256": costs.sha256, "layout": layout}
        own: dict[str, Any] = {"recorded": self._recorded} if self._options.own else {}
        if remarks := costs.source.get("remarks"):
            own["remarks"] = remarks
        return {"simulated": simulated | fitted | engine | own}


def in_processes(measuring: Measuring, tasks: Sequence[Task]) -> Generator[Measured]:
    """Measure servers in several processes; as in one, until one fails."""
    elsewhere = Measuring(measuring.options, Reporting(), measuring.servers)
    progress, options = measuring.progress, measuring.options
    assert isinstance(options, Simulation)
    with progress.paused():
        workers = Jobs(options.jobs, progress)
    with workers as jobs, progress.step("simulating"):
        for future in [jobs.submit(_measured, elsewhere, *task) for task in tasks]:
            try:
                done, said = jobs.result(future) or (Measured(stopped=KeyboardInterrupt()), ())
            except BrokenProcessPool:
                done, said = Measured(stopped=ServerError(lost())), ()
            for text in said:
                progress.say(text)
            yield done
            if isinstance(done.stopped, ServerError):
                return


def _measured(measuring: Measuring, seed: int, name: str) -> tuple[Measured, Sequence[str]]:
    """Return a worker's measurement, and the lines that it has to print."""
    done = measuring.measured(seed, name)
    return done, measuring.progress.said if isinstance(measuring.progress, Reporting) else ()
