"""Measures of one run on the client's side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from client.outcomes import Answers
from stats import (
    IN_RESULTS,
    MEASURES,
    Answer,
    distribution,
    throughputs,
)

CLIENT_LIMITED_MS = 10.0  # a p99 schedule lag beyond this marks a run as limited by its client


def summarise(
    answers: Answers | Iterable[Answer],
    sends: Sequence[tuple[float, float, float]] | np.ndarray,
    goodput: Mapping[str, float],
    unsent: int = 0,
) -> dict[str, Any]:
    """Return the measures of one run on the client's side.

    sends: (scheduled, sent, ended) of every request that was sent, the failed ones too. goodput:
    limits in ms. unsent: requests that failed before they could be sent.
    """
    answers = Answers.of(answers)
    scheduled, sent_at, ended = np.reshape(np.array(sends, float), (-1, 3)).T
    n = len(sent_at)
    start = float(sent_at.min()) if n else 0.0
    wall, span = (float(ended.max()) - start, float(sent_at.max()) - start) if n else (0.0, 0.0)
    prompt, completion = (int(answers[f"{each}_tokens"].sum()) for each in ("prompt", "completion"))
    result: dict[str, Any] = {
        "completed": len(answers),
        "failed": n + unsent - len(answers),
        "wall_clock_s": wall,
    }
    result |= {"total_input_tokens": prompt, "total_output_tokens": completion}
    result |= throughputs(len(answers), prompt, completion, wall)
    good = int(meet(answers, goodput).sum())
    result["goodput"] = (good / wall if wall else 0.0) if goodput and n else None
    result["attainment"] = good / (n + unsent) if goodput and n else None
    for measure in IN_RESULTS:
        seconds = answers.values(measure)
        result |= distribution(measure.name, seconds)
        if measure.from_start:
            result |= distribution(f"{measure.name}_from_schedule", seconds + answers.lag_s)
    result |= distribution("schedule_lag", sent_at - scheduled)
    result["client_limited"] = (result["p99_schedule_lag_ms"] or 0.0) > CLIENT_LIMITED_MS
    result["achieved_rate"] = (n - 1) / span if span else None
    result["latency_line"] = latency_line(answers["completion_tokens"], answers.e2e_s)
    return result


def meet(answers: Answers, limits_ms: Mapping[str, float]) -> np.ndarray:
    """Return, for each answer, if it meets all limits, measured from the schedule: a late client
    must not make a server look better.
    """
    good = np.ones(len(answers), bool)
    for name, limit in limits_ms.items():
        measure = MEASURES[name]
        seconds = answers.values(measure) + (answers.lag_s if measure.from_start else 0.0)
        good &= np.nan_to_num(seconds) * 1e3 <= limit
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
