"""What several measurements say together: intervals over seeds, a queue that grows, and what theory expects of a run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

from stats import Answer

CONFIDENCE = 0.95
BLOCKS = 10
GROWTH = 0.05  # beyond it a queue only grows: each second of sending adds so many seconds of waiting
ATTAINMENT = 0.9  # of a rate's requests must meet the limits, as in DistServe (OSDI 2024)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds and half the width of its 95% t interval; no interval from one value."""

    mean: float
    half: float | None

    @property
    def shown(self) -> bool:
        """Whether the interval leaves out zero, so that a difference is more than chance."""
        return self.half is not None and abs(self.mean) > self.half


def estimate(values: Sequence[float]) -> Estimate:
    """Student's interval of the mean of independent values, one a seed."""
    n = len(values)
    if n < 2:
        return Estimate(float(np.mean(values)), None)
    quantile = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2))
    return Estimate(float(np.mean(values)), quantile * float(np.std(values, ddof=1)) / n**0.5)


def difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """second - first, paired: both ran each seed's trace, so what a trace does to both cancels."""
    return estimate([b - a for a, b in zip(first, second, strict=True)])


def growth(answers: Sequence[Answer]) -> float:
    """Seconds of waiting that each second of sending adds: the slope of TTFT on the instant of sending, less its error.

    It tends to rate / capacity - 1 where the rate is beyond the capacity, else to 0. Waits of neighbours are alike, so
    slope and error are of the means of ten blocks of requests.
    """
    ordered = sorted(answers, key=lambda answer: answer.sent_at)
    blocks = [block for block in np.array_split(np.arange(len(ordered)), BLOCKS) if len(block)]
    at = np.array([np.mean([ordered[i].sent_at for i in block]) for block in blocks])
    if len(blocks) < 3 or at.std() < 1e-3:
        return 0.0
    wait = np.array([np.mean([ordered[i].ttft_s for i in block]) for block in blocks])
    slope, intercept = np.polyfit(at, wait, 1)
    residuals = wait - slope * at - intercept
    error = float(np.sqrt(residuals.var() / (len(blocks) - 2))) / float(at.std())
    return max(0.0, float(slope) - error)


def batch_sizes(answers: Sequence[Answer]) -> list[int]:
    """Rows of each request-level batch: requests that the server admitted at the same instant."""
    admitted = np.sort([a.timings["arrived_at"] + a.timings["queue_s"] for a in answers if a.timings])
    starts = np.flatnonzero(np.diff(admitted, prepend=-np.inf) > 1e-4)
    return [int(n) for n in np.diff(starts, append=len(admitted))]


def expected_useful_fraction(lengths: Sequence[int], sizes: Sequence[int]) -> float | None:
    """Σ B · mean(g) / Σ B · E[max of B draws of g]: what request-level batches of these sizes use of their rows.

    lengths: the completion tokens g of the trace, in order of arrival, whose own distribution the draws are from. None where
    they are no draws: sorted lengths have batches of equals.
    """
    if not sizes or (len(set(lengths)) > 1 and list(lengths) == sorted(lengths, reverse=True)):
        return None
    values, counts = np.unique(lengths, return_counts=True)
    below = np.concatenate([[0.0], np.cumsum(counts) / len(lengths)])
    computed = sum(b * float(np.dot(values, np.diff(below**b))) for b in sizes)
    return sum(sizes) * float(np.mean(lengths)) / computed


def pollaczek_khinchine(rate: float, service_s: Sequence[float]) -> float:
    """Mean queue time in seconds of one server under Poisson arrivals: λ E[S²] / 2(1 - ρ). Raises ValueError for ρ >= 1."""
    service = np.array(service_s, float)
    if (load := rate * service.mean()) >= 1:
        raise ValueError(f"a load of {load:.2f} has no steady state; lower the rate")
    return float(rate * np.mean(service**2) / (2 * (1 - load)))


def littles_law(result: Mapping[str, Any]) -> dict[str, float] | None:
    """L, the mean of counts that this client took at random instants, and λ · W with the server's own mean latency W."""
    server = result.get("server")
    if not server or not server.get("mean_e2el_ms") or not result["mean_in_flight"] or result["failed"] or result["partial"]:
        return None
    rate_x_latency = result["request_throughput"] * server["mean_e2el_ms"] / 1e3
    return {"in_flight": result["mean_in_flight"], "rate_x_latency": rate_x_latency}


def identical_outputs(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """How many of the requests that every mode answered got the same text in each, and where the others part.

    `parted_after`: for each request whose texts differ, the fraction of its longest text that all modes share.
    """
    texts = [{r["id"]: r["text"] for r in result["requests"] if "text" in r} for result in results.values()]
    common = set.intersection(*(set(t) for t in texts)) if texts else set()
    answers = [[t[i] for t in texts] for i in sorted(common)]
    different = [answer for answer in answers if len(set(answer)) > 1]
    parted = [round(_shared(answer) / max(map(len, answer)), 4) for answer in different]
    return {"requests": len(answers), "identical": len(answers) - len(different), "parted_after": parted}


def _shared(texts: Sequence[str]) -> int:
    """Characters from the start that all texts share."""
    return next((i for i, letters in enumerate(zip(*texts)) if len(set(letters)) > 1), min(map(len, texts)))
