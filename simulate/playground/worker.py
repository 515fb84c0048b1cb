"""Runs of the playground: a state of its page in, what a variant did with the trace out.

The page's worker calls `answer` in Pyodide, which has the standard library and sortedcontainers
alone. So draws are Python's own, and settings come from a table that `playground.build` took
from Configs. All else is the code of ./simulate.sh, and so are the results, to the picosecond.
"""

from __future__ import annotations

import base64
import json
import math
import random
import shlex
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from scheduling import user_policies
from scheduling.building import build_group, build_scheduler
from scheduling.inference import Inference
from scheduling.latency import times_of
from scheduling.policies import MODES, ORDERS, VICTIMS
from scheduling.records import IterationRecord
from scheduling.sampling import Sampling
from scheduling.user_policies import reason
from server.live.observer import RunObserver, about
from simulate.asynchronous import AsynchronousReplica
from simulate.costs import load
from simulate.loop import PS, Arrival, Loop, seconds
from simulate.replica import SimulatedReplica, Stretch
from stats import ROW_KINDS

FILE = "yours.py"  # the editor's text; a mode, an order or a victim in it is yours.py:NAME
ON_DEMAND = "dynamic --kv-reservation demand"
GRID = 6000  # iterations of a history at most
LONGEST = 8192  # tokens of a prompt, and of a completion
State = Mapping[str, Any]  # the page's state, by the names of its sliders
Settings = Mapping[str, Mapping[str, Any]]  # a Config's settings, by the name of its costs


def answer(words: Sequence[Any], settings: Settings) -> Any:
    """Return what the worker asks for: a name and what it is about."""
    match words:
        case "learn", code:
            return learn(code)
        case "facts", state:
            drawn = [[request.at, request.num_tokens] for request in trace(state)]
            return {"command": command(state), "requests": drawn}
        case "served", variant, state, shown:
            return served(variant, state, settings, GRID * shown)
        case "trace", state:
            return jsonl(state)
    raise ValueError(f"{words!r} is no question")


class DrawnRequest(NamedTuple):
    """A request, by the fields of a line of trace.jsonl."""

    id: int
    at: float  # seconds
    prompt_ids: list[int]
    num_tokens: int
    seed: int


def trace(state: State) -> list[DrawnRequest]:
    """Draw the requests: Poisson arrivals, and log-normal lengths with a mean and a spread
    (standard deviation / mean), none above `longest`. A slider scales its own part of the draws.
    """
    gaps, prompts, answers = (random.Random(3 * state["seed"] + part) for part in range(3))
    at, requests = 0.0, []
    for i in range(state["requests"]):
        at += gaps.expovariate(1.0) / state["rate"]
        prompt = _length(prompts, state["prompt"], state)
        num_tokens = _length(answers, state["tokens"], state)
        requests.append(DrawnRequest(i, round(at, 9), [0] * prompt, num_tokens, i))
    return requests


def _length(rng: random.Random, mean: float, state: State) -> int:
    sigma = math.sqrt(math.log(1 + state["spread"] ** 2))
    drawn = mean * math.exp(sigma * rng.gauss(0, 1) - sigma**2 / 2)
    return min(state["longest"], max(1, round(drawn)))


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
        "--max-model-len": 2 * state["longest"],  # KV blocks may hold less than the whole context
    }
    words = ["./simulate.sh", "--trace", "trace.jsonl"]
    words += [str(word) for pair in sliders.items() for word in pair]
    words += ["--stream"] if state["stream"] else []
    for name, variant in zip("abcd", state["variants"]):
        words += ["--variant", f"{name}={variant}"]
    return shlex.join(words)


def rules_of(variant: str) -> tuple[dict[str, str], list[type[Any]]]:
    """Return what a variant sets, and the classes of its mode, order and victim. Raises KeyError
    with the name of one that is not there.
    """
    mode, *flags = variant.split()
    given = {name[2:].replace("-", "_"): value for name, value in zip(flags[::2], flags[1::2])}
    given = {"mode": mode, "order": "fcfs", "victim": "newest"} | given
    return given, [MODES[mode], ORDERS[given["order"]], VICTIMS[given["victim"]]]


def settings_of(variant: str, state: State, settings: Settings) -> SimpleNamespace:
    """Return the settings of a variant, written as "dynamic --order sjf", and of the sliders."""
    given, rules = rules_of(variant)
    values = {**settings[state["costs"]], **given}
    for kind in rules:  # the reader's own are in no Config
        values = {each.name: each.default for each in fields(kind)} | values
    values |= {"max_batch_size": state["rows"], "token_budget": state["budget"]}
    values |= {"n_blocks": state["blocks"]}
    return SimpleNamespace(**values, max_in_flight=state["rows"] + values["max_waiting"])


class ServedVariant:
    """A variant that has served the trace. Raises what a policy of the reader's does.

    shown: iterations of its history.
    """

    def __init__(self, variant: str, state: State, settings: Settings, shown: int = 0):
        self.rows = dict.fromkeys(ROW_KINDS, 0)
        self.answers: list[list[float]] = []  # id; first token, last one and end at the client
        self.token_times = array("d")  # at the server, in the order of `answers`
        self._costs, self._stream, self._shown = load(state["costs"]), state["stream"], shown
        self._most_rows = 1
        self._its = its = settings_of(variant, state, settings)
        scheduler = build_scheduler(its)
        facts = about(its, its.model) | {"simulated": f"simulated, costs {self._costs.name}"}
        self.observer = RunObserver(scheduler, facts, zero=0.0)
        self._numbers: dict[Inference, int] = {}
        loop = Loop()
        kind = AsynchronousReplica if its.ahead else SimulatedReplica
        replica = kind(
            loop, scheduler, self._costs, computed=self._computed, ended=self._ended, jump=True
        )
        loop.serve(self._arrivals(trace(state)), replica)

    def _arrivals(self, requests: Iterable[DrawnRequest]) -> Iterator[Arrival]:
        for request in requests:
            how, n = [Sampling(seed=request.seed)], request.num_tokens
            group = build_group(self._its, [request.prompt_ids], n, how, streamed=self._stream)
            self._numbers[group[0]] = request.id
            yield request.at + self._costs.request / PS, group

    def _computed(self, stretch: Stretch) -> None:
        iteration = stretch.iteration
        self._most_rows = max(self._most_rows, len(iteration.rows))
        for kind, n in IterationRecord(0.0, 0.0, iteration).rows.items():
            self.rows[kind] += n * stretch.n
        for k in range(min(stretch.n, self._shown)):
            if k == 1:  # from now on each row computes one token
                iteration = iteration._replace(rows=stretch.rows(1))
            begun = stretch.begins(k)
            record = IterationRecord(seconds(begun), (stretch.end(k) - begun) / PS, iteration)
            self.observer.iteration(record)
            self._shown -= 1

    def _ended(self, now: float, inference: Inference) -> Iterable[Arrival]:
        """Note an answer, with the times of `SimulatedServer`."""
        end = ended_at = now + self._costs.answer / PS
        if inference.streamed and inference.answered_at is not None:
            end = inference.answered_at + self._costs.answer / PS
        times = times_of(inference).ending_at(end)
        number = self._numbers[inference]
        self.answers.append([number, times.first_token_at, times.last_token_at, ended_at])
        self.token_times.extend(inference.token_times)
        self.observer.answered(inference)
        return ()

    def history(self, name: str) -> str:
        """Return the history, with as many lines as rows were computed together at most."""
        self.observer.history.about["max_batch_size"] = self._most_rows
        return self.observer.json(name)


def served(variant: str, state: State, settings: Settings, shown: int = 0) -> dict[str, Any]:
    """Serve the trace by a variant; return what charts show, with the history of so many iterations
    if any are shown, or the error in a sentence.
    """
    try:
        _, rules = rules_of(variant)
    except KeyError as missing:
        return {"error": f"there is no {missing.args[0]}"}
    try:
        run = ServedVariant(variant, state, settings, shown)
    except Exception as error:
        return {"error": reason(error, *rules) or str(error)}
    times = base64.b64encode(run.token_times.tobytes()).decode()
    history = run.history(variant) if shown else ""
    return {"answers": run.answers, "token_times": times, "rows": run.rows, "history": history}


def learn(code: str) -> dict[str, Any]:
    """Take the reader's policies, orders and victims in place of those before; return their names,
    and the error in a sentence. A victim comes as the mode in which rows are preempted.
    """
    for table in (MODES, ORDERS, VICTIMS):
        for name in [name for name in table if name.startswith(FILE)]:
            del table[name]
    user_policies.PROBLEMS.clear()
    names: list[str] = []
    path = Path(FILE).resolve()
    path.write_text(code, "utf-8")
    try:
        names = [f"{FILE}:{word.rpartition(':')[2]}" for word in user_policies.offered(path)]
    except Exception as error:
        user_policies.PROBLEMS[FILE] = user_policies.described(error, str(path))
    user_policies.load(names, {})
    return {
        "modes": [name for name in names if name in MODES]
        + [f"{ON_DEMAND} --victim {name}" for name in names if name in VICTIMS],
        "orders": [name for name in names if name in ORDERS],
        "error": "; ".join(user_policies.PROBLEMS.values()),
    }
