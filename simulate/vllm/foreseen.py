"""One's own vLLM in virtual time: what `./simulate.sh --vllm FILE` replays, and how well that
foresees what was measured.
"""

from __future__ import annotations

import functools
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from client.analysis import overload
from client.measure import judged
from client.results import Json, Result
from client.runs import RunError, is_run, load
from client.summary import distribution_of
from compare import foreign
from config.config import Config
from generate.auto import build
from scheduling.policies import ORDERS
from scheduling.user_policies import SOURCES
from simulate.costs import Costs
from simulate.loop import PS
from simulate.vllm.agreement import agreement
from simulate.vllm.costs import costs_of, observed
from simulate.vllm.pace import Pace
from simulate.vllm.recording import Head, Recording, read
from simulate.vllm.traffic import Traffic

SHOWN = {  # measures, in words
    "output_throughput": "throughput, tok/s",
    **{f"{each}_ttft_ms": f"TTFT {each}, ms" for each in ("mean", "p50", "p99")},
    **{f"{each}_itl_ms": f"ITL {each}, ms" for each in ("mean", "p50", "p99")},
    **{f"{each}_e2el_ms": f"latency {each}, ms" for each in ("mean", "p50", "p99")},
    "rows": "rows, mean",
    "preemptions": "preemptions",
    "cached_fraction": "prompt tokens found cached",
}
JUDGED = [key for key in SHOWN if key.endswith("_ms") or key == "output_throughput"]
RANGED = ("output_throughput", "mean_ttft_ms", "mean_e2el_ms", "p99_e2el_ms")
MOVES = 5  # percent by which parts of a recording may be apart, as if the machine were steady
NOT_SIMULATED = {  # settings of vLLM and their defaults
    "long_prefill_token_threshold": 0,
    "max_num_partial_prefills": 1,
    "prefill_schedule_interval": 1,
    "enable_chunked_prefill": True,
    "scheduler_reserve_full_isl": True,
}
UNCOUNTED = (
    "How far our scheduler agrees cannot be counted: vLLM planned iterations ahead, or the file "
    "begins in the middle of its traffic."
)
AT_CLIENT = "Times are the client's, and those of HTTP are simulated, too."
AT_VLLM = (
    "Times begin when a request reaches vLLM, and end with its last token there. HTTP is in "
    "neither column; a client's saved run of the same requests adds it: --with RUN."
)
OF_STALLS = "% of the iterations took more than twice the time that the costs say"
LEFT_OUT = "; they began before the file, got no token, or failed"
APART_S = 1.0  # by which arrivals at vLLM may lag behind a client's clock in different ways
ALIKE = 0.9  # part of a client's requests that must have the recorded number of tokens


def settings_of(head: Head, longest: int, levels: int) -> dict[str, Any]:
    """Return the settings of a server of ours that schedules as the recorded one did. longest: of
    its requests, in tokens; levels: of priority.
    """
    settings: dict[str, Any] = {
        "model": "fake",
        "device": "cpu",
        "max_batch_size": head.max_num_active_seqs or head.max_num_seqs,
        "token_budget": head.max_num_batched_tokens,
        "max_model_len": head.max_model_len or longest,
        "kv_cache": f"{head.num_blocks}blocks",
        "block_size": head.block_size,
        "max_waiting": 10**9,
        "kv_reservation": "demand",
        "budget_counts": "all",
        "row_order": "joined",
        "watermark": head.watermark,
        "prefix_caching": head.prefix_caching,
    }
    if head.policy == "priority":
        minor = re.match(r"vLLM 0\.(\d+)\.", head.engine)
        ends = minor and int(minor[1]) <= 32
        settings |= {"order": "priority", "priority_levels": max(1, levels)}
        settings["row_order"] = "vllm_priority_0.32" if ends else "vllm_priority"
    return settings | order_of(head)


def order_of(head: Head) -> dict[str, Any]:
    """Return the settings of an order of ours that vLLM had. Raises RunError."""
    if not head.order:
        return {}
    name, *words = shlex.split(head.order)
    if sha256 := head.order_sha256:  # the file may lie elsewhere here
        files = {(kind.__name__, of.sha256): of.word for kind, of in SOURCES.items()}
        name = files.get((name.rpartition(":")[2], sha256), "")
    if name not in ORDERS:
        raise RunError(
            f"it was recorded with ORDER={head.order!r}, which is not loaded here; set "
            "EB_ORDER=FILE.py:NAME in the environment, of the same file"
        )
    settings, left = {"order": name}, iter(words)
    for word in left:
        flag, equals, value = word.partition("=")
        settings[flag.removeprefix("--").replace("-", "_")] = value if equals else next(left, "")
    return settings


@dataclass(frozen=True)
class OwnServer:
    """A recorded vLLM: settings, costs and traffic of simulations, and what was measured."""

    client: Path | None
    recording: Recording
    traffic: Traffic
    settings: dict[str, Any]
    costs: Costs
    pace: Pace
    at_client: Result | None = None  # its latencies, if a client's run is there

    @classmethod
    def of(cls, path: Path, client: Path | None = None) -> OwnServer:
        """Read a recording, and a client's saved run of the same requests. Raises RunError."""
        recording = read(path)
        seen = observed(recording)
        traffic = Traffic(recording)
        settings = settings_of(recording.head, traffic.longest, traffic.n_levels)
        costs = costs_of(recording, seen, build("dynamic", settings, {}))
        pace = Pace(seen, costs, traffic.zero)
        own = cls(client, recording, traffic, settings, costs, pace)
        return own._with(client) if client else own

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it as its paths: a worker was forked with what was read."""
        return own_server, (self.recording.path, self.client)

    @property
    def config(self) -> Config:
        """Settings of a server of ours that schedules as vLLM did."""
        return build("dynamic", self.settings, {})

    def can_jump(self, config: Config) -> bool:
        """Return whether a block of this config has tokens of one recorded block alone."""
        return not config.prefix_caching or self.traffic.block_size % config.block_size == 0

    def factor(self, seed: int) -> float:
        """Return the factor of a seed's costs: 1 for the first, others are spread as the recorded
        minutes are around the fit.
        """
        least, _, most = self.costs.source["parts_percent"]
        spread = (most - least) / 100 / (2 * 1.645) if seed else 0.0
        drawn = abs(np.random.default_rng([(seed + 1) // 2, 11]).standard_normal())
        return math.exp(spread * (drawn if seed % 2 else -drawn))  # in pairs around the fit

    @property
    def measured(self) -> Result:
        """Return the measures of the recording."""
        trace, outcomes = self.traffic.outcomes()
        recording, prompts = self.recording, sum(len(i.prompt_ids) for i in self.traffic.served)
        result = judged(trace, outcomes, {})
        seen = self.at_client or result
        return replace(
            result,
            occupancy=recording.row_s / recording.busy_s / self.config.max_batch_size,
            preemptions=recording.preemptions,
            cached_fraction=recording.cached_tokens / prompts,
            ttft=seen.ttft,
            e2el=seen.e2el,
        )

    @property
    def speeds(self) -> tuple[float, float] | None:
        """Return factors of the costs at which parts of the recording ran, if they moved much."""
        least, _, most = self.costs.source["parts_percent"]
        return (1 + least / 100, 1 + most / 100) if most - least > MOVES else None

    def facts(self, simulated: Result, at_speeds: Sequence[Result] = ()) -> Json:
        """Return what a report says of a simulation with the recorded settings: measures side by
        side, in words how near they are, and the schedule's agreement. at_speeds: the same with
        the factors of `speeds`.
        """
        config, measured = self.config, self.measured
        caching, most = self.recording.head.prefix_caching, config.max_batch_size
        values = {
            key: [
                (each.occupancy or 0.0) * most if key == "rows" else each.number(key)
                for each in (measured, simulated)
            ]
            for key in SHOWN
            if caching or key != "cached_fraction"
        }
        errors = {key: abs(values[key][1] / values[key][0] - 1) for key in JUDGED if values[key][0]}
        table = [[SHOWN[key], *two] for key, two in values.items()]
        agreed = agreement(self.recording, self.traffic, config)
        head = self.recording.head
        moved = _moved(self.speeds, at_speeds) if self.speeds and at_speeds else ""
        remarks = [moved + _within(errors), str(agreed) if agreed else UNCOUNTED]
        remarks.append(AT_CLIENT if self.at_client else AT_VLLM)
        if words := overload([measured]):
            remarks.append(f"While it was recorded, vLLM was {words}.")
        if self.traffic.left_out:
            remarks.append(f"Requests left out: {self.traffic.left_out:,}{LEFT_OUT}.")
        if stalls := self.costs.source["residuals"]["fitted"].get("outliers_percent"):
            remarks.append(f"Stalls, not simulated: {stalls:.2g}{OF_STALLS}.")
        if self.recording.is_cut:
            remarks.append("The file's last line was cut off, and is left out.")
        remarks += [
            f"vLLM ran with {name} {value}, which is not simulated."
            for name, default in NOT_SIMULATED.items()
            if (value := getattr(head, name)) != default
        ]
        return {"table": table, "remarks": remarks, "rows": self.recording.most_rows}

    def _with(self, path: Path) -> OwnServer:
        """Return the same with HTTP's share of times, by a client's run. Raises RunError."""
        if is_run(path):
            run = load(path)
            answered = [each for name in run.names for each in run.answered(name)]
        else:
            answered = [dict(each) for each in foreign.read(path).requests]
        answered.sort(key=lambda request: request["sent_at"])
        at = np.array([[r["sent_at"], r["first_token_at"]] for r in answered], float)
        made = np.array([r["completion_tokens"] for r in answered])
        served = [([i.arrived_at, i.token_times[0]], len(i.tokens)) for i in self.traffic.served]
        at_vllm, recorded = (np.array(each) for each in zip(*served))
        n = len(answered)
        stretches = [slice(k, k + n) for k in range(len(served) - n + 1) if n]
        alike = [each for each in stretches if np.mean(recorded[each] == made) >= ALIKE]
        if np.isnan(at).all(axis=0).any() or not alike:  # answers that are no streams lack times
            raise RunError(
                f"{path} holds {n} requests with times and lengths that are not those in a row of "
                f"{self.recording.path}; give the client's streams, sent while it was recorded"
            )
        # where lengths are equal, times say which requests they are
        later = (np.nanpercentile(at_vllm[each] - at, (10, 90), axis=0) for each in alike)
        apart = [np.ptp(each, axis=0) for each in later]
        best = int(np.argmin(np.sum(apart, axis=1)))
        which = alike[best]
        late = np.diff(at - at_vllm[which])[recorded[which] == made]
        if (answer := round(float(np.nanmedian(late)) * PS)) < 0 or apart[best][0] > APART_S:
            raise RunError(
                f"{path} was not sent while {self.recording.path} was recorded: its requests came "
                "at other times; give the client's run of these requests"
            )
        at_client = Result(
            ttft=distribution_of(at[:, 1] - at[:, 0]),
            e2el=distribution_of(np.array([r["answered_at"] - r["sent_at"] for r in answered])),
        )
        costs = replace(self.costs, answer=answer)
        return replace(self, costs=costs, at_client=at_client)


@functools.cache
def own_server(path: Path, client: Path | None) -> OwnServer:
    """Return `OwnServer.of`, read once. Raises RunError."""
    return OwnServer.of(path, client)


def _moved(speeds: tuple[float, float], results: Sequence[Result]) -> str:
    """Return how the machine's speed moved, and which range it makes of a prediction."""
    ranges = []
    for key in RANGED:
        least, most = sorted(each.number(key) for each in results)
        ranges.append(f"{SHOWN[key].partition(',')[0]} {least:,.0f} to {most:,.0f}")
    percents = " to ".join(f"{100 * each:.0f}" for each in speeds)
    return (
        f"The machine's speed moved: parts took {percents}% of what the costs say, so that at "
        f"another time a prediction is a range: {', '.join(ranges)} (tok/s and ms). At the speed "
        "that it had from part to part: "
    )


def _within(errors: Mapping[str, float]) -> str:
    """Return how far the simulation is from what was measured, in a sentence."""
    most = {
        part: max((error, key) for key, error in errors.items() if key.startswith("p99") == tail)
        for part, tail in (("whole", False), ("tail", True))
    }
    (whole, first), (tail, key) = most["whole"], most["tail"]
    return (
        f"Your server is foreseen within {_percent(whole)} in its throughput and in means and "
        f"medians of latencies (most in {SHOWN[first].partition(',')[0]}), and within "
        f"{_percent(tail)} in their p99 (most in {SHOWN[key].partition(',')[0]})."
    )


def _percent(error: float) -> str:
    return f"{math.ceil(100 * error)}%"
