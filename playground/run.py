"""Runs of the playground: a state of its page in, what a variant did with the trace out.

The page's worker calls it in Pyodide, which has the standard library and sortedcontainers alone. So
draws are Python's own, and settings come from a table that `playground.build` took from Configs.
All else is the code that ./simulate.sh runs, and so are the results, to the picosecond.
"""

from __future__ import annotations

import base64
import json
import math
import os
import random
import shlex
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from live.observer import RunObserver, about
from scheduling.building import build_scheduler
from scheduling.guard import reason
from scheduling.inference import Inference
from scheduling.policies import MODES, ORDERS, own
from scheduling.records import IterationRecord
from scheduling.sampling import Sampling
from simulate.costs import load
from simulate.loop import Arrival, Loop
from simulate.replica import SimulatedReplica, Stretch
from simulate.time import PS, seconds
from stats import ROW_KINDS, times_of

FILE = "yours.py"  # what the editor holds: a mode or an order in it is yours.py:NAME
GRID = 2000  # iterations of a variant that the live page shows
LONGEST = 500  # tokens of a prompt, and of a completion
State = Mapping[str, Any]  # of the page: state.js has its fields and their limits
Settings = Mapping[str, Mapping[str, Any]]  # of a Config, by the name of its costs


class Request(NamedTuple):
    """A request, by the fields of a line of trace.jsonl."""

    id: int
    at: float  # seconds
    prompt_ids: list[int]
    num_tokens: int
    seed: int


def trace(state: State) -> list[Request]:
    """Draw the requests: Poisson arrivals, and log-normal lengths with a mean and a spread
    (standard deviation / mean). A slider scales its own part of the draws.
    """
    apart, prompts, answers = (random.Random(3 * state["seed"] + part) for part in range(3))
    at, requests = 0.0, []
    for i in range(state["requests"]):
        at += apart.expovariate(1.0) / state["rate"]
        prompt = _length(prompts, state["prompt"], state["spread"])
        num_tokens = _length(answers, state["tokens"], state["spread"])
        requests.append(Request(i, round(at, 9), [0] * prompt, num_tokens, i))
    return requests


def _length(rng: random.Random, mean: float, spread: float) -> int:
    sigma = math.sqrt(math.log(1 + spread**2))
    drawn = mean * math.exp(sigma * rng.gauss(0, 1) - sigma**2 / 2)
    return min(LONGEST, max(1, round(drawn)))


def jsonl(state: State) -> str:
    """Return the trace as `./simulate.sh --trace` reads it."""
    return "".join(json.dumps(request._asdict()) + "\n" for request in trace(state))


def command(state: State) -> str:
    """Return the command that serves the same trace with the same variants."""
    sliders = {
        "--costs": state["costs"],
        "--max-batch-size": state["rows"],
        "--kv-cache": f"{state['blocks']}blocks",
        "--token-budget": state["budget"],
    }
    words = ["./simulate.sh", "--trace", "trace.jsonl"]
    words += [str(word) for pair in sliders.items() for word in pair]
    words += ["--stream"] if state["stream"] else []
    for name, variant in zip("abcd", state["variants"]):
        words += ["--variant", f"{name}={variant}"]
    return shlex.join(words)


def settings_of(variant: str, state: State, settings: Settings) -> SimpleNamespace:
    """Return the settings of a variant, written as "dynamic --order sjf", and of the sliders."""
    mode, *flags = variant.split()
    given = {name[2:].replace("-", "_"): value for name, value in zip(flags[::2], flags[1::2])}
    values = {**settings[state["costs"]], "order": "fcfs", **given, "mode": mode}
    for kind in (MODES[mode], ORDERS[values["order"]]):  # those of the reader's own are not there
        values = {each.name: each.default for each in fields(kind)} | values
    values |= {"max_batch_size": state["rows"], "token_budget": state["budget"]}
    values |= {"n_blocks": state["blocks"]}
    return SimpleNamespace(**values, max_in_flight=state["rows"] + values["max_waiting"])


class Served:
    """A variant that serves a trace, and what is seen of it. Raises what a reader's policy does."""

    def __init__(self, variant: str, state: State, settings: Settings, grid: bool):
        self.rows = dict.fromkeys(ROW_KINDS, 0)
        self.iterations = 0
        self.answers: list[list[float]] = []  # id, and first, last token and end at the client
        self.token_times = array("d")  # at the server, request by request as in `answers`
        self._state, self._costs = state, load(state["costs"])
        its = settings_of(variant, state, settings)
        scheduler = build_scheduler(its)
        facts = about(its, str(its.model))
        facts |= {"simulated": f"simulated, costs {self._costs.name}", "note": ""}
        self.observer = RunObserver(scheduler, facts, zero=0.0)
        self._shown = GRID if grid else 0
        self._numbers: dict[Inference, int] = {}
        loop = Loop()
        replica = SimulatedReplica(
            loop, scheduler, self._costs, computed=self._computed, ended=self._ended, jump=True
        )
        loop.serve(self._arrivals(trace(state)), replica)

    def _arrivals(self, requests: Iterable[Request]) -> Iterator[Arrival]:
        streamed = self._state["stream"]
        for request in requests:
            sampling = Sampling(seed=request.seed)
            inference = Inference(
                request.prompt_ids, request.num_tokens, sampling, streamed=streamed
            )
            self._numbers[inference] = request.id
            yield request.at + self._costs.request / PS, [inference]

    def _computed(self, stretch: Stretch) -> None:
        for kind, n in IterationRecord(0.0, 0.0, stretch.iteration).rows.items():
            self.rows[kind] += n * stretch.n
        iteration = stretch.iteration
        for k in range(min(stretch.n, self._shown - self.iterations)):
            if k == 1:  # from now on each row computes one token after the other
                iteration = iteration._replace(rows=stretch.rows(1))
            begun = stretch.begins(k)
            record = IterationRecord(seconds(begun), (stretch.end(k) - begun) / PS, iteration)
            self.observer.iteration(record)
        self.iterations += stretch.n

    def _ended(self, now: float, inference: Inference) -> Iterable[Arrival]:
        ended_at = now + self._costs.answer / PS
        assert inference.answered_at is not None
        end = inference.answered_at + self._costs.answer / PS if inference.streamed else ended_at
        times = times_of(inference).ending_at(end)  # as in SimulatedServer
        stamps = [times.first_token_at, times.last_token_at, ended_at]
        self.answers.append([self._numbers[inference], *stamps])
        self.token_times.extend(inference.token_times)
        if self._shown:
            self.observer.answered(inference)
        return ()


def served(variant: str, state: State, settings: Settings, grid: bool = False) -> dict[str, Any]:
    """Serve the trace by a variant; return what the page draws, or the error in a sentence. grid:
    with the history of the rows.
    """
    mode, _, order = variant.partition(" --order ")
    for name, table in ((mode.split()[0], MODES), (order or "fcfs", ORDERS)):
        if name not in table:
            return {"error": f"there is no {name}"}
    try:
        run = Served(variant, state, settings, grid)
    except Exception as error:
        kinds = MODES[mode.split()[0]], ORDERS[order or "fcfs"]
        return {"error": reason(error, *kinds) or own.described(error)}
    return {
        "answers": run.answers,
        "token_times": base64.b64encode(run.token_times.tobytes()).decode(),  # of float64
        "rows": run.rows,
        "iterations": run.iterations,
        "history": run.observer.json(variant) if grid else None,
    }


def learn(code: str) -> dict[str, Any]:
    """Load the reader's policies and orders in place of those before; return their names, and the
    error in a sentence.
    """
    for table in (MODES, ORDERS):
        for name in [name for name in table if name.startswith(f"{FILE}:")]:
            del table[name]
    os.environ.pop(own.HANDED_ON, None)
    own.PROBLEMS.clear()
    path = Path(FILE).resolve()
    path.write_text(code)
    try:
        names = [f"{FILE}:{word.rpartition(':')[2]}" for word in own.offered(path)]
    except Exception as error:
        names, own.PROBLEMS[FILE] = [], own.described(error, str(path))
    own.load(names, MODES, ORDERS)
    return {
        "modes": [name for name in names if name in MODES],
        "orders": [name for name in names if name in ORDERS],
        "error": "; ".join(own.PROBLEMS.values()),
    }
