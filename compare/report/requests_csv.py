"""requests.csv of a run: a row for each request of each variant and seed, for other programs.

Columns of measures have the report's names and definitions; stamps are seconds since the replay
began. What a request does not have is empty: one that failed has its `error`. A text that a
spreadsheet would compute has a ' before it.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from typing import Any

from client.results import Json
from client.runs import REQUESTS, SavedRun
from client.saving import written
from scheduling.latency import Times
from stats import MEASURES

AS_SAVED = {
    **{name: name for name in ("id", "user", "priority", "slo_class")},
    **{"requested_tokens": "num_tokens", "prompt_tokens": "prompt_tokens"},
    **{"completion_tokens": "completion_tokens", "scheduled_at_s": "scheduled_at"},
    **{f"{stamp}_s": stamp for stamp in ("sent_at", "first_token_at", "last_token_at", "ended_at")},
}
OF_CLIENT = ("first_token_at", "last_token_at", "answered_at", "completion_tokens")
FORMULA = {*"=+-@\t\r"}
SHOWN = [m for m in MEASURES.values() if not m.pooled and (m.in_results or m.in_timings)]


def write(run: SavedRun) -> None:
    """Write the requests of all seeds that the report counts."""
    with written(run.folder / REQUESTS) as file:
        writer = csv.writer(file)
        writer.writerow(("variant", "seed", "warm_up", *AS_SAVED, *(m.key for m in SHOWN), "error"))
        for summary, results in zip(run.summaries, run.results):
            for name, result in results.items():
                for request in result.requests:
                    warm_up = "true" if request.get("warm_up") else "false"
                    row = map(_cell, _row(request))
                    writer.writerow((_cell(name), summary["seed"], warm_up, *row))


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in FORMULA else value


def _row(request: Json) -> Iterator[Any]:
    yield from (request.get(name) for name in AS_SAVED.values())
    timings, times = request.get("timings") or {}, None
    if "text" in request:  # it was answered
        first, last, *rest = (request[name] for name in OF_CLIENT)
        seen = (math.nan, math.nan) if first is None else (first, last)
        times = Times(request["sent_at"], math.nan, *seen, *rest)
    for measure in SHOWN:
        at_client = measure.of(times) if times else math.nan
        seconds = timings.get(measure.field, math.nan) if measure.by_server else at_client
        size = round(seconds * 1e3, 3) if measure.in_results else round(seconds, 6)
        yield None if math.isnan(size) else size
    yield request.get("error")
