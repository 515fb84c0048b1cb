"""Workloads: what is asked, how much of it, and when. A workload is drawn once from a seed and saved as a trace.

A trace is a file of JSON lines, one request each; `at` is seconds from the start. Every mode replays the
same trace. `LENGTHS` and `ARRIVALS` name what can be asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

LENGTHS = "normal, choice[:1,25,100], uniform:LOW:HIGH, fixed:N"
ARRIVALS = "wait:SECONDS, poisson:RATE, burst"
ORDERS = ("random", "descend")
COUNTING = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty"]


class WorkloadError(ValueError):
    """A workload or trace that cannot be used; the message says what can."""


class Request(BaseModel):
    """One line of a trace. What is not the client's own goes to the server as it is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: int
    at: float = Field(ge=0, allow_inf_nan=False)
    prompt: str | None = None
    prompt_ids: list[int] | None = None
    num_tokens: int = Field(ge=1)
    temperature: float = Field(default=0.0, ge=0)
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def body(self) -> dict[str, Any]:
        """The JSON body of POST /inference."""
        return self.model_dump(exclude={"id", "at"}, exclude_none=True)


class PromptData:
    """Draws requests: completion lengths from `lengths`, prompts of |N(10, 10)| counting words, arrivals apart.

    Lengths: `normal` is the original experiment's clip(|⌈N(100, 100)⌉|, 1, 200), `choice` its choice of 1, 25 and
    100. Order: `random`, or `descend` for the longest first. Raises WorkloadError for what it does not know.
    """

    def __init__(self, lengths: str = "normal", order: str = "random", seed: int = 0, temperature: float = 0.0):
        if order not in ORDERS:
            raise WorkloadError(f"unknown order {order!r}; valid ones are {', '.join(ORDERS)}")
        self._draw_lengths = _lengths(lengths)
        self.order, self.seed, self.temperature = order, seed, temperature

    def requests(self, n: int, arrival: str = "burst") -> list[Request]:
        """Return n requests that arrive as `arrival` says; the same for the same arguments."""
        rng = np.random.default_rng(self.seed)
        tokens = self._draw_lengths(rng, n)
        words = _folded_normal(rng, n, mean=10, std=10, most=64)
        if self.order == "descend":
            longest_first = np.argsort(-tokens, kind="stable")
            tokens, words = tokens[longest_first], words[longest_first]
        at = arrivals(arrival, n, self.seed)
        return [
            Request(
                id=i, at=at[i], prompt=count(int(words[i])), num_tokens=int(tokens[i]), temperature=self.temperature, seed=i
            )
            for i in range(n)
        ]


def count(words: int) -> str:
    """The first `words` counting words: "one two three"."""
    return " ".join(COUNTING[i - 1] if i < 20 else TENS[i // 10 - 2] + ("-" + COUNTING[i % 10 - 1] if i % 10 else "")
                    for i in range(1, words + 1))  # fmt: skip


def _folded_normal(rng: np.random.Generator, n: int, mean: float, std: float, most: int) -> np.ndarray:
    return np.clip(np.abs(np.ceil(rng.normal(mean, std, n))), 1, most).astype(int)


def _lengths(spec: str) -> Callable[[np.random.Generator, int], np.ndarray]:
    name, *arguments = spec.split(":")
    try:
        match name, arguments:
            case "normal", []:
                return lambda rng, n: _folded_normal(rng, n, mean=100, std=100, most=200)
            case "choice", [] | [_]:
                values = _positive(arguments[0].split(",")) if arguments else [1, 25, 100]
                return lambda rng, n: rng.choice(values, n)
            case "uniform", [_, _]:
                low, high = _positive(arguments)
                if low <= high:
                    return lambda rng, n: rng.integers(low, high + 1, n)
            case "fixed", [_]:
                [length] = _positive(arguments)
                return lambda rng, n: np.full(n, length)
    except ValueError:
        pass
    raise WorkloadError(f"unknown lengths {spec!r}; valid ones are {LENGTHS}")


def _positive(texts: Sequence[str]) -> list[int]:
    values = [int(text) for text in texts]
    if min(values) < 1:
        raise ValueError
    return values


def arrivals(spec: str, n: int, seed: int) -> list[float]:
    """Return n instants in seconds, the first at 0.

    `wait:S`: gaps uniform in 0 … S seconds, as the original's client; `poisson:R`: R a second on average;
    `burst`: all at 0. Drawn apart from the lengths, so that the same requests can arrive in another way.
    """
    rng = np.random.default_rng([seed, 1])
    name, _, argument = spec.partition(":")
    try:
        match name, float(argument) if argument else None:
            case "wait", float(most) if 0 <= most < float("inf"):
                gaps = rng.uniform(0, most, n)
            case "poisson", float(rate) if 0 < rate < float("inf"):
                gaps = rng.exponential(1 / rate, n)
            case "burst", None:
                gaps = np.zeros(n)
            case _:
                raise ValueError
    except ValueError:
        raise WorkloadError(f"unknown arrival {spec!r}; valid ones are {ARRIVALS}") from None
    gaps[:1] = 0
    return [round(float(at), 6) for at in np.cumsum(gaps)]


def save_trace(path: Path, requests: Sequence[Request]) -> None:
    path.write_text("".join(request.model_dump_json(exclude_none=True) + "\n" for request in requests))


def load_trace(path: Path) -> list[Request]:
    """Read a trace. Raises WorkloadError naming the file and the line that is wrong."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"cannot read the trace {path}: {error}") from None
    requests = []
    for number, line in enumerate(lines, 1):
        try:
            request = Request.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = f"{first['loc'][0]}: " if first["loc"] else ""
            raise WorkloadError(f"{path}, line {number}: {where}{first['msg']}") from None
        if (request.prompt is None) == (request.prompt_ids is None):
            raise WorkloadError(f"{path}, line {number}: give either prompt or prompt_ids")
        requests.append(request)
    if not requests:
        raise WorkloadError(f"{path} holds no requests")
    if len({request.id for request in requests}) < len(requests):
        raise WorkloadError(f"{path} holds an id twice; number the requests anew")
    return requests


def workload(trace: Path | None, n: int, lengths: str, arrival: str, order: str, seed: int) -> list[Request]:
    """The requests of a trace file if one is given, else n drawn ones."""
    return load_trace(trace) if trace else PromptData(lengths, order, seed).requests(n, arrival)


def describe(requests: Sequence[Request]) -> dict[str, Any]:
    """What a workload asks for, as realised."""
    tokens = [request.num_tokens for request in requests]
    span = max(request.at for request in requests)
    return {
        "requests": len(requests),
        "mean_num_tokens": float(np.mean(tokens)),
        "requested_rate": (len(requests) - 1) / span if span else None,
    }


def dumps(value: Any) -> str:
    """JSON as results are saved: indented, and refusing NaN, which no other reader accepts."""
    return json.dumps(value, indent=1, allow_nan=False) + "\n"
