"""The speed of a recording's machine from minute to minute, for a replay that has it, too: so what
it is off by is the scheduler's, and not that of neighbours of the machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from client.load import Watch
from client.outcomes import Outcome, Outcomes
from client.traces import Request, Trace
from config.config import Config
from simulate.costs import Costs
from simulate.fitting import Observed, expected_s
from simulate.server import SimulatedServer
from simulate.vllm.costs import parts_of

FAR_S = 1e9


class Pace:
    """Time as it was, and as it would have passed had the machine always been as fast as the costs
    say: in each part of the recording by the time of its iterations ÷ what the costs say of them.
    """

    def __init__(self, seen: Sequence[Observed], costs: Costs, zero: float):
        """zero: the instant of the first arrival, from which times count."""
        at = np.array([each.started_at for each in seen])
        part_s = parts_of(at[0], at[-1])
        part = ((at - at[0]) // part_s).astype(int)
        spent = np.bincount(part, [each.whole for each in seen])
        expected = np.bincount(part, expected_s(costs, seen))
        factors = np.divide(spent, expected, out=np.ones_like(spent), where=expected > 0)
        edges = at[0] - zero + part_s * np.arange(len(factors) + 1)
        even = edges[0] + np.cumsum([0.0, *part_s / factors])
        far = np.array([-FAR_S, FAR_S])
        self._real = np.array([edges[0] + far[0], *edges, edges[-1] + far[1]])
        self._even = np.array([even[0] + far[0], *even, even[-1] + far[1]])

    def even(self, at: np.ndarray) -> np.ndarray:
        return np.interp(at, self._real, self._even)

    def real(self, at: np.ndarray) -> np.ndarray:
        return np.interp(at, self._even, self._real)

    def outcome(self, outcome: Outcome) -> Outcome:
        """Return an outcome of the even time in real time."""
        stamps = self.real(np.array([outcome.scheduled_at, outcome.sent_at, outcome.ended_at]))
        scheduled, sent, ended = stamps.tolist()
        first, last = outcome.first_token_at, outcome.last_token_at  # NaN stays NaN
        tokens = self.real(first + np.cumsum([0.0, *outcome.itl_s]))
        return replace(
            outcome, scheduled_at=scheduled, sent_at=sent, ended_at=ended,
            first_token_at=float(tokens[0]), itl_s=np.diff(tokens),
            last_token_at=float(self.real(np.array([last]))[0]),
        )  # fmt: skip


class PacedServer(SimulatedServer):
    """A simulated server whose machine is as fast at each time as the recorded one was."""

    def __init__(self, name: str, config: Config, costs: Costs, pace: Pace):
        super().__init__(name, config, costs, stream=True)
        self._pace = pace

    def replay(
        self, requests: Sequence[Request], timeout_s: float = math.inf, watch: Watch | None = None
    ) -> Outcomes:
        trace = Trace.of(requests)
        outcomes = super().replay(replace(trace, at=self._pace.even(trace.at)), timeout_s, watch)
        if outcomes.sample is not None:  # too many are not kept one by one
            return super().replay(trace, timeout_s, watch)
        return Outcomes.of(trace, map(self._pace.outcome, outcomes))
