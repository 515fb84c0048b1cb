"""Measuring one server: warm it up, replay a trace, and put together what its client and its own
statistics say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from client import groups
from client.analysis import (
    always_waiting,
    batch_sizes,
    expected_useful_fraction,
    growth,
    growth_in_flight,
    littles_law,
    slowest_row_s,
)  # fmt: skip
from client.calls import ServerError, get, post
from client.data import Request, describe
from client.load import Interrupted, Outcome, Watch, replay
from client.results import OURS
from client.wire import Wire
from config import Config
from scheduling.policies import MODES, chosen
from stats import DEFINITIONS, ROW_KINDS, Answer, occupancy_over_time, summarise

LEAST_BURST = 16
ENGINE = (
    "useful_fraction", "occupancy", "largest_batch", "preemptions", "recomputed_tokens",
    "cached_tokens", *(f"{kind}_rows" for kind in ROW_KINDS),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure: one of ours in a mode, or any other (`ours` false), of which only the
    client's side is known.
    """

    name: str
    url: str
    wire: Wire
    ours: bool = True
    key: str | None = field(default=None, repr=False)


def openai_model(url: str, key: str | None = None) -> str:
    """The first model that a server lists. Raises ServerError."""
    models = get(f"{url}/v1/models", key=key)
    try:
        return str(models["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ServerError(f"{url}/v1/models lists no model to ask for") from None


def warm_up(target: Target, by_ids: bool = False) -> None:
    """Two short requests, as text or as ids: a server without a tokenizer takes ids alone. Raises
    ServerError if one fails.
    """
    text = "warm up"
    prompt: dict[str, Any] = {"prompt_ids": list(text.encode())} if by_ids else {"prompt": text}
    for seed in range(2):
        request = Request(id=seed, at=0, num_tokens=8, seed=seed, **prompt)
        [outcome] = replay(target.url, [request], target.wire, key=target.key)
        if outcome.error:
            raise ServerError(
                f"{target.name} at {target.url} failed its first request: {outcome.error}"
            )


class _Counting(Watch):
    """Counts what is in flight at every tick, and hands on what it is told."""

    def __init__(self, then: Watch):
        self._then = then
        self._now = 0
        self.counts: list[int] = []

    def sent(self) -> None:
        self._now += 1
        self._then.sent()

    def ended(self, outcome: Outcome) -> None:
        self._now -= 1
        self._then.ended(outcome)

    def tick(self) -> None:
        self.counts.append(self._now)
        self._then.tick()


def measure(
    target: Target,
    requests: Sequence[Request],
    goodput: dict[str, float],
    timeout_s: float,
    watch: Watch,
) -> tuple[dict[str, Any], list[Outcome]]:
    """Replay a trace: NAME.json without its requests, and the outcomes. An interrupted one is
    `partial`, and has what ended.

    A server of ours begins it with nothing counted and an empty prefix cache, so that it finds what
    this trace computed and not what an earlier one did.
    """
    if target.ours:
        post(f"{target.url}/reset_prefix_cache", key=target.key)
        post(f"{target.url}/stats/reset", key=target.key)
    partial, counting = False, _Counting(watch)
    try:
        outcomes = replay(target.url, requests, target.wire, timeout_s, counting, target.key)
    except Interrupted as interrupted:
        partial, outcomes = True, interrupted.outcomes
    result: dict[str, Any] = {"variant": target.name} | judged(requests, outcomes, goodput)
    result["partial"] = partial
    if counting.counts:
        result["mean_in_flight"] = float(np.mean(counting.counts))
    if target.ours:
        try:
            result |= _engine(
                target, requests, [outcome.answer for outcome in outcomes if outcome.answer]
            )
        except ServerError as error:  # what this client measured is told all the same
            result["errors"][f"the server's /stats are missing: {error}"] = 1
        except KeyboardInterrupt:
            result["partial"] = True
        result["littles_law"] = littles_law(result)
    return result, outcomes


def judged(
    requests: Sequence[Request], outcomes: Sequence[Outcome], goodput: Mapping[str, float]
) -> dict[str, Any]:
    """What the outcomes of a trace say by themselves, whoever served it; the rest is None."""
    answers = [outcome.answer for outcome in outcomes if outcome.answer]
    sent = [outcome for outcome in outcomes if outcome.sent]
    result = summarise(
        answers,
        [(o.scheduled_at, o.sent_at, o.ended_at) for o in sent],
        goodput,
        unsent=len(outcomes) - len(sent),
    )
    result |= {"partial": False, "mean_in_flight": None, **dict.fromkeys(OURS)}
    asked = describe(requests)
    rate, mean = asked["requested_rate"], asked["mean_num_tokens"]
    result |= {
        "requested_rate": rate,
        "mean_num_tokens": mean,
        "offered_throughput": rate and rate * mean,
    }
    result["growth"] = growth(answers)
    result["slowest_row_s"] = fill_s = slowest_row_s(answers)
    result["growth_in_flight"] = growth_in_flight(
        [o.sent_at for o in sent], [o.ended_at for o in sent], fill_s
    )
    busy = always_waiting(answers)
    result |= {
        "busy_s": busy.seconds,
        "busy_throughput": busy.tokens / busy.seconds if busy.seconds else None,
    }
    result |= groups.measured(requests, outcomes, result["wall_clock_s"])
    result["other_length"] = sum(
        o.answer.completion_tokens != o.request.num_tokens for o in outcomes if o.answer
    )
    result["errors"] = dict(
        Counter(outcome.error for outcome in outcomes if outcome.error).most_common()
    )
    return result


def stats_of(url: str, key: str | None = None) -> tuple[dict[str, Any], list[list[float]]]:
    """What a server of ours says of its run, and of each iteration. Raises ServerError."""
    engine = get(f"{url}/stats?iterations=1", 120, key)
    iterations, following = engine.pop("iterations"), engine.pop("next_iteration")
    while following is not None:
        page = get(f"{url}/stats?iterations=1&since={following}", 120, key)
        iterations, following = iterations + page["iterations"], page["next_iteration"]
    return engine, iterations


def _engine(
    target: Target, requests: Sequence[Request], answers: Sequence[Answer]
) -> dict[str, Any]:
    """What a server of ours says of the run itself. Raises ServerError."""
    engine, iterations = stats_of(target.url, target.key)
    engine.pop("definitions")
    found = {key: engine[key] for key in ENGINE} | {
        "server": engine,
        "config": get(target.url, key=target.key)["config"],
    }
    prompt_tokens = engine["total_input_tokens"]
    found["cached_fraction"] = engine["cached_tokens"] / prompt_tokens if prompt_tokens else None
    found["occupancy_over_time"] = occupancy_over_time(iterations, bins=400)
    config = found["config"]
    policy = MODES[config["mode"]]
    by_chance = policy.in_order and config["order"] == "fcfs"  # who comes together in a batch
    if policy.request_level and by_chance and not config["compact_batches"]:
        lengths = [request.num_tokens for request in requests]
        found["expected_useful_fraction"] = expected_useful_fraction(lengths, batch_sizes(answers))
    return found


def whole(result: dict[str, Any], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """NAME.json: a measurement with every request."""
    return result | {
        "definitions": DEFINITIONS,
        "requests": [_record(outcome) for outcome in outcomes],
    }


def _record(outcome: Outcome) -> dict[str, Any]:
    """One request of NAME.json; the gaps between tokens stay out, they are summarised above."""
    record: dict[str, Any] = outcome.request.model_dump(
        include={"id", "num_tokens", "user", "priority"}, exclude_none=True
    )
    if not outcome.sent:
        return record | {"error": outcome.error}
    record |= {
        "scheduled_at": outcome.scheduled_at,
        "sent_at": outcome.sent_at,
        "ended_at": outcome.ended_at,
    }
    if outcome.answer is None:
        return record | {"error": outcome.error}
    record |= asdict(outcome.answer) | {"text": outcome.text}
    del record["itl_s"]
    if record["timings"]:
        record["timings"] = {
            name: value for name, value in record["timings"].items() if name != "itl_s"
        }
    return record


def burst_size(config: Config) -> int:
    """Requests of the burst that measures capacity: three a row and a few at least, if the server
    holds as many.
    """
    rows = chosen(MODES, config.mode, config).most_rows(config.max_batch_size)
    return min(max(3 * rows, LEAST_BURST), config.max_in_flight)


def measure_capacity(
    target: Target, burst: Sequence[Request], timeout_s: float, watch: Watch
) -> dict[str, Any]:
    """Tokens per second of a server of ours while every row is busy. Raises ServerError, and
    KeyboardInterrupt.
    """
    result, _ = measure(target, burst, {}, timeout_s, watch)
    if result["partial"]:
        raise KeyboardInterrupt
    if result["failed"]:
        error = next(iter(result["errors"]))
        raise ServerError(
            f"the burst that measures capacity failed ({error}); name a rate with --arrival "
            f"poisson:RATE"
        )
    if not result["busy_throughput"]:
        raise ServerError(
            "the burst that measures capacity fits into one batch; name a rate with --arrival "
            "poisson:RATE"
        )
    return {"output_throughput": result["busy_throughput"], "requests": len(burst)}
