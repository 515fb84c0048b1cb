"""Whether virtual time tells the truth: a case of each part by real servers, beside the same traces
in virtual time.

    python -m studies.orders.live [--part orders|batches|fair|urgent] [--seeds 3] [--out DIR]

Each run has a server of its own, whose fake engine sleeps what virtual time charges, and a real
client. Traces and measures are the parts' own; the stamps are the server's. What virtual time does
not charge, and a live server takes: planning, HTTP, and that a sleep ends late. How much that is of
an iteration is measured, and virtual time is tried with that charged, too.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from client.calls import ServerError, get, post
from client.load import replay
from client.outcomes import REFUSED, Outcome
from client.traces import Request
from compare.analysis import difference
from compare.measure import stats_of
from compare.report.tables import formatted, markdown
from compare.servers import server
from generate.fake import ITERATION_S, PREFILL_TOKEN_S, ROW_S
from scheduling.errors import ServingError
from scheduling.inference import Inference, Iteration, IterationRecord, Row, State
from studies.orders import batches, fair, orders, urgent
from studies.orders.tools import OF_ALL, Observer, Part, Settings, serve, unobserved
from studies.runner import Case, Cases, Study, shown, times, values, write

STUDY = Study("studies.orders.live", "live", "Virtual time beside real servers", "")
SIDES = ("live", "virtual", "charged")
TIMEOUT_S = 300.0  # of a request
# inferences as they were served and the server's iterations: what an observer is told of a run
Records = Callable[[Sequence[Inference], Sequence[Sequence[float]]], Iterable[IterationRecord]]


def of_rows(
    inferences: Sequence[Inference], iterations: Sequence[Sequence[float]]
) -> Iterator[IterationRecord]:
    """Each iteration with as many live and idle rows as there were, and what follows until another
    one can begin.
    """
    between_s = between(iterations)
    for began, seconds, live, idle, *_ in iterations:
        rows = [
            Row(inferences[0], 0, 1, [], samples=True, idle=k >= live)
            for k in range(int(live + idle))
        ]
        yield IterationRecord(began, seconds + between_s, Iteration(rows, len(rows), 0, 0))


def of_tokens(
    inferences: Sequence[Inference], iterations: Sequence[Sequence[float]]
) -> Iterator[IterationRecord]:
    """An instant for each token, in which whoever has it computed it; with the first its prompt."""
    tokens = ((at, k, i) for i in inferences for k, at in enumerate(i.token_times))
    for at, k, i in sorted(tokens, key=lambda token: token[0]):
        n = len(i.prompt_ids)
        start, computed = (n + k - 1, 1) if k else (0, n)
        row = Row(i, start, computed, [], samples=True, idle=False)
        yield IterationRecord(at, 0.0, Iteration([row], 1, 0, 0))


class Live:
    """Serves a trace by a real server, for as long as it takes: a `Serve`."""

    def __init__(self, records: Records):
        self._records = records
        # of the last server, as it tells it, and how much longer an iteration was than is charged
        self.config: dict[str, Any] = {}
        self.beyond_s = 0.0

    def __call__(
        self,
        mode: str,
        settings: Settings,
        requests: Sequence[Request],
        inferences: Sequence[Inference],
        observed: Observer = unobserved,
    ) -> float:
        """Raises ServerError if any request fails, unless it is refused."""
        sent = [as_sent(k, *each) for k, each in enumerate(zip(requests, inferences))]
        with server(mode, OF_ALL | settings) as url:
            post(f"{url}/stats/reset")
            outcomes = replay(url, sent, timeout_s=TIMEOUT_S)
            self.config, (stats, iterations) = get(url)["config"], stats_of(url)
        answers = [outcome.answer for outcome in outcomes if outcome.answer]
        # the trace's start on the server's clock: nobody arrived before being sent
        began = min(a.timings["arrived_at"] - a.sent_at for a in answers if a.timings)
        for inference, outcome in zip(inferences, outcomes):
            stamp(inference, outcome, began)
        self.beyond_s = beyond(stats, iterations)
        for record in self._records(inferences, iterations):
            observed(record)
        return max(i.answered_at for i in inferences if i.answered_at is not None)


def between(iterations: Sequence[Sequence[float]]) -> float:
    """Seconds from the end of an iteration to the next: the median, since some wait for work."""
    return statistics.median(
        after - began - seconds
        for (began, seconds, *_), (after, *_) in itertools.pairwise(iterations)
    )


def beyond(stats: Mapping[str, Any], iterations: Sequence[Sequence[float]]) -> float:
    """How many seconds longer an iteration was than the fake engine's cost, with what follows."""
    took_s = sum(seconds for _, seconds, *_ in iterations)
    n_rows = sum(sum(rows) for _, _, *rows in iterations)
    prefill = stats["total_input_tokens"] + stats["recomputed_tokens"]
    cost_s = ITERATION_S * len(iterations) + ROW_S * n_rows + PREFILL_TOKEN_S * prefill
    return (took_s - cost_s) / len(iterations) + between(iterations)


def as_sent(k: int, request: Request, inference: Inference) -> Request:
    """The k-th request, as whom and as urgent as it is served in virtual time."""
    own = {"user": inference.user, "priority": inference.priority or None}
    return request.model_copy(update={"id": k, "seed": inference.sampling.seed, **own})


def stamp(inference: Inference, outcome: Outcome, began: float) -> None:
    """Give an inference what became of it at the server, in seconds since `began`."""
    if outcome.answer is None:
        if not outcome.error.startswith(REFUSED):
            raise ServerError(f"request {outcome.request.id} failed: {outcome.error}")
        inference.error = ServingError(outcome.error)
        return
    timings = outcome.answer.timings
    assert timings is not None, "a server of ours tells them"
    arrived_at = inference.arrived_at = timings["arrived_at"] - began
    inference.admitted_at = arrived_at + timings["queue_s"]
    gaps = itertools.accumulate(timings["itl_s"], initial=timings["ttft_s"])
    inference.token_times = [arrived_at + s for s in gaps]
    inference.tokens = [0] * outcome.answer.completion_tokens
    inference.answered_at = arrived_at + timings["e2e_s"]
    inference.state = State.FINISHED


class Check(NamedTuple):
    """A case of a part: its variants, the first of which the others are compared with."""

    part: Part
    place: str  # the case in words
    requests: int  # of a trace
    cases: Callable[[int], list[dict[str, Any]]]  # for so many requests
    measures: dict[str, tuple[str, str]]  # heading, format
    records: Records = of_rows


def each(variants: Iterable[str], /, **case: Any) -> list[dict[str, Any]]:
    return [case | {"variant": variant} for variant in variants]


def of_fair(n: int) -> list[dict[str, Any]]:
    """A minute's limits would not be reached; these are half of what the run can complete."""
    limits_s = n / fair.capacity().requests
    return each(fair.LOOKS, trace="modest", limits_s=limits_s)


def chosen(measures: dict[str, tuple[str, str]], *names: str) -> dict[str, tuple[str, str]]:
    return {name: measures[name] for name in names}


CHECKS = {
    "orders": Check(
        orders.PART,
        "8 rows, load 1.2",
        300,
        lambda n: each(("fcfs", "sjf", "srpt", "mlfq"), table="grid", rows=8, of=8, load=1.2),
        chosen(orders.SHOWN, "mean_s", "p99_s", "shortest_s", "longest_s", "throughput"),
    ),
    "batches": Check(
        batches.PART,
        "8 rows",
        300,
        lambda n: each(("static", "static, sjf", "multibin, 4 bins", "dynamic"), rows=8),
        {"useful": ("useful rows, %", "{:.1f}"), "throughput": ("tok/s", "{:,.0f}")},
    ),
    "fair": Check(
        fair.PART,
        "`modest`; a limit is half of what the run can complete",
        900,
        of_fair,
        chosen(fair.SHOWN, "greedy", "other", "refused", "mean_s", "apart"),
        of_tokens,
    ),
    "urgent": Check(
        urgent.PART,
        "load 1.2",
        200,
        lambda n: each(("fcfs", "priority", "priority, demand"), load=1.2),
        chosen(urgent.SHOWN, "urgent_s", "others_s", "wait_s", "throughput"),
    ),
}


def checked(check: Check, seeds: int, n: int) -> list[dict[str, Any]]:
    """Of each variant what every seed's trace came to: live, and in virtual time."""
    live = Live(check.records)
    found = []
    for case in check.cases(n):
        sides: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
        for seed in range(seeds):
            measured = check.part.serve(case, n, seed, live)
            as_long = functools.partial(serve, beyond_s=live.beyond_s)
            sides["live"].append(measured | {"beyond_ms": 1e3 * live.beyond_s})
            sides["virtual"].append(check.part.serve(case, n, seed))
            sides["charged"].append(check.part.serve(case, n, seed, as_long))
        found.append(case | sides | {"config": live.config})
        print(f"{check.part.study.name}, {case['variant']}: {seeds} × {n} requests", flush=True)
    return found


def side(case: Case, name: str) -> Case:
    """One of SIDES alone."""
    return {"seeds": case[name]}


def more(base: Case, case: Case, measure: str, form: str) -> str:
    """The paired difference case − base."""
    gap = difference(values(base, measure), values(case, measure))
    return ("+" if gap.mean > 0 else "") + formatted(gap, form)


def ratio(base: Case, case: Case, measure: str) -> str:
    return formatted(times(base, case, measure), "{:.2f}") if all(values(base, measure)) else "–"


def table(check: Check, found: Cases) -> str:
    """Both sides of each measure, and of each ratio to the first variant."""
    base = found[0]
    rows = [
        [
            *("variant", "measure", "virtual", "live", "live − virtual"),
            *("live − virtual so charged", f"÷ {base['variant']}'s, virtual", "live"),
        ]
    ]
    for case in found:
        live, virtual, charged = (side(case, name) for name in SIDES)
        for measure, (heading, form) in check.measures.items():
            cells = [formatted(shown(each, measure), form) for each in (virtual, live)]
            cells += [more(each, live, measure, form) for each in (virtual, charged)]
            cells += [
                "–" if case is base else ratio(side(base, name), side(case, name), measure)
                for name in ("virtual", "live")
            ]
            rows.append([case["variant"], heading, *cells])
    longer = ", ".join(
        f"{formatted(shown(side(case, 'live'), 'beyond_ms'), '{:.2f}')} ({case['variant']})"
        for case in found
    )
    return (
        f"{markdown(rows, left=2)}\n\nAn iteration took longer than is charged by, ms: {longer}; "
        "`so charged`: with that in virtual time."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m {STUDY.module}", description="Whether virtual time tells the truth."
    )
    parser.add_argument("--part", choices=CHECKS, help="one of them (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="traces of each (default: 3)")
    defaults = ", ".join(f"{check.requests} {name}" for name, check in CHECKS.items())
    parser.add_argument("--requests", type=int, help=f"of a trace (default: {defaults})")
    parser.add_argument("--out", type=Path, default=Path("runs") / STUDY.name, help="folder")
    options = parser.parse_args()
    body, result = [], {}
    for name in [options.part] if options.part else CHECKS:
        check = CHECKS[name]
        n = options.requests or check.requests
        found = checked(check, options.seeds, n)
        told_of = f"{check.part.told_of.format(n=n)}; {check.place}."
        body.append(f"## {check.part.study.title}\n\n{told_of}\n\n{table(check, found)}")
        result[name] = {"requests": n, "cases": found}
    told_of = (
        f"{options.seeds} seeds, served in virtual time and by real servers whose fake engine "
        "sleeps what that charges; differences and ratios are paired by seed"
    )
    write(STUDY, options.out, told_of, "\n\n".join(body), None, result)


if __name__ == "__main__":
    main()
