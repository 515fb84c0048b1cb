"""Definitions of all numbers: time stamps in, measures out. Shared by server, client, simulator and
reports; pure.

A measure of a request is declared once, in MEASURES: /stats, the `timings` of an answer,
Prometheus and the client's results read it there; reports choose their columns. Seconds inside,
milliseconds in keys that end in `_ms`; keys follow vLLM's benchmark JSON where it has one.
Percentiles are linear (numpy, which is loaded where columns are computed: a page in a browser has
none).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from scheduling.latency import Times, parts_of, times_of

if TYPE_CHECKING:
    from scheduling.inference import Inference

ROW_KINDS = ("live", "idle", "padding", "recomputed", "rejected")  # kinds of computed rows


class Measure(NamedTuple):
    """A measure of a request that was answered, in seconds.

    name: in results, as in mean_NAME_ms and p99_NAME_ms. field: in the `timings` of an answer.
    of: its value from time stamps, those of one request or columns of many; NaN where it has none.
    formula, note: its definition. title: in figures and the client's table; heading: in reports.
    unit: in both of them, s or ms. metric: name of its Prometheus histogram.
    """

    name: str
    field: str
    of: Callable[[Any], Any]
    formula: str
    note: str = ""
    title: str = ""
    heading: str = ""
    unit: str = "s"
    metric: str = ""
    in_timings: bool = True
    in_results: bool = True  # its distribution, in /stats and at the client
    pooled: bool = False  # several values a request; their distribution is over all of them
    by_server: bool = False  # known to the server alone; the client reads it in `timings`
    from_start: bool = False  # results have it from the scheduled instant, too
    limited: bool = False  # --goodput may set a limit

    @property
    def key(self) -> str:
        """Its name in DEFINITIONS."""
        return f"{self.name}_ms" if self.in_results else self.field

    @property
    def formula_at_server(self) -> str:
        """Its formula for a server, where a request starts when it arrives."""
        return self.formula.replace("start", "arrival")


def _tpot_s(times: Any) -> Any:
    n, decode_s = times.completion_tokens, times.last_token_at - times.first_token_at
    if isinstance(n, int):  # a server computes it for every answer
        return decode_s / (n - 1) if n > 1 else math.nan
    import numpy as np

    return np.where(n > 1, decode_s / np.maximum(n - 1, 1), np.nan)


def gaps_s(times: Times) -> Any:
    """Return the seconds between a request's tokens, as an array."""
    import numpy as np

    made = np.array(times.token_times)
    return made[1:] - made[:-1]


MEASURES = {measure.name: measure for measure in (
    Measure(
        "queue_time", "queue_s", lambda t: t.admitted_at - t.started_at,
        "admitted - arrived", ", at the server", "queue time",
        metric="vllm:request_queue_time_seconds", by_server=True,
    ),
    Measure(
        "ttft", "ttft_s", lambda t: t.first_token_at - t.started_at,
        "first token - start",
        "; of a plain answer, at the client: e2el - (answered - first token, at the server)",
        "time to first token", "first token", "ms",
        metric="vllm:time_to_first_token_seconds", from_start=True, limited=True,
    ),
    Measure(
        "prefill_time", "prefill_s", lambda t: t.first_token_at - t.admitted_at,
        "first token - admitted", metric="vllm:request_prefill_time_seconds",
        in_timings=False, in_results=False, by_server=True,
    ),
    Measure(
        "decode_time", "decode_s", lambda t: t.last_token_at - t.first_token_at,
        "last token - first token", metric="vllm:request_decode_time_seconds", in_results=False,
    ),
    Measure(
        "tpot", "tpot_s", _tpot_s,
        "(last token - first token) / (n - 1)", ", for n >= 2 completion tokens",
        "time per output token", "TPOT", "ms",
        metric="vllm:request_time_per_output_token_seconds", in_timings=False, limited=True,
    ),
    Measure(
        "itl", "itl_s", gaps_s,
        "each gap between consecutive tokens",
        ", pooled over requests, of a sample where there is one; of a stream, between its events",
        "inter-token latency", "ITL", "ms",
        metric="vllm:inter_token_latency_seconds", pooled=True,
    ),
    Measure(
        "held_time", "held_s", lambda t: t.answered_at - t.last_token_at,
        "answered - last token", ": waiting for batch mates",
        metric="batching_request_held_time_seconds", by_server=True,
    ),
    Measure(
        "e2el", "e2e_s", lambda t: t.answered_at - t.started_at,
        "answer - start",
        "; start at the client: just before the request is sent; at the server: its arrival",
        "end-to-end latency", "latency",
        metric="vllm:e2e_request_latency_seconds", from_start=True, limited=True,
    ),
    Measure(
        "normalized_latency", "normalized_s",
        lambda t: (t.answered_at - t.started_at) / t.completion_tokens,
        "e2el / completion tokens", " (Orca)", "latency per token", "latency per token", "ms",
        in_timings=False,
    ),
    Measure(
        "preempted", "preempted_s", lambda t: t.preempted_s,
        "seconds that a request waited again",
        "; they lie inside ttft, decode time and gaps; of a run, those of all requests that ended",
        heading="preempted", in_results=False, by_server=True,
    ),
    Measure(
        "paused", "paused_s", lambda t: t.paused_s,
        "seconds that a request ran without being computed, its KV blocks kept",
        "; they lie inside ttft, decode time and gaps; of a run, those of all requests that ended",
        heading="paused", in_results=False, by_server=True,
    ),
)}  # fmt: skip
IN_RESULTS = [measure for measure in MEASURES.values() if measure.in_results]
TIMINGS = [m for m in MEASURES.values() if m.in_timings and not m.pooled]  # a number each
LIMITED = {name: measure for name, measure in MEASURES.items() if measure.limited}


def timings_of(inference: Inference, epoch_offset: float = 0.0) -> dict[str, Any]:
    """A FINISHED inference's `timings`, without its gaps. epoch_offset: seconds since the epoch −
    the manager's clock.
    """
    times = times_of(inference)
    return {
        "arrived_at": times.started_at + epoch_offset,
        **{measure.field: round(measure.of(times), 6) for measure in TIMINGS},
        "parts": parts_of(inference, times),
        "recomputed_tokens": inference.interruptions.recomputed_tokens,
        "draft_tokens": inference.drafts.verified,
        "accepted_tokens": inference.drafts.accepted,
    }


def times_from(timings: Mapping[str, Any], started_at: Any = 0.0) -> Times:
    """The instants behind `timings`, or columns of them, as if `timings_of` were inverted."""
    first = started_at + timings["ttft_s"]
    last, end = first + timings["decode_s"], started_at + timings["e2e_s"]
    return Times(started_at, started_at + timings["queue_s"], first, last, end)


_STATISTICS = ("mean", "std", "min", "max")
_PERCENTILES = (50, 90, 95, 99)


def distribution(name: str, seconds: Iterable[float]) -> dict[str, float | None]:
    """{"mean_NAME_ms": …, std, min, max, p50 …} of seconds, without NaN; None each if none
    are left.
    """
    import numpy as np

    values = seconds if isinstance(seconds, np.ndarray) else np.fromiter(seconds, float)
    values = values[~np.isnan(values)] * 1e3
    keys = [f"{each}_{name}_ms" for each in (*_STATISTICS, *(f"p{p}" for p in _PERCENTILES))]
    if not values.size:
        return dict.fromkeys(keys)
    result = [getattr(np, each)(values) for each in _STATISTICS]
    result += list(np.percentile(values, _PERCENTILES))
    return {key: round(float(value), 3) for key, value in zip(keys, result)}


def throughputs(
    requests: int, prompt_tokens: int, completion_tokens: int, wall_clock_s: float
) -> dict[str, float]:
    """The three throughputs of a run; zero for an empty one."""
    wall = wall_clock_s or float("inf")
    return {
        "request_throughput": requests / wall,
        "output_throughput": completion_tokens / wall,
        "total_token_throughput": (prompt_tokens + completion_tokens) / wall,
    }


DEFINITIONS = {
    **{m.key: m.formula + m.note for m in MEASURES.values() if m.in_results or m.in_timings},
    **{
        f"{m.name}_from_schedule_ms": f"{m.name} from the instant the request was to be sent"
        for m in MEASURES.values() if m.from_start
    },
    "sample": "number of requests in NAME.json, if more than 100,000 are simulated: of 20,000 "
    "drawn ones, those that ended; none if it has all",
    "request_throughput": "answered requests / wall-clock of the run",
    "output_throughput": "completion tokens / wall-clock of the run, tok/s",
    "total_token_throughput": "(prompt + completion tokens) / wall-clock of the run, tok/s",
    "wall_clock_s": "first send (at the server: first arrival) to the last ending, an answer's or "
    "a failure's",
    "goodput": "requests per second that meet every stated limit; failed and refused ones miss",
    "attainment": "share of all requests that meet every stated limit; goodput and it are measured "
    "from the schedule",
    "schedule_lag_ms": "sent - scheduled; its p99 over 10 ms marks a run client_limited; a later "
    "turn of a conversation is scheduled think_s after the answer before it",
    "requested_rate": "requests per second as scheduled: (n - 1) / (last - first); none in "
    "a closed loop and for conversations, where answers set the times",
    "achieved_rate": "requests per second as sent: (n - 1) / (last - first)",
    "offered_throughput": "completion tokens per second that a trace asks for: requested_rate * "
    "its mean_num_tokens",
    "nominal_num_tokens": "mean completion tokens of the distribution that a trace is drawn from",
    "index_of_dispersion": "variance / mean of arrivals in windows of ten mean gaps; 1 for Poisson",
    "mean_in_flight": "requests sent and not ended, counted at a random instant of each 50 ms from "
    "the first send to the last ending, averaged",
    "littles_law": "in_flight: mean_in_flight; rate_x_latency: request_throughput * mean e2el at "
    "the server; must be equal, but for a tenth, and for 5 ms a request and chance",
    "growth": "seconds that each second of sending adds to TTFT: least squares over ten blocks, "
    "less the slope's error; of conversations until the last begins; over 0.05 the server is "
    "overloaded (of fewer than 3,000 answers it must be more); 0 for a burst and a closed loop",
    "growth_in_flight": "part of what is sent that stays in flight: least squares over ten blocks "
    "once the rows could fill, less twice the slope's error; the rest as of growth",
    "cost_per_million_tokens": "price of a machine-hour (--price) * machine-hours / millions of "
    "completion tokens; a simulated replica is a machine, and real servers share one",
    "cost_per_thousand_within": "the same / thousands of requests that meet every stated limit",
    "busy_s": "the longest stretch from admission to admission in which requests were always "
    "waiting; in /stats: seconds of all iterations",
    "busy_throughput": "completion tokens made in that stretch / its seconds, tok/s",
    "capacity": "requests per second that a server completes while requests are always waiting: "
    "busy_throughput / nominal_num_tokens, over the busy_s of all rates of a sweep beyond it",
    "goodput_rate": "the highest sustained rate of a sweep at which 90% of requests meet every "
    "limit (DistServe's goodput); rates are 9% apart, and traces are scaled to them",
    "expected_useful_fraction": "of live and idle rows: sum of B * mean(g) / sum of B * E[max of B "
    "draws of g]; B: batch sizes, g: completion tokens of a request",
    "latency_line": "least squares of e2el on completion tokens: intercept (queueing), slope "
    "(service), r",
    "by_length": "requests by the completion tokens that they ask for: quartile 1 is the shortest "
    "quarter of the trace, 4 the longest; requests of equal length are in one quarter; up to four "
    "different lengths are a group each",
    "by_user": "requests by user; output_throughput: completion tokens of the user's answers / "
    "wall-clock of the run, so that users add up to the run's",
    "by_priority": "requests by level of priority, 1 the highest; 0: they name none",
    "by_class": "requests by `slo_class`; empty: they name none",
    "completed": "requests that were answered; in /stats: completions",
    "failed": "requests that ended with an error; in /stats: with an error of the engine",
    "cancelled": "requests that their clients gave up",
    "expired": "requests whose deadlines passed",
    "invalid": "requests that could not be read or never be served; not counted by user",
    "total_input_tokens": "prompt tokens of answered requests",
    "total_output_tokens": "completion tokens of answered requests",
    "refused": "of the failed (in /stats: beside them), those that were answered 429: the "
    "queue was full, their user beyond a limit, or their own limit out of reach",
    "mean_paused_ms": "mean of paused_s over answers; likewise mean_preempted_ms of preempted_s",
    "largest_batch": "most inferences admitted at once",
    "occupancy": "live rows, each once, / max_batch_size, weighted by iteration time",
    "useful_fraction": "live / computed rows of all kinds; a draft token is one, live or rejected",
    "draft_tokens": "guesses at next tokens that were verified (speculative decoding)",
    "accepted_tokens": "draft tokens that became completion tokens",
    "acceptance": "accepted_tokens / draft_tokens",
    "live_rows": "rows of requests in flight; each kind of rows is summed over iterations",
    "idle_rows": "rows of requests that are finished while their batch runs",
    "rejected_rows": "rows of draft tokens that were not accepted",
    "recomputed_rows": "rows that computed tokens once more, after a preemption",
    "recomputed_tokens": "tokens computed once more, after a preemption",
    "cached_tokens": "prompt tokens found in the prefix cache, and not computed again",
    "cached_fraction": "cached_tokens / prompt tokens, of answered requests",
    "preemptions": "times that a request gave its KV blocks up and waited again",
    "users": "measures of each `user`, under an empty name those of requests without one; of the "
    "first 32 names in a run, and of all later ones together as (others); completed, tokens and "
    "means are exact, p50 and p99 of the last 1,000 answers",
    "priorities": "the same of each priority; 0: none is named, or levels have no meaning",
    "adapters": "the same of each LoRA adapter",
    "adapter_loads": "times that a LoRA adapter was copied to a slot of the engine",
    "batches_formed": "times that requests were admitted, by reason",
    "latency-by-requested-tokens": "answered requests and their mean latency, by num_tokens",
    "kv_blocks": "KV blocks in the pool",
    "padding_rows": "rows that serve no request, to fill a decoder batch size; padded tokens",
    "latency-per-token": "mean of e2el / completion tokens, seconds",
    "throughput": "completion tokens / total-elapsed-time, tok/s",
    "total-tokens-handled": "completion tokens of answered requests",
    "total-elapsed-time": "first arrival to the last ending, an answer's or a failure's, seconds",
}  # fmt: skip
