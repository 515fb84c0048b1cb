"""Costs of a recording: lines through the times of its iterations, as of a server of ours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from client.machine import stamp
from client.results import Json
from client.runs import RunError
from config.config import Config
from simulate.costs import Costs, Line
from simulate.fitting import Observed, fit, residuals
from simulate.least_squares import OUTLIER
from simulate.loop import PS
from simulate.vllm.recording import LEAST_S, Recording

MOST_ROWS = 10**6  # rows of fitted iterations: a line needs no more
PART_S = 60.0  # the machine's speed changes by the minute; a short recording has
PARTS = 10  # parts at least, and as many that are not quiet
LEAST_PART_S = 1e-3
HELD_OUT = 5  # each so many-th part is held out of the fit
LEAST = 300  # iterations
BEYOND = 16  # times as many rows as were recorded have costs by their number


def parts_of(first: float, last: float) -> float:
    """Return the seconds of a part of a recording that lasts from first to last."""
    return min(PART_S, max(last - first, 1e-3) / PARTS)


def observed(recording: Recording) -> list[Observed]:
    """Read a recording to its end; return its iterations, or evenly chosen ones of many. Raises
    RunError.
    """
    size = recording.path.stat().st_size * (8 if recording.path.suffix == ".gz" else 1)
    every = max(1, round(size / 20 / MOST_ROWS))  # a row takes some 20 bytes
    result: list[Observed] = []
    before: Observed | None = None
    until = 0.0
    for k, (step, begin, iteration, answered) in enumerate(recording.run()):
        if before is not None:
            # no work was left if all that runs now has come since
            idle = all(row.inference.arrived_at > until for row in iteration.rows)
            result.append(replace(before, gap=None if idle else begin - until))
            before = None
        until = step.until
        if k % every == 0:
            before = Observed(iteration, begin, max(until - begin, LEAST_S), None, answered, False)
    if len(result) < LEAST:
        raise RunError(
            f"{recording.path} has {len(result)} iterations, and costs need {LEAST}; record vLLM "
            "under load for some minutes"
        )
    return result


def extended(decode: Mapping[int, Line]) -> dict[int, Line]:
    """Return lines also for fewer and more rows than were recorded: on the straight line from the
    fewest to the most, up to so many times as many.
    """
    lines = dict(decode)
    if len(lines) < 2:
        return lines
    few, most = min(lines), max(lines)
    slope = (lines[most].iteration - lines[few].iteration) // (most - few)
    lines[1] = lines.get(1) or _moved(lines[few], -slope * (few - 1))
    lines[BEYOND * most] = _moved(lines[most], slope * (BEYOND - 1) * most)
    return lines


def _moved(line: Line, by: int) -> Line:
    return replace(line, iteration=max(0, line.iteration + by))


def costs_of(recording: Recording, seen: Sequence[Observed], config: Config) -> Costs:
    """Return costs by iterations of `observed`, with residuals. config: as they were served."""
    head = recording.head
    at = np.array([each.started_at for each in seen])
    part_s, at = parts_of(at[0], at[-1]), at - at[0]
    # most of a recording may be quiet, and all of its load in one part
    while part_s > LEAST_PART_S and len(np.unique(at // part_s)) < PARTS:
        part_s /= 2
    parts = defaultdict[int, list[Observed]](list)
    for number, each in zip(np.unique(at // part_s, return_inverse=True)[1].tolist(), seen):
        parts[number].append(each)
    held_out = [part for k, part in parts.items() if k % HELD_OUT == HELD_OUT - 1]
    fitted = [part for k, part in parts.items() if k % HELD_OUT < HELD_OUT - 1]
    sizes = sorted({1, *head.graph_sizes, *(n + 1 for n in head.graph_sizes)})
    if not head.graph_sizes:
        sizes = sorted({m << k for k in range(20) for m in (2, 3)} | {1, head.max_num_seqs})
    costs = fit(recording.path.stem, [each for part in fitted for each in part], sizes, [])
    costs = replace(costs, decode=extended(costs.decode))
    calm = [
        [each for each in part if each.seconds * PS < OUTLIER * costs.of(each.iteration)]
        for part in parts.values()
    ]
    apart = residuals(costs, [part for part in calm if part])["of_runs_percent"]
    errors = {"fitted": residuals(costs, fitted)}
    if held_out:
        errors["held_out"] = residuals(costs, held_out)
    kept = errors.get("held_out", errors["fitted"])
    served = ", ".join(filter(None, (head.model, head.hardware)))
    source: Json = {
        **stamp(),
        "hardware": {"cpu": head.hardware or "unknown hardware"},
        "recording": f"a recording of {head.engine} ({served}; of its parts "
        f"of {part_s:.2g} s each fifth was held out of the fit, and took "
        f"{100 + kept['whole_percent']:.1f}% of the time that the costs say)",
        "engine": head.engine,
        "model": head.model,
        "dtype": head.dtype,
        "versions": head.versions,
        "residuals": errors,
        "parts_percent": apart,  # p5, p50 and p95 of the parts' time
        "config": config.model_dump(mode="json"),
    }
    queued = [
        asked.queued_at - asked.arrived_at
        for asked in recording.asked.values()
        if asked.queued_at is not None
    ]
    # an idle vLLM's: its scheduler takes what came once an iteration is over
    request = round(max(0.0, float(np.percentile(queued, 10))) * PS) if queued else 0
    return replace(costs, request=request, source=source)
