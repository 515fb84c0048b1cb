"""Measuring a variant: a server with one seed's trace and, in a sweep, at rates."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from client import traces
from client.calls import ServerError
from client.measure import Measurable, burst_size, measure, measure_capacity, with_requests
from client.outcomes import Outcome
from client.price import costs
from client.progress import Progress
from client.results import Json, Point, Result
from client.trace_file import Context
from client.traces import Request
from client.workloads import Workload
from compare import sweep
from compare.options import LOAD, Options
from compare.report import sentences

TIMEOUT_S = 3600.0  # how long an answer may take
CostsChanged = Mapping[str, dict[str, float | None]]  # numbers by the factor of the costs
Task = tuple[int, str]  # a seed, and the name of a server


class Traces(Protocol):
    """The trace of each seed. arrival: "auto" until it is measured. words: the workload in a
    summary. waits_for_capacity: nothing can be drawn before the capacity is measured.
    """

    arrival: str
    words: Json

    @property
    def waits_for_capacity(self) -> bool: ...
    def workload(self, seed: int) -> Workload: ...
    def requests(self, seed: int) -> Sequence[Request]: ...
    def saves(self, requests: Sequence[Request]) -> bool:
        """Return whether a trace is saved with the results."""


class GivenTraces:
    """Traces that are drawn, or that of a file or of the run that is checked. An invalid request,
    of any seed, is an error when this is made, before any server starts.
    """

    def __init__(self, options: Options, context: Context | None = None):
        """context: drawn lengths are cut to fit into it."""
        self._options, self._context, self.arrival = options, context, options.arrival
        self.file: Sequence[Request] | None = None
        self.words: Json
        if options.trace:
            self.file, self.words = options.trace.requests(options.context)
            options.bounds.check(len(self.file))
            self.by_ids = self.file[0].prompt_ids is not None
            return
        arrival = "burst" if self.arrival == "auto" else self.arrival
        for seed in reversed(options.seeds):
            data = self.workload(seed)
            requests = data.requests(options.numsamples, arrival)
            options.bounds.check(len(requests))
        self.words, self.by_ids = data.words, requests[0].prompt_ids is not None

    @property
    def waits_for_capacity(self) -> bool:
        users = self._options.workload["users"]
        return self.arrival == "auto" and self.file is None and not users

    def workload(self, seed: int) -> Workload:
        return Workload(**self._options.workload, seed=seed, context=self._context)

    def requests(self, seed: int) -> Sequence[Request]:
        saved = self._options.check and self._options.check.trace(seed)
        drawn = self._options.numsamples, self.arrival
        return saved or self.file or self.workload(seed).requests(*drawn)

    def saves(self, requests: Sequence[Request]) -> bool:
        # a large one is drawn again where it is needed
        return bool(self.file) or len(requests) <= traces.MOST_SAVED


class Servers(Protocol):
    """The servers of a comparison, real or simulated.

    program: that compares them. has_texts: their answers have texts. traces: that they serve.
    replicas: servers of a variant that share the load. alike: how many of them one of `alone`
    stands for.
    """

    program: str
    has_texts: bool

    @property
    def traces(self) -> Traces: ...
    @property
    def replicas(self) -> int: ...
    @property
    def alike(self) -> int: ...

    def prepare(self, progress: Progress) -> None:
        """Find out what `facts` say, once the arrival is known."""

    def target(self, name: str, seed: int) -> AbstractContextManager[Measurable]:
        """A variant's servers, ready, and warm."""

    def alone(self, name: str) -> AbstractContextManager[Measurable]:
        """The servers whose capacity is measured: all of a variant's, or one of so many `alike`."""

    def facts(self) -> Json:
        """Facts about these servers that a summary has."""

    def costs_changed(self, name: str, seed: int) -> CostsChanged:
        """Numbers of a variant by the factor of its costs; empty for all that is not foreseen."""


@dataclass
class Measured:
    """Measurements of a server with one seed's trace, up to its end or what `stopped` it."""

    result: Result | None = None  # with its requests
    points: list[Point] = field(default_factory=list)  # points of its sweep, by rate
    swept: bool = False  # to the end
    stopped: KeyboardInterrupt | ServerError | None = None


@dataclass
class Measuring:
    """Measures servers. on_point: called with a server's name and its measurements so far, when a
    rate of its sweep is measured.
    """

    options: Options
    progress: Progress
    servers: Servers
    on_point: Callable[[str, Measured], None] | None = None

    def measured(self, seed: int, name: str) -> Measured:
        """Measure one server with one seed's trace."""
        done = Measured()
        try:
            requests = self.servers.traces.requests(seed)
            with self.servers.target(name, seed) as target:
                result, outcomes = self._replay(target, name, requests)
                done.result = with_requests(result, outcomes)
                self.progress.say(sentences.result_line(name, result))
                if result.partial:
                    raise KeyboardInterrupt
                if self.options.sweep:
                    self._sweep(target, seed, done)
                    done.swept = True
            changed = self.servers.costs_changed(name, seed)
            done.result = replace(done.result, costs_changed=changed)
        except (KeyboardInterrupt, ServerError) as stopped:
            done.stopped = stopped
        return done

    def capacity(self) -> Json:
        """Measure the capacity of the reference, and let requests arrive by it."""
        options, servers, reference = self.options, self.servers, self.options.reference
        data = servers.traces.workload(options.seed)
        n = servers.replicas // servers.alike * burst_size(options.config(reference))
        burst = data.requests(n, "burst", scaled=True)
        with (
            servers.alone(reference) as target,
            self.progress.replay(f"capacity of {reference}", burst) as watch,
        ):
            capacity = measure_capacity(target, burst, TIMEOUT_S, watch)
        mean = float(np.mean(data.requests(options.numsamples).num_tokens))
        rate = LOAD * servers.alike * capacity["output_throughput"] / mean
        servers.traces.arrival = f"poisson:{rate:.4g}"
        reached = f"{capacity['output_throughput']:,.0f} tok/s"
        if servers.alike > 1:
            reached += f" each of {servers.alike} replicas"
        by = f"{LOAD:g} of it: --arrival {servers.traces.arrival}"
        self.progress.say(f"capacity of {reference}: {reached}; {by}")
        return {**capacity, "load": LOAD, "of": reference}

    def _replay(
        self, target: Measurable, title: str, requests: Sequence[Request]
    ) -> tuple[Result, list[Outcome]]:
        with self.progress.replay(title, requests) as watch:
            limits, bounds = self.options.goodput, self.options.bounds
            result, outcomes = measure(target, requests, limits, TIMEOUT_S, watch, bounds)
        if self.options.price is not None:
            result = replace(result, **costs(result, self.options.price))
        return result, outcomes

    def _sweep(self, target: Measurable, seed: int, done: Measured) -> None:
        """Measure the points of a server's sweep. Raises KeyboardInterrupt."""

        def replay(what: str, requests: Sequence[Request]) -> Result:
            result, _ = self._replay(target, f"{target.name} {what}", requests)
            if result.partial:
                raise KeyboardInterrupt
            return result

        def measured(point: Point) -> None:
            done.points.append(point)
            done.points.sort(key=lambda p: p.rate)
            self.progress.say(sentences.point_line(target.name, point))
            if self.on_point:
                self.on_point(target.name, done)

        options, traces = self.options, self.servers.traces
        name = target.name if target.ours else options.reference
        burst = self.servers.replicas * burst_size(options.config(name))
        data = traces.workload(seed)
        sweep.sweep(replay, data, traces.arrival, burst, options.seconds, measured)


Results = Callable[[Measuring, Sequence[Task]], Generator[Measured]]


def one_by_one(measuring: Measuring, tasks: Sequence[Task]) -> Generator[Measured]:
    """Measure servers, until one is stopped."""
    for task in tasks:
        yield (done := measuring.measured(*task))
        if done.stopped:
            return
