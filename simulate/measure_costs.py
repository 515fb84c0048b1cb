"""Costs of an iteration on this machine: results/costs/NAME.json, which simulations use.

    python -m simulate.measure_costs --model demo [--name NAME] [any setting of the engine]

A real server gets many kinds of iterations, and what it reports of them is fitted: every number of
rows with contexts up to the longest, chunks of prompts alone and beside rows that decode. Rounds of
this traffic are as short as they can be and take turns with other traffic, which is held out of
the fit: the speed of a shared machine changes by the minute. Writes the costs with the
residuals of both. Takes two minutes for `demo`, and three for GPT-2 on a CPU.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import statistics
import sys
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from client.arguments import folder
from client.calls import ServerError, get, post
from client.load import Watch, replay
from client.machine import command_line, processor, stamp
from client.measure import Target, stats_of, warm_up
from client.outcomes import Outcome
from client.results import Json
from client.stopping import end_as_on_ctrl_c
from client.traces import Request
from client.wire import Plain, wire
from compare.servers import server
from config.config import Config
from config.flags import Parser, add_settings, from_environment, refuse_unknown
from config.settings import ONLY_IN, ONLY_OVER_HTTP, ConfigError
from generate.auto import build
from simulate import PS
from simulate.costs import FOLDER, HTTP, STATED, Costs, save
from simulate.fitting import Served, fit, observe, residuals

# completion tokens of a request at most: as many as take LONG_S alone. A server that was idle is
# cold for some 10 ms, which must not be the half of what is fitted
LEAST_TOKENS, MOST_TOKENS, LONG_S = 32, 128, 0.15
LOADS = (0.5, 0.85)  # held-out traffic's, as parts of the rate of a burst of it
# settings without effect here: one schedule is fitted, of `dynamic`, with blocks whole or on demand
UNUSED = {"prefix_caching", "order", "mode", "loop_interval_ms", "ahead", *ONLY_IN, *ONLY_OVER_HTTP}
UNUSED -= {"kv_reservation"}

Arrivals = Literal["burst", "loop", "poisson"]  # at once, a closed loop, a Poisson process


class Segment(NamedTuple):
    """Requests that one server answered, beginning with none in flight."""

    arrivals: Arrivals
    streamed: bool
    held_out: bool  # held out of the fit
    served: list[Served]
    iterations: list[list[float]]  # [started_at, seconds, live rows] each


class _Senders(Watch):
    """The client's clock at each sending."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def sent(self) -> None:
        self.at.append(time.perf_counter())


class RandomRequests:
    """Requests with prompts of random ids, which no two share."""

    def __init__(self, config: Config, seed: int, tokens: int = LEAST_TOKENS):
        self._rng = random.Random(seed)
        self._most = min(tokens, config.max_model_len // 2)
        self._longest = config.max_model_len - self._most

    def _request(self, i: int, prompt: int, num_tokens: int, **when: Any) -> Request:
        ids = [self._rng.randrange(256) for _ in range(prompt)]
        return Request(id=i, prompt_ids=ids, num_tokens=num_tokens, **{"at": 0.0, **when})

    def _any(self, most: int) -> int:
        """A length of 1 … most, short ones as often as long ones."""
        return round(math.exp(self._rng.uniform(0, math.log(most))))

    def together(self, n: int) -> list[Request]:
        """n rows that decode for as long, of contexts of any length."""
        return [self._request(i, self._any(self._longest), self._most) for i in range(n)]

    def loop(self, users: int) -> list[Request]:
        """A closed loop: rows come and go."""
        return [
            self._request(i, self._any(self._longest), self._any(self._most), users=users)
            for i in range(2 * users + 6)
        ]

    def other(self, n: int, rate: float | None = None) -> list[Request]:
        """Requests of other lengths, all at once or as a Poisson process of `rate` a second."""
        rng, at, requests = self._rng, 0.0, []
        for i in range(n):
            prompt, tokens = rng.randint(1, self._longest // 4), rng.randint(1, 2 * self._most)
            requests.append(self._request(i, prompt, min(tokens, self._longest // 2), at=at))
            at += rng.expovariate(rate) if rate else 0.0
        return requests


class TrafficServer:
    """A server of ours, and its own report of the traffic that it was sent."""

    def __init__(self, url: str):
        self._url = url
        warm_up(Target("the server", url, Plain()), by_ids=True)
        self.n_blocks = int(get(f"{url}/stats")["kv_blocks"])
        self.config = Config(**get(url)["config"] | {"kv_cache": f"{self.n_blocks}blocks"})
        _, iterations = stats_of(url)
        alone_s = statistics.median(seconds for _, seconds, *_ in iterations)
        self.tokens = min(MOST_TOKENS, max(LEAST_TOKENS, round(LONG_S / alone_s)))
        # the difference of two clocks of one machine, the same in all its processes
        self._epoch = max(time.time() - time.perf_counter() for _ in range(100))

    def serve(
        self,
        arrivals: Arrivals,
        requests: Sequence[Request],
        stream: bool = False,
        held_out: bool = False,
    ) -> Segment:
        """Raises ServerError if a request fails."""
        post(f"{self._url}/stats/reset")
        senders = _Senders()
        outcomes = replay(self._url, requests, wire("inference", stream=stream), watch=senders)
        iterations = [iteration[:3] for iteration in stats_of(self._url)[1]]
        begun_at = min(senders.at) - min(outcome.sent_at for outcome in outcomes)
        served = [self._served(outcome, begun_at, stream) for outcome in outcomes]
        return Segment(arrivals, stream, held_out, served, iterations)

    def _served(self, outcome: Outcome, begun_at: float, stream: bool) -> Served:
        if outcome.error or outcome.timings is None:
            raise ServerError(f"a request failed: {outcome.error}")
        arrived_at = outcome.timings["arrived_at"] - self._epoch
        return Served(
            outcome.sent_at + begun_at, arrived_at, arrived_at + outcome.timings["queue_s"],
            arrived_at + outcome.timings["e2e_s"], outcome.ended_at + begun_at,
            outcome.prompt_tokens, outcome.completion_tokens, stream,
        )  # fmt: skip


def measure(server: TrafficServer, seconds: float) -> Iterator[list[Segment]]:
    """Rounds until so many seconds are over; one at least."""
    start = time.monotonic()
    rows = server.config.max_batch_size
    few = sorted({1, math.isqrt(rows), rows})
    rng = random.Random(0)
    fitted, other = (RandomRequests(server.config, seed, server.tokens) for seed in (0, 1))
    for load in itertools.cycle(LOADS):
        kinds: list[Any] = [("burst", fitted.together(n)) for n in at_once(server.config)]
        kinds += [("loop", fitted.loop(users)) for users in few]
        kinds += [("burst", fitted.together(n), True) for n in few]
        rng.shuffle(kinds)
        segments = [server.serve(*kind) for kind in kinds]
        burst = server.serve("burst", other.other(2 * rows), held_out=True)
        sent, received = zip(*((each.sent_at, each.received_at) for each in burst.served))
        rate = load * len(burst.served) / (max(received) - min(sent))
        segments += [burst, server.serve("poisson", fitted.other(rows, rate))]
        for stream in (False, True):
            segments.append(server.serve("poisson", other.other(rows, rate), stream, True))
        n = sum(len(segment.iterations) for segment in segments)
        print(f"{time.monotonic() - start:5.0f} s: {n:,} iterations", flush=True)
        yield segments
        if time.monotonic() > start + seconds:
            return


def at_once(config: Config) -> list[int]:
    """Numbers of rows that decode together in a round: 1, 2, 3, 4, 6, 8, … or the padded sizes."""
    sizes = {m << k for k in range(20) for m in (2, 3)} | {1, config.max_batch_size}
    return sorted(config.decoder_batch_sizes or (n for n in sizes if n <= config.max_batch_size))


def fitted(name: str, config: Config, rounds: Sequence[Sequence[Segment]]) -> Costs:
    """The costs by all rounds, with the residuals."""
    segments = itertools.chain(*rounds)
    runs = [(run, observe(config, run.served, run.iterations)) for run in segments]
    train = [(run, observed) for run, observed in runs if not run.held_out]
    mixed = [observed for run, observed in train if run.arrivals != "burst" and not run.streamed]
    everything = [each for _, observed in train for each in observed]
    costs = fit(name, everything, at_once(config), mixed)
    costs = replace(costs, **http([run for run, _ in train]))
    parts = {"fitted": (False, False), "held_out": (True, False), "held_out_streams": (True, True)}
    errors = {
        part: residuals(costs, [seen for run, seen in runs if (run.held_out, run.streamed) == kind])
        for part, kind in parts.items()
    }
    return replace(costs, source={"residuals": errors, "rounds": len(rounds)})


def http(segments: Sequence[Segment]) -> Json:
    """Medians of a request's time to the scheduler and of its answer's back, while others come and
    go, and of the time between requests and answers that are sent at once.
    """
    served = [each for part in segments if part.arrivals == "poisson" for each in part.served]
    there = statistics.median(each.arrived_at - each.sent_at for each in served)
    back = statistics.median(each.received_at - each.answered_at for each in served)
    times = (there, back, *turns(segments))
    return {name: max(0, round(seconds * PS)) for name, seconds in zip(HTTP, times)}


def turns(segments: Sequence[Segment]) -> tuple[float, float]:
    """Seconds from a request's arrival to the next one's, of many that were sent at once, and from
    an answer's to the next one's, of many that an iteration had.
    """
    coming: list[list[float]] = []
    going: list[list[float]] = []
    for segment in segments:
        if segment.arrivals == "burst" and not segment.streamed:
            coming.append([each.arrived_at for each in segment.served])
            begun = [started_at for started_at, *_ in segment.iterations]
            answers = defaultdict(list)
            for each in segment.served:
                answers[bisect_left(begun, each.answered_at)].append(each.received_at)
            going += answers.values()
    return _apart(coming), _apart(going)


def _apart(bursts: Sequence[Sequence[float]]) -> float:
    """Median of the mean steps, of those bursts that are at least half as large as the largest."""
    most = max(map(len, bursts), default=0)
    large = [times for times in bursts if len(times) >= max(2, most / 2)]
    steps = [(max(times) - min(times)) / (len(times) - 1) for times in large]
    return statistics.median(steps) if steps else 0.0


def read(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any], Config]:
    """Return options, the settings among them, and the server's config. Raises ConfigError."""
    shown = ("--name", "--seconds", "--out")
    parser = Parser(description=__doc__, usage=argparse.SUPPRESS, most_used=shown)
    add = parser.add_argument
    add("--name", help="name of the costs, if not the model's (fake: fake-server)")
    about = "seconds after which no new round begins; one is always run (default: 90)"
    add("--seconds", type=float, default=90.0, help=about)
    add("--out", type=folder, default=FOLDER, help="folder (default: results/costs)")
    add_settings(parser, UNUSED)
    options, unknown = parser.parse_known_args(argv)
    refuse_unknown(parser, unknown)
    chosen = {name: value for name, value in vars(options).items() if name in Config.model_fields}
    values = from_environment(os.environ)
    used = {name: value for name, value in values.items() if name not in UNUSED}
    return options, chosen, build("dynamic", chosen, used)


def run(argv: Sequence[str]) -> None:
    """Measure, print the residuals and save the costs. Raises ConfigError and ServerError."""
    options, chosen, config = read(argv)
    name = options.name or {"fake": "fake-server"}.get(config.model_name, config.model_name)
    if name in STATED:
        raise ConfigError(f"{name} are the costs that need no file; give another --name")
    # the times of one that plans ahead hold two iterations; simulations add that themselves
    with server("dynamic", chosen | {"ahead": False}) as url:
        traffic = TrafficServer(url)
        rounds = [*measure(traffic, options.seconds)]
    costs = fitted(name, traffic.config, rounds)
    for part, errors in costs.source["residuals"].items():
        print(f"{part}: " + ", ".join(f"{key} {np.round(n, 1)}" for key, n in errors.items()))
    made, settings = stamp(), traffic.config.model_dump(mode="json")
    command = command_line("python", ["-m", "simulate.measure_costs", *argv])
    source = {
        "processor": processor(made["hardware"], settings),
        "n_blocks": traffic.n_blocks,
        "block_bytes": traffic.config.block_bytes,
        **costs.source,
        "config": settings,
        # where a model's folder lies on this machine means nothing elsewhere
        "command": command.replace(config.model, config.model_name),
        **made,
    }
    save(replace(costs, source=source), options.out / f"{name}.json")
    print(f"{options.out / name}.json")


def main() -> None:
    end_as_on_ctrl_c()  # the server is stopped, too
    try:
        run(sys.argv[1:])
    except (ConfigError, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
