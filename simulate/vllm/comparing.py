"""A comparison of one's own server, as it was recorded, with what it could be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from client.load import Watch
from client.measure import measure
from client.results import Json
from client.traces import Request
from client.workloads import Workload
from compare.comparison import Measured
from compare.report.sections import NEAR_KEYS, number
from simulate.costs import save
from simulate.fleet import Layout
from simulate.server import SimulatedServer
from simulate.simulation import Simulating
from simulate.vllm.foreseen import OwnServer
from simulate.vllm.given import RECORDED

# factors of the costs, by which one sees how near to saturation a prediction lies: there small
# errors of costs become large ones of latency
CHANGED = (0.95, 1.05)
DRAWN = (
    "The recorded requests are replaced: what no flag of the workload names, arrivals and lengths "
    "too, is as without --vllm."
)


class ComparingOwn(Simulating):
    """First the recorded settings with the recorded requests, beside what was measured; then all
    variants. The first seed has the requests as they came and the costs as fitted; others draw the
    minutes of both.
    """

    def first_of_workload(self, arrival: str | None) -> Request:
        self._seed = self.options.seed
        self._recorded: Json | None = None  # and how well it is foreseen
        if not self.options.replays:
            return super().first_of_workload(arrival)
        where = f"as in {self._own.recording.path}"
        self.workload = {"lengths": where, "arrival": arrival or where}
        self.arrival = arrival or where
        for seed in reversed(self.seeds):
            _, requests = self.traffic(seed)
            self.options.bounds.check(len(requests))
        first: Request = requests[0]
        return first

    @property
    def _own(self) -> OwnServer:
        assert self.options.own is not None
        return self.options.own

    def traffic(self, seed: int) -> tuple[Workload, Sequence[Request]]:
        if not self.options.replays:
            return super().traffic(seed)
        trace = self._own.traffic.trace(seed - self.options.seed)
        if self.options.arrival != "auto":
            trace = trace.sent_as(self.options.arrival, seed)
        return Workload(seed=seed), trace

    def saves(self, requests: Sequence[Request]) -> bool:
        return not self.options.replays and super().saves(requests)

    def prepare(self) -> None:
        super().prepare()
        own = self._own
        if self.options.costs_file:
            save(own.costs, self.options.costs_file)
        server = SimulatedServer(RECORDED, own.config, own.costs, stream=True)
        with self.progress.step("simulating what was recorded"):
            result, _ = measure(server, own.traffic.trace(0), {}, math.inf, Watch())
            self._recorded = recorded = own.facts(result)
        self.progress.say(f"{'':28}{'recorded':>12}{'simulated':>12}")
        for words, *two in recorded["table"]:
            self.progress.say(f"{words:28}" + "".join(f"{number(value):>12}" for value in two))
        for remark in recorded["remarks"]:
            self.progress.say(remark)
        if not self.options.replays:
            self.progress.say(DRAWN)

    def measured(self, seed: int, name: str) -> Measured:
        self._seed = seed
        done = super().measured(seed, name)
        if done.result and seed == self.options.seed:
            _, requests = self.traffic(seed)
            changed = {}
            for factor in CHANGED:
                server = self._server(name, self.options.layout, factor)
                bounds = self.options.bounds
                result, _ = measure(server, requests, {}, math.inf, Watch(), bounds)
                changed[f"{factor:g}"] = result.json(NEAR_KEYS)
            done.result = replace(done.result, costs_changed=changed)
        return done

    def _server(self, name: str, layout: Layout, factor: float = 1.0) -> SimulatedServer:
        config, own, options = self.options.config(name), self._own, self.options
        costs = options.costs.scaled(factor * own.factor(self._seed - options.seed))
        jump = own.can_jump(config)
        return SimulatedServer(name, config, costs, layout, stream=True, jump=jump)

    def facts(self) -> Json:
        facts = super().facts()
        return {**facts, "simulated": {**facts["simulated"], "recorded": self._recorded}}
