"""Ray Serve's rule for the number of replicas. Pure, and without a clock: the time is an argument.

The rule is that of Ray 2.60 with its default policy, of one handle that all requests pass:
`update_deployment_config` and `_get_metrics_report` in serve/_private/router.py (what is sampled
and reported), `_merge_and_aggregate_timeseries` in serve/_private/autoscaling_state.py (the mean),
`_core_replica_queue_length_policy`, `_apply_scaling_factors` and `_apply_delay_logic` in
serve/autoscaling_policy.py (the decision). Left out: scaling to 0 replicas, target_capacity.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any

from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass

CONTROL_INTERVAL_S = 0.1  # between decisions (Ray's CONTROL_LOOP_INTERVAL_S)
SAMPLES = 5  # in a look-back period (Ray's …_RECORD_INTERVAL_FACTOR, 0.2)
EPS_S = 1e-6  # that a sum of intervals may be off


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Delay = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Autoscaling:
    """Settings, with the names and the defaults of Ray Serve's AutoscalingConfig. Raises ValueError
    for invalid ones.
    """

    min_replicas: Annotated[int, Field(ge=1)] = 1
    max_replicas: int = 1
    target_ongoing_requests: Positive = 2.0  # at each replica, waiting ones included
    # tokens of prompts and completions that are not computed yet, at each replica; if given, they
    # count instead of requests
    target_tokens: Positive | None = None
    metrics_interval_s: Positive = 10.0  # between reports of the requests
    look_back_period_s: Positive = 30.0  # over which the requests are averaged
    upscale_delay_s: Delay = 30.0  # that more replicas must have been wanted
    downscale_delay_s: Delay = 600.0
    upscaling_factor: Positive = 1.0  # the part of a missing number that is added
    downscaling_factor: Positive = 1.0

    def __post_init__(self) -> None:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas must be at least min_replicas, {self.min_replicas}")

    @property
    def target(self) -> float:
        """Requests, or tokens, that each replica should have."""
        return self.target_ongoing_requests if self.target_tokens is None else self.target_tokens


def read_autoscaling(texts: Sequence[str]) -> Autoscaling:
    """Return the rule that ["max_replicas=8", …] describes. Raises ValueError."""
    given: dict[str, Any] = {
        name: value for name, _, value in (text.partition("=") for text in texts)
    }
    names = [each.name for each in fields(Autoscaling)]
    if unknown := [name for name in given if name not in names]:
        raise ValueError(f"--autoscale {unknown[0]!r}: name one of {', '.join(names)}")
    try:
        return Autoscaling(**given)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{name}: " for name in first["loc"])
        raise ValueError(f"--autoscale {where}{first['msg']}") from None


class Autoscaler:
    """State of the rule. target: replicas that there should be, those that start included."""

    def __init__(self, settings: Autoscaling, target: int | None = None):
        self.settings = settings
        self.target = settings.min_replicas if target is None else self._bounded(target)
        # (when, ongoing requests by replica), the oldest first; what was reported of them
        self._samples: deque[tuple[float, dict[int, int]]] = deque()
        self._report: list[tuple[float, dict[int, int]]] = []
        self._sample_at = self._report_at = -math.inf
        self._direction = 0  # that it has wanted to go, and since when
        self._since = 0.0

    def decide(self, now: float, ongoing: Mapping[int, int]) -> int:
        """Return the new target. Call it each CONTROL_INTERVAL_S.

        now: seconds. ongoing: of each replica that is up, neither starting nor about to stop, the
        requests that were sent there and are not answered; or their tokens, if those have a target.
        """
        self._observe(now, ongoing)
        if ongoing:
            self.target = self._bounded(self._delayed(now, self._wanted(now, ongoing.keys())))
        return self.target

    def _observe(self, now: float, up: Mapping[int, int]) -> None:
        """Sample and report, if it is time for either."""
        period, interval = self.settings.look_back_period_s, self.settings.metrics_interval_s
        if now + EPS_S >= self._sample_at:
            self._samples.append((now, dict(up)))
            self._sample_at = now + min(period / SAMPLES, interval)
        if now + EPS_S >= self._report_at:
            while self._samples[0][0] <= now - period:
                self._samples.popleft()
            self._report = list(self._samples)
            if new := up.keys() - self._samples[-1][1].keys():  # with what they have now
                self._report.append((now, self._samples[-1][1] | {id: up[id] for id in new}))
            self._report_at = now + interval

    def mean_ongoing(self, now: float, up: Collection[int]) -> float:
        """Return the last report's mean requests, once all were seen, continued until now."""
        seen = {id for _, counts in self._report for id in counts if id in up}
        if not seen:
            return 0.0
        start = max(next(at for at, counts in self._report if id in counts) for id in seen)
        report = [(at, counts) for at, counts in self._report if at >= start]
        times = [at for at, _ in report] + [max(now, report[-1][0] + 1e-3)]
        requests = [sum(counts.get(id, 0) for id in seen) for _, counts in report]
        least = min(requests)  # a constant number is its own mean to the last bit
        area = sum((n - least) * (end - at) for n, at, end in zip(requests, times, times[1:]))
        return least + area / (times[-1] - start)

    def _wanted(self, now: float, up: Collection[int]) -> int:
        """Return the replicas wanted for the requests ongoing, without delay."""
        running = len(up)
        # by way of the ratio, as Ray has it: now and then that is one more than without
        error = self.mean_ongoing(now, up) / (self.settings.target * running)
        missing = running * error - running
        rising = missing > 0
        factor = self.settings.upscaling_factor if rising else self.settings.downscaling_factor
        wanted = math.ceil(running + factor * missing)
        if wanted == running and math.ceil(running * error) < running:
            wanted -= 1  # a small factor would never get there
        return wanted

    def _delayed(self, now: float, wanted: int) -> int:
        """Return the target, which follows `wanted` once that has differed for long enough."""
        direction = (wanted > self.target) - (wanted < self.target)
        if direction != self._direction:
            self._direction, self._since = direction, now
        up = direction > 0
        delay_s = self.settings.upscale_delay_s if up else self.settings.downscale_delay_s
        if direction == 0 or now - self._since + EPS_S < delay_s:
            return self.target
        self._direction = 0
        return wanted

    def _bounded(self, replicas: int) -> int:
        return max(self.settings.min_replicas, min(self.settings.max_replicas, replicas))
