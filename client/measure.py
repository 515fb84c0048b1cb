"""Measuring one server: warm it up, replay a trace, and join the client's measures with the
server's statistics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from pydantic import ConfigDict, ValidationError, create_model

from client import analysis
from client.bounds import UNBOUNDED, BoundedWatch, Bounds
from client.calls import NONE, ServerError, get, post
from client.groups import by_groups, describe
from client.load import Interrupted, Watch, replay
from client.outcomes import Outcome, Outcomes
from client.processes import number_for, replay_in
from client.results import ENGINE, OF_STATS, Json, Result
from client.summary import summarise
from client.traces import Request, Trace
from client.wire import Wire, utf8
from config.config import Config
from scheduling.policies import MODES, chosen

LEAST_BURST = 16
INVALID = ("400", "422")  # how the error of a request begins whose body a server does not take
BINS = 400  # bins of rows over time
# /stats, rows over time, and config
ServerReport = tuple[dict[str, Any], Json, Json]
# an iteration's start, seconds, and rows of each kind
IterationRow = tuple[float, float, int, int, int, int, int]
READ: dict[str, Any] = dict.fromkeys((*ENGINE, *OF_STATS), (int | float, ...))
READ |= {"iterations": (list[IterationRow], ...), "next_iteration": (int | None, ...)}
# what is read of /stats; the rest is kept as it is
Statistics = create_model("Statistics", __config__=ConfigDict(strict=True), **READ)


class Measurable(Protocol):
    """A server that serves a trace, real or simulated. ours: it reports what it did, besides what a
    client sees. are_several: servers that share the load.
    """

    @property
    def name(self) -> str: ...
    @property
    def ours(self) -> bool: ...
    @property
    def are_several(self) -> bool: ...

    def begin(self) -> None:
        """Reset all counts, and empty the prefix cache. Raises ServerError."""

    def replay(
        self, requests: Sequence[Request], timeout_s: float, watch: Watch
    ) -> Outcomes | list[Outcome]:
        """Serve a trace. Raises Interrupted on Ctrl-C."""

    def report(self) -> ServerReport:
        """/stats since it began, the rows over time, and the config. Raises ServerError."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure. ours: else only the client's measures are known. processes: which send
    the load; None for as many as it needs.
    """

    name: str
    url: str
    wire: Wire
    ours: bool = True
    key: str | None = field(default=None, repr=False)
    processes: int | None = None

    @property
    def are_several(self) -> bool:
        return False

    @property
    def servers(self) -> Sequence[str]:
        return (self.url,)

    def begin(self) -> None:
        for url in self.servers:
            post(f"{url}/reset_prefix_cache", key=self.key)
            post(f"{url}/stats/reset", key=self.key)

    def replay(self, requests: Sequence[Request], timeout_s: float, watch: Watch) -> list[Outcome]:
        how = self.url, requests, self.wire, timeout_s, watch, self.key
        n = self.processes or number_for(requests)
        return replay(*how) if n == 1 else replay_in(n, *how)

    def report(self) -> ServerReport:
        engine, iterations = stats_of(self.url, self.key)
        config = get(self.url, key=self.key)["config"]
        return engine, analysis.occupancy_over_time(iterations, BINS), config


def openai_model(url: str, key: str | None = None, secrets: Mapping[str, str] = NONE) -> str:
    """The first model that a server lists. secrets: more headers. Raises ServerError."""
    models = get(f"{url}/v1/models", key=key, secrets=secrets)
    try:
        return str(models["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ServerError(f"{url}/v1/models lists no model to ask for") from None


def warm_up(target: Target, by_ids: bool = False) -> None:
    """Send each server two short requests, as text or ids. Raises ServerError if one fails. One
    that is none of ours and refuses ids gets words in their place from then on.
    """
    text = "warm up"
    prompt: Json = {"prompt_ids": list(text.encode())} if by_ids else {"prompt": text}
    for url in target.servers:
        for seed in range(2):
            request = Request(id=seed, at=0, num_tokens=8, seed=seed, **prompt)
            [outcome] = replay(url, [request], target.wire, key=target.key)
            if by_ids and not target.ours and outcome.error.startswith(INVALID):
                target.wire.ids = False
                [outcome] = replay(url, [request], target.wire, key=target.key)
            if why := outcome.error:
                raise ServerError(f"{target.name} at {url} failed its first request: {why}")


def measure(
    target: Measurable,
    requests: Sequence[Request],
    goodput: dict[str, float],
    timeout_s: float,
    watch: Watch,
    bounds: Bounds = UNBOUNDED,
) -> tuple[Result, list[Outcome]]:
    """Replay a trace; return the result without its requests, and the outcomes. An interrupted
    result is `partial`, and one that reached a bound is `cut`: both have the requests that ended.

    A server of ours begins with all counts at zero and an empty prefix cache, so that no earlier
    trace helps.
    """
    if target.ours:
        target.begin()
    trace, stopped, counting = Trace.of(requests), False, BoundedWatch(watch, bounds)
    try:
        outcomes = target.replay(requests, timeout_s, counting)
    except Interrupted as interrupted:
        stopped, outcomes = True, interrupted.outcomes
    ended, first = Outcomes.of(trace, outcomes), bounds.warming_up(trace)
    counted = ended.without(first) if bounds.warm_up else ended
    cut = None
    if counting.cut and (left := len(trace) - len(ended.ended)):
        unsent = left - counting.in_flight
        cut = {"at": counting.cut, "in_flight": counting.in_flight, "unsent": unsent}
    result = replace(
        judged(trace, counted, goodput),
        variant=target.name,
        partial=stopped and not counting.cut,
        warm_up=len(first),
        cut=cut,
        mean_in_flight=counting.counted / counting.ticks if counting.ticks else None,
    )
    if target.are_several:  # no stretch when all were busy is known
        result = replace(result, busy_s=0.0, busy_throughput=None)
    if target.ours:
        try:
            result = _with_server(result, target, trace, ended.answers)
        except KeyboardInterrupt:
            result = replace(result, partial=True)
        except Exception as error:  # what this client measured is kept, whatever a server reports
            why = error if isinstance(error, ServerError) else repr(error)
            result.errors[utf8(f"the server's /stats are missing: {why}")] = 1
    early = set(trace.id[first].tolist())
    return result, [replace(o, warm_up=True) if o.request.id in early else o for o in ended]


def judged(
    requests: Sequence[Request],
    outcomes: Outcomes | Iterable[Outcome],
    goodput: Mapping[str, float],
) -> Result:
    """The measures that follow from outcomes alone, whichever server served; the rest is None."""
    trace = Trace.of(requests)
    outcomes = Outcomes.of(trace, outcomes)
    answers, rows = outcomes.answers, outcomes.ended
    sent = rows[rows["sent"]]
    sends = np.stack([sent[name] for name in ("scheduled_at", "sent_at", "ended_at")], axis=1)
    limits = trace.limits_ms(np.flatnonzero(outcomes["answered"]), goodput)
    result = summarise(answers, sends, limits, unsent=len(rows) - len(sent))
    workload = describe(trace)
    rate, mean = workload["requested_rate"], workload["mean_num_tokens"]
    # once no more conversations begin, the load only falls, and a queue with it
    until = outcomes["sent_at"][trace.firsts].max()
    # a burst, and a closed loop, come at no rate, and so at none beyond what a server can do
    has_rate = float(np.ptp(trace.at[trace.firsts]) > 0)
    sent = sent[sent["sent_at"] <= until]
    fill_s = analysis.slowest_row_s(answers)
    tokens, busy_s = analysis.always_waiting(answers)
    other_length = outcomes["completion_tokens"] != trace.num_tokens
    early = answers.only(answers["sent_at"] <= until)
    grew_in_flight = analysis.growth_in_flight(sent["sent_at"], sent["ended_at"], fill_s)
    return replace(
        result,
        resent=sum(outcome.resent for outcome in outcomes),
        sample=outcomes.sample,
        requested_rate=rate,
        mean_num_tokens=mean,
        offered_throughput=rate and rate * mean,
        growth=has_rate * analysis.growth(early),
        slowest_row_s=fill_s,
        growth_in_flight=has_rate * grew_in_flight,
        busy_s=busy_s,
        busy_throughput=tokens / busy_s if busy_s else None,
        other_length=int((other_length & outcomes["answered"]).sum()),
        errors=dict(outcomes.errors.most_common()),
        **by_groups(trace, outcomes, result.wall_clock_s, goodput),
    )


def stats_of(url: str, key: str | None = None) -> tuple[dict[str, Any], list[list[float]]]:
    """/stats of a server of ours, and a row for each of its iterations. Raises ServerError."""
    pages = [_stats_page(url, 0, key)]
    while (following := pages[-1].pop("next_iteration")) is not None:
        pages.append(_stats_page(url, following, key))
    iterations = [row for page in pages for row in page.pop("iterations")]
    return pages[0], iterations


def _stats_page(url: str, since: int, key: str | None) -> dict[str, Any]:
    page = get(f"{url}/stats?iterations=1&since={since}", 120, key)
    try:
        # as JSON, whose arrays are tuples though it is strict
        Statistics.model_validate_json(json.dumps(page))
    except ValidationError as error:
        first = error.errors()[0]
        raise ServerError(
            f"{url}/stats has another form than this client reads ({first['loc'][0]}: "
            f"{first['msg']}); use server and client of one commit"
        ) from None
    following = page["next_iteration"]
    if following is not None and following <= since:
        raise ServerError(f"{url}/stats names page {following} after page {since}")
    return page


def _with_server(result: Result, target: Measurable, trace: Trace, answers: Outcomes) -> Result:
    """Return a result with what a server of ours reports of the run. Raises ServerError, and
    ValueError for a report that cannot be saved.
    """
    engine, over_time, config = report = target.report()
    json.dumps(report, ensure_ascii=False, allow_nan=False).encode()
    engine.pop("definitions")
    prompt_tokens, drafts = engine["total_input_tokens"], engine["draft_tokens"]
    policy = MODES.get(config["mode"])  # none for that of a file, which this client has not loaded
    # two batches of several servers that begin at one instant would seem to be one
    by_chance = config["order"] == "fcfs" and not target.are_several
    whole = policy and policy.request_level and not config["compact_batches"]
    drawn = policy and policy.in_order and by_chance and whole
    sizes = analysis.batch_sizes(answers) if drawn else []
    known = replace(
        result,
        server=engine,
        config=config,
        cached_fraction=engine["cached_tokens"] / prompt_tokens if prompt_tokens else None,
        acceptance=engine["accepted_tokens"] / drafts if drafts else None,
        occupancy_over_time=over_time,
        expected_useful_fraction=analysis.expected_useful_fraction(trace.num_tokens, sizes),
        **{key: engine[key] for key in ENGINE},
    )
    of_others = result.cut or result.warm_up  # the server counts requests that no measure does
    return known if of_others else replace(known, littles_law=analysis.littles_law(known))


def with_requests(result: Result, outcomes: Iterable[Outcome]) -> Result:
    """Return a measurement with a record of every request."""
    return replace(result, requests=[*map(_record, outcomes)])


def _record(outcome: Outcome) -> Json:
    """Return one request of NAME.json, without the gaps between tokens."""
    record: dict[str, Any] = outcome.request.model_dump(
        include={"id", "num_tokens", "user", "priority", "slo_class"}, exclude_none=True
    )
    record |= {"warm_up": True} if outcome.warm_up else {}
    if outcome.sent:
        stamps = ("scheduled_at", "sent_at", "ended_at")
        record |= {name: getattr(outcome, name) for name in stamps}
    if outcome.error:
        return record | {"error": outcome.error}
    for name in ("first_token_at", "last_token_at"):
        record[name] = None if math.isnan(at := getattr(outcome, name)) else at
    timings = outcome.timings and {k: v for k, v in outcome.timings.items() if k != "itl_s"}
    return record | {
        "answered_at": outcome.ended_at,
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": outcome.completion_tokens,
        "timings": timings,
        "text": outcome.text,
    }


def burst_size(config: Config) -> int:
    """Return three requests a row, LEAST_BURST at least, as far as the server takes them."""
    rows = chosen(MODES, config.mode, config).max_rows(config.max_batch_size)
    return min(max(3 * rows, LEAST_BURST), config.max_in_flight)


def measure_capacity(
    target: Measurable, burst: Sequence[Request], timeout_s: float, watch: Watch
) -> dict[str, float]:
    """Measure the tokens per second of busy rows. Raises ServerError and KeyboardInterrupt."""
    result, outcomes = measure(target, burst, {}, timeout_s, watch)
    if result.partial:
        raise KeyboardInterrupt
    tokens, seconds = analysis.always_waiting(Outcomes.of(Trace.of(burst), outcomes).answers)
    wrong = None if seconds else "fits into one batch"
    if result.failed:
        wrong = f"failed ({next(iter(result.errors))})"
    if wrong:
        raise ServerError(
            f"the burst that measures capacity {wrong}; name a rate with --arrival poisson:RATE"
        )
    return {"output_throughput": tokens / seconds, "requests": len(burst)}
