"""A comparison of one's own server, as it was recorded, with what it could be: first the recorded
settings with the recorded requests, beside what was measured; then all variants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from client.load import Watch
from client.measure import measure
from client.progress import Progress
from client.results import Json
from client.traces import Request, Trace
from client.workloads import Workload
from compare.report.foreseen import number
from simulate.costs import save
from simulate.server import SimulatedServer
from simulate.simulation import Simulation
from simulate.vllm.given import RECORDED

DRAWN = (
    "The recorded requests are replaced: what no flag of the workload names, arrivals and lengths "
    "too, is as without --vllm."
)


class RecordedTraces:
    """The recorded requests: as they came for the first seed; others draw their minutes."""

    waits_for_capacity = False

    def __init__(self, options: Simulation):
        assert options.own is not None
        self._options, self._traffic = options, options.own.traffic
        where = f"as in {options.own.recording.path}"
        self.arrival = where if options.arrival == "auto" else options.arrival
        self.words: Json = {"lengths": where, "arrival": self.arrival}
        for seed in options.seeds:
            options.bounds.check(len(self.requests(seed)))

    def workload(self, seed: int) -> Workload:
        return Workload(seed=seed)

    def requests(self, seed: int) -> Trace:
        trace, arrival = self._traffic.trace(seed - self._options.seed), self._options.arrival
        return trace if arrival == "auto" else trace.sent_as(arrival, seed)

    def saves(self, requests: Sequence[Request]) -> bool:
        return False


def foreseen(options: Simulation, progress: Progress) -> Json:
    """Simulate what was recorded; say and return how well it is foreseen."""
    own = options.own
    assert own is not None
    if options.costs_file:
        save(own.costs, options.costs_file)
    server = SimulatedServer(RECORDED, own.config, own.costs, stream=True)
    with progress.step("simulating what was recorded"):
        result, _ = measure(server, own.traffic.trace(0), {}, math.inf, Watch())
        facts = own.facts(result)
    progress.say(f"{'':28}{'recorded':>12}{'simulated':>12}")
    for words, *two in facts["table"]:
        progress.say(f"{words:28}" + "".join(f"{number(value):>12}" for value in two))
    for remark in facts["remarks"]:
        progress.say(remark)
    if not options.replays:
        progress.say(DRAWN)
    return facts
