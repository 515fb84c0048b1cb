"""Measures of one run on the client's side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from client.outcomes import Outcomes
from client.results import Distribution, Result
from client.traces import Limits
from stats import IN_RESULTS, MEASURES, distribution, throughputs

CLIENT_LIMITED_MS = 10.0  # a p99 schedule lag beyond this marks a run as limited by its client


def summarise(
    answers: Outcomes,
    sends: Sequence[tuple[float, float, float]] | np.ndarray,
    goodput: Limits,
    unsent: int = 0,
) -> Result:
    """Return the measures of one run on the client's side.

    sends: (scheduled, sent, ended) of every request that was sent, the failed ones too. goodput:
    limits of the answers. unsent: requests that failed before they could be sent.
    """
    scheduled, sent_at, ended = np.reshape(np.array(sends, float), (-1, 3)).T
    n = len(sent_at)
    start = float(sent_at.min()) if n else 0.0
    wall, span = (float(ended.max()) - start, float(sent_at.max()) - start) if n else (0.0, 0.0)
    prompt, completion = (int(answers[f"{each}_tokens"].sum()) for each in ("prompt", "completion"))
    numbers: dict[str, Any] = throughputs(len(answers), prompt, completion, wall)
    for measure in IN_RESULTS:
        seconds = answers.values(measure)
        numbers[measure.name] = distribution_of(seconds)
        if measure.from_start:
            numbers[f"{measure.name}_from_schedule"] = distribution_of(seconds + answers.lag_s)
    lag = distribution_of(sent_at - scheduled)
    return Result(
        completed=len(answers),
        failed=n + unsent - len(answers),
        wall_clock_s=wall,
        total_input_tokens=prompt,
        total_output_tokens=completion,
        schedule_lag=lag,
        client_limited=(lag.p99 or 0.0) > CLIENT_LIMITED_MS,
        achieved_rate=(n - 1) / span if span else None,
        latency_line=latency_line(answers["completion_tokens"], answers.e2e_s),
        **goodput_of(answers, goodput, n + unsent if n else 0, wall),
        **numbers,
    )


def distribution_of(seconds: np.ndarray) -> Distribution:
    return Distribution(*distribution("", seconds).values())


def client_behind(result: Result) -> bool:
    """True where the client sent most requests late, so that waits say nothing of the server."""
    return (result.schedule_lag.p50 or 0.0) > CLIENT_LIMITED_MS


def resent_in_words(servers: Mapping[str, Sequence[Result]]) -> str:
    """Return how many requests of each server were sent twice; empty if none was."""
    each = {name: sum(r.resent for r in seeds) for name, seeds in servers.items()}
    of, n = ", ".join(f"{k:,} of {name}" for name, k in each.items() if k), sum(each.values())
    return of and (
        f"{n:,} request{'s were' if n > 1 else ' was'} sent again on a fresh connection ({of}): "
        "the kept one was closed before an answer. Latencies count from the first sending."
    )


def goodput_of(answers: Outcomes, limits_ms: Limits, n: int, wall_clock_s: float) -> dict[str, Any]:
    """Return rate and share of n that meet all limits; None without limits or requests."""
    if not limits_ms or not n:
        return {"goodput": None, "attainment": None}
    good = int(meet(answers, limits_ms).sum())
    return {"goodput": good / wall_clock_s if wall_clock_s else 0.0, "attainment": good / n}


def meet(answers: Outcomes, limits_ms: Limits) -> np.ndarray:
    """Return which answers meet all limits, from the schedule: a late client helps no server."""
    good = np.ones(len(answers), bool)
    seen = ~np.isnan(answers.ttft_s)  # a measure that is not known meets no limit
    for name, limit in limits_ms.items():
        measure = MEASURES[name]
        seconds = answers.values(measure) + (answers.lag_s if measure.from_start else 0.0)
        good &= np.where(np.isnan(seconds), seen, seconds * 1e3 <= limit)
    return good


def latency_line(
    tokens: Sequence[int] | np.ndarray, seconds: Sequence[float] | np.ndarray
) -> dict[str, float] | None:
    """Least squares of latency on completion tokens; None where no line is defined."""
    x, y = np.array(tokens, float), np.array(seconds, float)
    if not x.size or x.min() == x.max():
        return None
    slope, intercept = np.polyfit(x, y, 1)
    r = float(np.corrcoef(x, y)[0, 1]) if y.std() > 0 else 0.0
    return {"intercept_s": float(intercept), "slope_s_per_token": float(slope), "r": r}


def line_text(line: Mapping[str, float] | None) -> str:
    """A least-squares line in words: "0.03 s + 7.8 ms per token, r = 0.92"."""
    if line is None:
        return "no line"
    slope = line["slope_s_per_token"] * 1e3
    sign, size = "−" if round(slope, 1) < 0 else "+", abs(slope)
    text = f"{line['intercept_s']:.2f} s {sign} {size:.1f} ms per token, r = {line['r']:.2f}"
    return text.replace("-", "−").replace("−0.00", "0.00")
