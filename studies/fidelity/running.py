"""A task by a real server, and the same by a simulated one: the same client, the same numbers."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from client.load import Watch
from client.machine import ROOT, commit
from client.outcomes import Outcome
from client.traces import Request
from client.wire import Plain
from compare.measure import Measurable, Target, measure, stats_of, warm_up
from compare.servers import server
from config import Config
from simulate.costs import Costs
from simulate.simulated import Simulated
from studies.fidelity.tasks import PARTS, VARIANTS, Task, mean_tokens, of, trace

TIMEOUT_S = 600.0  # of a request
CLOCKS_S = 1e-6  # to which times are told
FIRST = 100  # iterations, in which a server may still be cold
# what a server and its client run; the rest of `client` reports, or runs in virtual time
SERVER = ("config", "front_door", "generate", "kernels", "observers", "routes", "scheduling")
SUFFIXES = (".py", ".cpp", ".h")
CLIENT = (
    "client/calls", "client/columns", "client/data", "client/draws", "client/groups", "client/load",
    "client/prompts", "client/users", "client/wire", "compare/analysis", "compare/measure",
    "compare/servers", "compare/summary",
)  # fmt: skip
Row = dict[str, Any]  # of the results file: what a task came to


class Rows:
    """The results file: a line for each task that is done, by the same code."""

    def __init__(self, path: Path):
        self._path, self._code = path, code()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rows: dict[Task, Row] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(line)
            if row["code"] == self._code:
                self._rows[of(row["task"])] = row

    def __contains__(self, task: Task) -> bool:
        return task in self._rows

    def __getitem__(self, task: Task) -> Row:
        return self._rows[task]

    def add(self, task: Task, row: Row) -> None:
        row = {"task": task.told(), "code": self._code} | row
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._rows[task] = row

    def rate(self, task: Task) -> float | None:
        """Requests a second: of the capacity of the case's first burst."""
        if task.load is None:
            return None
        burst = next(r for t, r in self._rows.items() if t.case == task.case and t.load is None)
        capacity = burst["busy_tokens"] / burst["busy_s"] / mean_tokens(task.case.kind)
        return float(f"{task.load * capacity:.4g}")


def code() -> str:
    """Of what servers and client run: other code gives other numbers."""
    digest = hashlib.sha256()
    files = [*ROOT.glob("*.py"), *(ROOT / f"{name}.py" for name in CLIENT)]
    for folder in SERVER:
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def serve(tasks: Sequence[Task], rows: Rows) -> Iterator[Task]:
    """Ask a fresh server the tasks, and add what each came to; a task is told before it begins.

    Raises ServerError, and KeyboardInterrupt.
    """
    case = tasks[0].case
    variant = VARIANTS[case.variant]
    flags = variant.flags | {"model": PARTS[case.part].model}
    with server(variant.mode, flags, name=case.variant) as url:
        target = Target(case.variant, url, Plain())
        warm_up(target)
        for task in tasks:
            yield task
            rate = rows.rate(task)
            # of one machine: the clocks of its processes are apart by as much
            epoch = max(time.time() - time.perf_counter() for _ in range(100))
            numbers = measured(target, trace(task, rate), lambda: stats_of(url)[1], epoch)
            made = {"commit": commit(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
            rows.add(task, made | {"rate": rate} | numbers)


def simulated(task: Task, row: Row, costs: Costs) -> Row:
    """What a simulated server comes to, with the settings and the blocks of the real one."""
    # each iteration is computed, so that each is told
    target = Simulated(task.case.variant, Config(**row["config"]), costs, jump=False)

    def iterations() -> list[list[float]]:
        found: list[list[float]] = []
        since: int | None = 0
        while since is not None:
            page = target.stats.iterations(since)
            found, since = found + page["iterations"], page["next_iteration"]
        return found

    return measured(target, trace(task, row["rate"]), iterations)


def measured(
    target: Measurable,
    requests: Sequence[Request],
    iterations: Callable[[], list[list[float]]],
    epoch: float = 0.0,
) -> Row:
    """What a trace comes to. iterations: what the server tells of them afterwards. epoch: by how
    much a request's times are on another clock than theirs.
    """
    result, outcomes = measure(target, requests, {}, TIMEOUT_S, Watch())
    if result["partial"]:
        raise KeyboardInterrupt
    engine, _, config = target.report()
    return {
        "config": config
        | ({"kv_cache": f"{engine['kv_blocks']}blocks"} if "kv_blocks" in engine else {}),
        "failed": result["failed"],
        "errors": result["errors"],
        "busy_s": result["busy_s"],
        "busy_tokens": (result["busy_throughput"] or 0.0) * result["busy_s"],
        **{name: engine[name] for name in ("preemptions", "recomputed_tokens", "cached_tokens")},
        **_of_answers(outcomes),
        **_of_iterations(np.array(iterations()), outcomes, epoch),
    }


def _of_answers(outcomes: Sequence[Outcome]) -> Row:
    """Latencies of each request as its client sees them, and what is lost outside the server."""
    answers = [outcome.answer for outcome in outcomes if outcome.answer]
    http = [a.e2e_s - a.timings["e2e_s"] for a in answers if a.timings]
    lag = [outcome.sent_at - outcome.scheduled_at for outcome in outcomes]
    tpot = [a.tpot_s for a in answers if a.completion_tokens > 1]
    return {
        "e2e_s": [round(a.e2e_s, 6) for a in answers],
        "ttft_s": [round(a.ttft_s, 6) for a in answers],
        "tpot_s": [round(s, 7) for s in tpot],
        "http_s": float(np.median(http)),
        "lag_s": float(np.percentile(lag, 99)),
    }


def _of_iterations(iterations: np.ndarray, outcomes: Sequence[Outcome], epoch: float) -> Row:
    """How long iterations take, and how long no iteration runs while a request is in flight."""
    timings = [o.answer.timings for o in outcomes if o.answer and o.answer.timings]
    arrived = np.sort([each["arrived_at"] - epoch for each in timings])
    answered = np.sort([each["arrived_at"] - epoch + each["e2e_s"] for each in timings])
    started, took, live = iterations[:, :3].T
    ended, following = started[:-1] + took[:-1], started[1:]
    # those who are answered between two iterations are so by the first
    come = np.searchsorted(arrived, ended, "right")
    left = come - np.searchsorted(answered, following - CLOCKS_S, "right")
    there = np.where(left > 0, ended, arrived[np.minimum(come, len(arrived) - 1)])
    return {
        "iterations": len(took),
        "iterations_s": float(took.sum()),
        "first_s": float(took[:FIRST].sum()),
        "first_later_s": float(sum(np.median(took[live == n]) for n in live[:FIRST])),
        "gaps_s": float(np.maximum(0.0, following - there).sum()),
        "rows": float(live.mean()),
    }
