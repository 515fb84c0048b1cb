"""A comparison in virtual time: its options, and the servers that it makes."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from client.calls import ServerError
from client.measure import Measurable
from client.results import Json
from client.workloads import Workload
from compare.comparison import Comparison, Measured
from compare.options import Options
from config import (
    NOT_SIMULATED,
    Config,
    ConfigError,
    build,
    flag,
    from_environment,
    in_todays_names,
)
from generate.auto import resolve
from simulate.costs import FAKE, Costs
from simulate.fleet import Layout
from simulate.jobs import Jobs, Reporting, lost
from simulate.layouts import described
from simulate.server import SimulatedServer
from simulate.trial import Question

if TYPE_CHECKING:
    from simulate.vllm.foreseen import OwnServer

# settings of an engine, which belong to its costs
MODEL = ("model", "weights", "tokenizer", "dtype", "kv_dtype")
PARTS = ("generator", "attention", "linear", "kernels", "padded_prefill")
MACHINE = ("device", "threads", "fake_slowdown")
ENGINE = (*MODEL, *PARTS, *MACHINE)
FAKE_ENGINE = {"model": FAKE.name, "device": "cpu"}  # on every machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation(Options):
    """Options of simulate.sh."""

    costs: Costs
    layout: Layout
    jobs: int  # processes
    question: Question | None = None  # asked by --find
    find: Sequence[str] = ()  # its words
    verify: int | None = None  # real runs
    own: OwnServer | None = None  # given by --vllm
    replays: bool = False  # the requests that it served
    costs_file: Path | None = None  # given by --save-costs
    recording: str | None = None  # given by --replay

    @property
    def model(self) -> str:
        """The model that the costs are of."""
        return str(self.costs.source.get("model") or super(Simulation, self).model)

    def config(self, name: str) -> Config:
        """Return a variant's settings; the engine's are those of its costs. Raises ConfigError."""
        flags, costs = self.settings(name), self.costs
        measured: Json = costs.source.get("config", FAKE_ENGINE)
        # stated costs follow the slowdown
        engine = [setting for setting in ENGINE if costs.source or setting != "fake_slowdown"]
        for setting in flags:
            if setting in NOT_SIMULATED:
                raise ConfigError(f"{flag(setting)} has no effect in virtual time; leave it out")
            if setting in engine and str(flags[setting]) != str(measured.get(setting)):
                known = (
                    f"hold for {flag(setting)} {measured[setting]}"
                    if setting in measured
                    else f"do not depend on {flag(setting)}"
                )
                raise ConfigError(
                    f"{flag(setting)} {flags[setting]}: the costs {costs.name} {known}; leave it "
                    f"out, or name other --costs"
                )

        def fill_in(given: Mapping[str, Any]) -> dict[str, Any]:
            own = {name: value for name, value in given.items() if name not in engine}
            whole = {k: v for k, v in in_todays_names(measured).items() if k != "mode"}
            if self.own:
                whole |= {k: v for k, v in self.own.settings.items() if k not in engine}
            return whole | own if costs.source else resolve(whole | own)

        mode = self.variants[name].mode
        config = build(mode, flags, from_environment(os.environ), fill_in)
        if "kv_cache" in flags and not config.pool_is_known:
            raise ConfigError(
                f"--kv-cache {config.kv_cache} is a share of a GPU's memory, and none is here; "
                "give a size such as 40GB or 2048blocks"
            )
        if config.speculate and not config.forced_rates:
            raise ConfigError(
                f"--draft {config.draft} looks at texts, and virtual time has none; say how many "
                "draft tokens are accepted, as --draft acceptance:0.7 does"
            )
        return config


class Simulating(Comparison):
    """A comparison in virtual time."""

    program = "./simulate.sh"
    has_texts = False
    options: Simulation

    @contextlib.contextmanager
    def target(self, name: str) -> Iterator[Measurable]:
        yield self._server(name, self.options.layout)

    def alone(self, name: str) -> contextlib.AbstractContextManager[Measurable]:
        return contextlib.nullcontext(self._server(name, Layout()))

    @property
    def replicas(self) -> int:
        return self.options.layout.replicas

    @property
    def alike(self) -> int:
        return self.replicas

    def results(self) -> Generator[Measured]:
        if self.options.jobs == 1:
            yield from super().results()
            return
        elsewhere = copy.copy(self)
        elsewhere.progress, elsewhere.kept = Reporting(), {}
        elsewhere.done, elsewhere.keep = {}, None
        with self.progress.paused():
            workers = Jobs(self.options.jobs, self.progress)
        with workers as jobs, self.progress.step("simulating"):
            futures = [jobs.submit(_measured, elsewhere, *task) for task in self.tasks]
            for (_, name), future in zip(self.tasks, futures):
                try:
                    done, said = jobs.result(future) or (Measured(stopped=KeyboardInterrupt()), ())
                except BrokenProcessPool:
                    done, said = Measured(stopped=ServerError(lost())), ()
                for text in said:
                    self.progress.say(text)
                if self.options.sweep:
                    self.done[name] = done
                    self.show_sweep()
                yield done
                if isinstance(self.stopped, ServerError):  # as in one process
                    return

    def _workload(self, seed: int) -> Workload:
        """Return a workload that fits into the context: virtual time refuses no request."""
        return Workload(**self.options.workload, seed=seed, context=self.options.context)

    def _server(self, name: str, layout: Layout) -> SimulatedServer:
        options, config = self.options, self.options.config(name)
        return SimulatedServer(name, config, options.costs, layout, stream=options.stream)

    def facts(self) -> Json:
        costs, layout = self.options.costs, described(self.options.layout)
        known = ("hardware", "commit", "date", "estimate", "fidelity", "recording")
        fitted = {key: costs.source.get(key) for key in known}
        engine = {"engine": costs.source.get("config")}
        simulated = {"costs": costs.name, "costs_sha256": costs.sha256, "layout": layout}
        return {**super().facts(), "simulated": simulated | fitted | engine}


def _measured(comparison: Simulating, seed: int, name: str) -> tuple[Measured, Sequence[str]]:
    """Return a worker's measurement, and the lines that it has to print."""
    done = comparison.measured(seed, name)
    return done, comparison.progress.said if isinstance(comparison.progress, Reporting) else ()
