"""Virtual time: the server's own scheduler without its thread, its clock and its tensors.

Knows no torch, no HTTP and no clock. `drive` serves inferences by one scheduler;
`simulate.server.SimulatedServer` serves a client's trace by one or more replicas. Both run a
`Loop`.

program        ./simulate.sh
simulation     its comparison in virtual time, shared by processes (jobs)
server         a server or several, which serve a client's trace
loop           events in order, in picoseconds
replica, jump  a scheduler and the time that its engine takes; equal iterations, computed at once
asynchronous   the next iteration, planned while one is computed
occupancy      how full batches and caches are over time
fleet          replicas behind a router, as flags say (layouts)
disaggregated  prefill replicas, and decode replicas
costs          how long an iteration takes: as fitted (fitting) to a server (measure_costs), stated,
               or estimated (roofline)
vllm           one's own vLLM: settings, costs and traffic of a recording, and what it foresees
replay         a server's recording, made once more
find           the best setting: the search of --find, of all combinations (space), by their
               trials; its report (find_page), and the best one on real servers (verify)
saved_page     the rows of a saved run, or of a recording, as a page
playground     scheduler and simulator in a browser
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from config import environment  # noqa: F401 - where a package is missing
from scheduling.inference import Drafter, Iteration
from scheduling.scheduler import Scheduler
from simulate.costs import CostFunction
from simulate.loop import PS, Arrival, Loop, instant, seconds
from simulate.replica import SimulatedReplica, any_ids, ignore

__all__ = ["PS", "Arrival", "Loop", "SimulatedReplica", "any_ids", "drive", "instant", "seconds"]


def drive(
    scheduler: Scheduler,
    arrivals: Iterable[Arrival],
    cost_s: Callable[[Iteration], float],
    generate: Callable[[Iteration], Iterable[int]] = any_ids,
    planned: Callable[[float, Iteration], None] = ignore,
    drafter: Drafter | None = None,
) -> float:
    """Serve groups of inferences by one scheduler, an iteration at a time, and return when all have
    ended.

    arrivals: (seconds, group), by time, drawn as they come. cost_s: seconds of an iteration.
    planned: called with the time and each iteration before it is computed. The inferences have
    their stamps and tokens afterwards, and those of a refused group the refusal as `error`. Raises
    RuntimeError if work is left that no event continues.
    """
    loop, costs = Loop(), CostFunction("given", {}, cost_s=cost_s)
    replica = SimulatedReplica(loop, scheduler, costs, generate, drafter, planned)
    return loop.serve(arrivals, replica)
