"""What an iteration costs on this machine: results/costs/NAME.json, by which a simulation reckons.

    python -m benchmarks.costs --model demo [--name NAME] [any server setting that the engine needs]

A real server is asked for many kinds of iterations, and what it tells of them is fitted: every
number of rows with contexts up to the longest, chunks of prompts alone and beside rows that decode.
Rounds of this traffic are as short as they can be and take turns with other traffic, which is not
fitted but held against the fit: the speed of a shared machine changes by the minute. Writes the
costs with the residuals of both, and a figure of them. Give the server's own defaults two minutes
for `demo`, and three for GPT-2 on a CPU.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import figures
from benchmarks.common import PREFIXES, any_configs, record, run
from benchmarks.fitting import Observed, Served, fit, observe, ratios, residuals, whole
from client.calls import ServerError, get, post
from client.data import Request
from client.load import Outcome, Watch, replay
from client.machine import processor
from client.measure import Target, stats_of, warm_up
from client.report import drawing
from client.servers import server
from client.wire import Plain, wire
from config import ONLY_IN, ONLY_OVER_HTTP, Config, ConfigError, Parser
from simulate import PS
from simulate.costs import FAKE, FOLDER, Costs, Line, save

UNUSED = PREFIXES | {"mode", "loop_interval_ms", *ONLY_IN, *ONLY_OVER_HTTP}  # one schedule is asked
# tokens that requests ask for at most: as many as take LONG_S alone. A server that was idle is cold
# for some 10 ms, which must not be the half of what is fitted
LEAST_TOKENS, MOST_TOKENS, LONG_S = 32, 128, 0.15
KINDS = (False, True)  # plain answers and streams
LOADS = (0.5, 0.85)  # of held-out traffic, as parts of what a burst of it took


class Segment(NamedTuple):
    """Requests that one server answered, beginning with none in flight."""

    users: int | None  # of a closed loop
    streamed: bool
    observed: list[Observed]
    served: list[Served]


class _Senders(Watch):
    """When this client's clock was what when it sent."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def sent(self) -> None:
        self.at.append(time.perf_counter())


class Traffic:
    """Requests of prompts of random ids, which are all their own."""

    def __init__(self, config: Config, seed: int, tokens: int = LEAST_TOKENS):
        self._rng = random.Random(seed)
        self._most = min(tokens, config.max_model_len // 2)
        self._longest = config.max_model_len - self._most

    def _request(self, i: int, prompt: int, num_tokens: int, **when: Any) -> Request:
        ids = [self._rng.randrange(256) for _ in range(prompt)]
        return Request(id=i, prompt_ids=ids, num_tokens=num_tokens, **{"at": 0.0, **when})

    def _any(self, most: int) -> int:
        """Of 1 … most, short ones as often as long ones."""
        return round(math.exp(self._rng.uniform(0, math.log(most))))

    def together(self, n: int) -> list[Request]:
        """n rows that decode for as long, of contexts of any length."""
        return [self._request(i, self._any(self._longest), self._most) for i in range(n)]

    def by_users(self, users: int) -> list[Request]:
        """A closed loop: rows come and go."""
        return [
            self._request(i, self._any(self._longest), self._any(self._most), users=users)
            for i in range(2 * users + 6)
        ]

    def other(self, n: int, rate: float | None) -> list[Request]:
        """Of other lengths, all at once or as a Poisson process of `rate` a second."""
        rng, at, requests = self._rng, 0.0, []
        for i in range(n):
            prompt, tokens = rng.randint(1, self._longest // 4), rng.randint(1, 2 * self._most)
            requests.append(self._request(i, prompt, min(tokens, self._longest // 2), at=at))
            at += rng.expovariate(rate) if rate else 0.0
        return requests


class Driven:
    """A server of ours, what it is, and what it told of the traffic that it was sent."""

    def __init__(self, url: str):
        self._url = url
        warm_up(Target("the server", url, Plain()), by_ids=True)
        self.n_blocks = int(get(f"{url}/stats")["kv_blocks"])
        self.config = Config(**get(url)["config"] | {"kv_blocks": self.n_blocks})
        _, iterations = stats_of(url)
        alone_s = statistics.median(seconds for _, seconds, *_ in iterations)
        self.tokens = min(MOST_TOKENS, max(LEAST_TOKENS, round(LONG_S / alone_s)))
        # of one machine: what its processes' clocks show is apart by so much for all of them
        self._epoch = max(time.time() - time.perf_counter() for _ in range(100))

    def serve(self, requests: Sequence[Request], stream: bool = False) -> Segment:
        """Raises ServerError if a request fails."""
        post(f"{self._url}/stats/reset")
        senders = _Senders()
        outcomes = replay(self._url, requests, wire("inference", stream=stream), watch=senders)
        _, iterations = stats_of(self._url)
        begun_at = min(senders.at) - min(outcome.sent_at for outcome in outcomes)
        served = [self._served(outcome, begun_at)._replace(streamed=stream) for outcome in outcomes]
        observed = observe(self.config, served, iterations)
        return Segment(requests[0].users, stream, observed, served)

    def _served(self, outcome: Outcome, begun_at: float) -> Served:
        answer = outcome.answer
        if answer is None or answer.timings is None:
            raise ServerError(f"a request failed: {outcome.error}")
        arrived_at = answer.timings["arrived_at"] - self._epoch
        return Served(
            answer.sent_at + begun_at,
            arrived_at,
            arrived_at + answer.timings["queue_s"],
            arrived_at + answer.timings["e2e_s"],
            answer.answered_at + begun_at,
            answer.prompt_tokens,
            answer.completion_tokens,
        )


def rounds(driven: Driven, seconds: float, seed: int) -> Iterator[tuple[list[Segment], ...]]:
    """Traffic to be fitted and held-out traffic, until so many seconds are over; one round at
    least.
    """
    rows, end, number = driven.config.max_batch_size, time.monotonic() + seconds, 0
    rng = random.Random(seed)
    fitted, other = (Traffic(driven.config, seed + k, driven.tokens) for k in (0, 1))
    while number == 0 or time.monotonic() < end:
        few = sorted({1, math.isqrt(rows), rows})
        asked = [(fitted.together(n), False) for n in at_once(driven.config)]
        asked += [(fitted.by_users(users), False) for users in few]
        asked += [(fitted.together(n), True) for n in few]
        rng.shuffle(asked)
        train = [driven.serve(*each) for each in asked]
        burst = driven.serve(other.other(2 * rows, None))
        sent, received = zip(*((each.sent_at, each.received_at) for each in burst.served))
        rate = LOADS[number % len(LOADS)] * len(burst.served) / (max(received) - min(sent))
        yield train, [burst, *(driven.serve(other.other(rows, rate), kind) for kind in KINDS)]
        number += 1


def at_once(config: Config) -> list[int]:
    """How many rows decode together in a round: 1, 2, 3, 4, 6, 8, 12, … or what they are filled up
    to.
    """
    sizes = {m << k for k in range(20) for m in (2, 3)} | {1, config.max_batch_size}
    return sorted(config.decoder_batch_sizes or (n for n in sizes if n <= config.max_batch_size))


def of_http(costs: Costs, segments: Sequence[Segment]) -> Costs:
    """With what a request takes outside the server's handler thread while nobody else is there,
    until its first iteration begins, and from its last one's end; and how far apart requests and
    answers are that are sent at once.
    """
    before, after = [], []
    for segment in segments:
        if segment.users == 1:
            begun = [each.started_at for each in segment.observed]
            for each in segment.served:
                before.append(begun[bisect_left(begun, each.admitted_at)] - each.sent_at)
                after.append(each.received_at - each.answered_at)
    waking = costs.gap + costs.gap_row  # which begins an iteration of an idle server, too
    request = max(0, round(statistics.median(before) * PS) - waking)
    coming, going = turns(segments)
    return replace(
        costs,
        request=request,
        answer=round(statistics.median(after) * PS),
        request_turn=round(coming * PS),
        answer_turn=round(going * PS),
    )


def turns(segments: Sequence[Segment]) -> tuple[float, float]:
    """Seconds from a request's arrival to the next one's, of many that were sent at once, and from
    an answer's to the next one's, of many that an iteration had.
    """
    coming, going = [], []
    for segment in segments:
        if segment.users is None and not segment.streamed:
            coming.append([each.arrived_at for each in segment.served])
            begun = [each.started_at for each in segment.observed]
            answers: dict[int, list[float]] = {}
            for each in segment.served:
                answers.setdefault(bisect_left(begun, each.answered_at), []).append(
                    each.received_at
                )
            going += answers.values()
    return _apart(coming), _apart(going)


def _apart(bursts: Sequence[Sequence[float]]) -> float:
    """Median of the mean steps, of those bursts that are at least half as large as the largest."""
    most = max(map(len, bursts), default=0)
    large = [times for times in bursts if len(times) >= max(2, most / 2)]
    steps = [(max(times) - min(times)) / (len(times) - 1) for times in large]
    return statistics.median(steps) if steps else 0.0


def measure(driven: Driven, name: str, seconds: float, seed: int) -> tuple[Costs, dict[str, Any]]:
    """The costs, and what a figure of them shows."""
    fitted: list[Segment] = []
    held_out: list[Segment] = []
    start = time.monotonic()
    for train, test in rounds(driven, seconds, seed):
        fitted += train
        held_out += test
        n = sum(len(segment.observed) for segment in fitted + held_out)
        print(f"{time.monotonic() - start:5.0f} s: {n:,} iterations", flush=True)
    plain, other, streams = (
        [each.observed for each in segments if each.streamed is streamed]
        for segments, streamed in ((fitted, False), (held_out, False), (held_out, True))
    )
    everything = [each for segment in fitted for each in segment.observed]
    costs = of_http(fit(name, everything, at_once(driven.config)), fitted)
    found = {
        "fitted": residuals(costs, plain),
        "held_out": residuals(costs, other),
        "held_out_streams": whole(costs, streams),
    }
    shown = {"fitted": points(costs, plain), "held out": points(costs, other)}
    return replace(costs, source={"residuals": found}), shown


def points(costs: Costs, runs: Sequence[Sequence[Observed]]) -> dict[str, np.ndarray]:
    """Of the iterations beside which nothing happened."""
    calm = [each for observed in runs for each in observed if each.calm]
    return {
        "rows": np.array([each.rows for each in calm]),
        "seconds": np.array([each.seconds for each in calm]),
        "ratio": ratios(costs, calm),
        "decodes": np.array([each.decodes for each in calm]),
    }


def show(costs: Costs) -> None:
    def in_microseconds(line: Line) -> str:
        terms = {
            "iteration": line.iteration, "a row": line.row, "a position of context": line.context,
            "a prefill token": line.prefill, "a position of its context": line.chunk_context,
        }  # fmt: skip
        return ", ".join(f"{what} {value / 1e6:,.4g} µs" for what, value in terms.items() if value)

    print(f"an iteration: {in_microseconds(costs.line)}")
    for n, line in costs.decode.items():
        print(f"decode rows alone, {n}: {in_microseconds(line)}")
    for what, value in (
        ("between iterations", costs.gap),
        ("and a row", costs.gap_row),
        ("and a request that it answers", costs.gap_answer),
        ("for streams", costs.gap_stream),
        ("and each of them", costs.gap_stream_row),
        ("from client to iteration", costs.request),
        ("from iteration to client", costs.answer),
        ("from one request to the next, of many at once", costs.request_turn),
        ("from one answer to the next, of many at once", costs.answer_turn),
    ):
        print(f"{what}: {value / 1e6:,.0f} µs")
    for what, found in costs.source["residuals"].items():
        low, middle, high = found["of_runs_percent"]
        print(
            f"{what}: all time {found['whole_percent']:+.1f}%; of runs {low:+.1f}%, "
            f"{middle:+.1f}%, {high:+.1f}%"
        )
        if found.get("calm"):
            print(
                f"    of {found['calm']:,} iterations 90% within {found['p5_percent']:+.1f}% and "
                f"{found['p95_percent']:+.1f}%, median {found['p50_percent']:+.1f}%, mean |error| "
                f"{found['mean_absolute_percent']:.1f}%"
            )


def name_of(config: Config) -> str:
    return "fake-server" if config.model == FAKE.name else Path(config.model).name


def main() -> None:
    parser = Parser(
        prog="python -m benchmarks.costs",
        description="What an iteration costs on this machine, for simulations: about two minutes "
        "for demo and fake, three for GPT-2 on a CPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--name", help="of the costs (default: the model's; fake: fake-server)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=90,
        help="after which no round begins; one always does (default: 90)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the traffic (default: 0)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="default: results/costs")
    options, [config] = any_configs(parser, sys.argv[1:], lambda known: ["dynamic"], UNUSED)
    name = options.name or name_of(config)
    if name == FAKE.name:
        raise ConfigError(f"{name} are the costs that need no file; give another --name")
    flags = {key: value for key, value in vars(options).items() if key in Config.model_fields}
    with server("dynamic", flags) as url:
        driven = Driven(url)
        costs, shown = measure(driven, name, options.seconds, options.seed)
    show(costs)
    made = record([config], UNUSED)
    used = driven.config.model_dump(mode="json")
    source = {
        "processor": processor(made["hardware"], used),
        "n_blocks": driven.n_blocks,
        "block_bytes": driven.config.block_bytes,
        **costs.source,
        **made,
        "config": used,
    }
    save(replace(costs, source=source), options.out / f"{name}.json")
    caption = f"{name} · {source['processor']} · commit {made['commit']}, {made['date'][:10]}"
    drawing.save(figures.costs(shown, caption), options.out / f"{name}.png")
    print(f"{options.out / name}.json, and .png")


if __name__ == "__main__":
    run(main)
