"""Workloads: what is asked, how much of it, and when. A workload is drawn once from a seed and
saved as a trace.

A trace is a file of JSON lines, one request each; `at` is seconds from the start. Where `users` is
given the loop is closed: a request goes out as soon as fewer than `users` are in flight. Every mode
replays the same trace. `LENGTHS` and `ARRIVALS` name what can be asked for.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

LENGTHS = (
    "normal, choice[:1,25,100], uniform:LOW:HIGH, fixed:N, exponential:MEAN:CAP, "
    "lognormal:MEDIAN:SIGMA:CAP"
)
ARRIVALS = "wait:SECONDS, poisson:RATE, gamma:RATE:CV, constant:RATE, burst, closed:USERS"
SELECTIONS = ("random", "descend")
REFERENCE = 2**20  # draws, whose mean is a distribution's within 0.1% (of a standard deviation)
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
    users: int | None = Field(default=None, ge=1)
    prompt: str | None = None
    prompt_ids: list[int] | None = None
    num_tokens: int = Field(ge=1)
    temperature: float = Field(default=0.0, ge=0)
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def body(self) -> dict[str, Any]:
        """The JSON body of POST /inference."""
        return self.model_dump(exclude={"id", "at", "users"}, exclude_none=True)


class PromptData:
    """Draws requests: completion lengths from `lengths`, prompts of |N(10, 10)| counting words,
    arrivals apart.

    Lengths: `normal` is the original experiment's clip(|⌈N(100, 100)⌉|, 1, 200), `choice` its
    choice of 1, 25 and 100; `exponential` and `lognormal` are rounded up, and cut at their cap.
    Selection: `random`, or `descend` for the longest first. Raises WorkloadError for what it does
    not know.
    """

    def __init__(
        self,
        lengths: str = "normal",
        selection: str = "random",
        seed: int = 0,
        temperature: float = 0.0,
    ):
        if selection not in SELECTIONS:
            raise WorkloadError(
                f"unknown selection {selection!r}; valid ones are {', '.join(SELECTIONS)}"
            )
        self._draw_lengths = _lengths(lengths)
        self.selection, self.seed, self.temperature = selection, seed, temperature

    @functools.cached_property
    def mean_num_tokens(self) -> float:
        """Completion tokens of a request on average, of the distribution and not of a draw."""
        return float(np.mean(self._draw_lengths(np.random.default_rng(0), REFERENCE)))

    def requests(self, n: int, arrival: str = "burst", scaled: bool = False) -> list[Request]:
        """Return n requests that arrive as `arrival` says; the same for the same arguments.

        scaled: their mean length is the distribution's own, as nearly as its lengths allow, and
        their rate exactly that of `arrival`. A draw of a few hundred is apart from either by
        several percent.
        """
        rng = np.random.default_rng(self.seed)
        tokens = self._draw_lengths(rng, n)
        if scaled:
            self._to_mean(tokens)
        words = _folded_normal(rng, n, mean=10, std=10, most=64)
        if self.selection == "descend":
            longest_first = np.argsort(-tokens, kind="stable")
            tokens, words = tokens[longest_first], words[longest_first]
        at, users = arrivals(arrival, n, self.seed, scaled)
        return [
            Request(
                id=i, at=at[i], users=users, prompt=count(int(words[i])), num_tokens=int(tokens[i]),
                temperature=self.temperature, seed=i,
            )
            for i in range(n)
        ]  # fmt: skip

    def _to_mean(self, tokens: np.ndarray) -> None:
        """Draw lengths anew, here and there, as long as that brings their mean nearer to the
        distribution's.
        """
        rng = np.random.default_rng([self.seed, 2])
        left = round(self.mean_num_tokens * len(tokens)) - int(tokens.sum())
        tries = 100 * len(tokens)
        for i, drawn in zip(rng.integers(0, len(tokens), tries), self._draw_lengths(rng, tries)):
            if not left:
                break
            change = int(drawn - tokens[i])
            if abs(left - change) < abs(left):
                tokens[i] = drawn
                left -= change


def count(words: int) -> str:
    """The first `words` counting words: "one two three"."""
    return " ".join(
        COUNTING[i - 1]
        if i < 20
        else TENS[i // 10 - 2] + ("-" + COUNTING[i % 10 - 1] if i % 10 else "")
        for i in range(1, words + 1)
    )


def _folded_normal(
    rng: np.random.Generator, n: int, mean: float, std: float, most: int
) -> np.ndarray:
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
            case "exponential", [_, _]:
                mean, [cap] = _number(arguments[0]), _positive(arguments[1:])
                return lambda rng, n: _whole(rng.exponential(mean, n), cap)
            case "lognormal", [_, _, _]:
                median, sigma, [cap] = (
                    _number(arguments[0]),
                    _number(arguments[1]),
                    _positive(arguments[2:]),
                )
                return lambda rng, n: _whole(rng.lognormal(np.log(median), sigma, n), cap)
    except ValueError:
        pass
    raise WorkloadError(f"unknown lengths {spec!r}; valid ones are {LENGTHS}")


def _positive(texts: Sequence[str]) -> list[int]:
    values = [int(text) for text in texts]
    if min(values) < 1:
        raise ValueError
    return values


def _number(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise ValueError
    return value


def _whole(lengths: np.ndarray, cap: int) -> np.ndarray:
    return np.clip(np.ceil(lengths), 1, cap).astype(int)


class Arrivals(NamedTuple):
    """When requests are sent, in seconds, the first at 0; in a closed loop, how many users send
    them instead.
    """

    at: list[float]
    users: int | None = None


def arrivals(spec: str, n: int, seed: int, scaled: bool = False) -> Arrivals:
    """Return the arrivals of n requests. Raises WorkloadError for a process that it does not know.

    `wait:S`: gaps uniform in 0 … S seconds, as the original's client; `poisson:R`: R a second on
    average; `gamma:R:CV`: the same with gaps of this coefficient of variation, bursty above 1;
    `constant:R`: equal gaps; `burst`: all at 0; `closed:N`: N users, each of whom sends the next
    request when its last is answered. Drawn apart from the lengths, so that the same requests can
    arrive in another way, and at another rate in the same pattern. scaled: the gaps of this draw
    are stretched to their mean, so that the rate is R exactly.
    """
    rng = np.random.default_rng([seed, 1])
    name, *arguments = spec.split(":")
    users, mean = None, 0.0
    try:
        match name, arguments:
            case "wait", [most] if 0 <= float(most) < float("inf"):
                gaps, mean = rng.uniform(0, float(most), n), float(most) / 2
            case "poisson", [rate]:
                gaps, mean = rng.exponential(1, n) / _number(rate), 1 / _number(rate)
            case "gamma", [rate, cv]:
                shape = _number(cv) ** -2
                gaps, mean = rng.gamma(shape, 1 / shape, n) / _number(rate), 1 / _number(rate)
            case "constant", [rate]:
                gaps, mean = np.full(n, 1 / _number(rate)), 1 / _number(rate)
            case "burst", []:
                gaps = np.zeros(n)
            case "closed", [_]:
                gaps, [users] = np.zeros(n), _positive(arguments)
            case _:
                raise ValueError
    except ValueError:
        raise WorkloadError(f"unknown arrival {spec!r}; valid ones are {ARRIVALS}") from None
    gaps[:1] = 0
    if scaled and gaps.any():
        gaps *= mean * (n - 1) / gaps.sum()
    return Arrivals([round(float(at), 6) for at in np.cumsum(gaps)], users)


def rescheduled(requests: Sequence[Request], arrival: str, seed: int) -> list[Request]:
    """The same requests, sent as `arrival` says."""
    at, users = arrivals(arrival, len(requests), seed)
    return [
        request.model_copy(update={"at": t, "users": users}) for request, t in zip(requests, at)
    ]


def at_rate(arrival: str, rate: float) -> str:
    """The arrival process at another rate: `gamma:3:2` and 5 give `gamma:5:2`; what has no rate
    becomes Poisson.
    """
    name, *arguments = arrival.split(":")
    if name in ("gamma", "constant"):
        return ":".join([name, f"{rate:g}", *arguments[1:]])
    return f"poisson:{rate:g}"


def save_trace(path: Path, requests: Sequence[Request]) -> None:
    path.write_text(
        "".join(request.model_dump_json(exclude_none=True) + "\n" for request in requests)
    )


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
        if not (request.prompt or request.prompt_ids):
            raise WorkloadError(f"{path}, line {number}: the prompt is empty")
        requests.append(request)
    if not requests:
        raise WorkloadError(f"{path} holds no requests")
    if len({request.id for request in requests}) < len(requests):
        raise WorkloadError(f"{path} holds an id twice; number the requests anew")
    if len({request.users for request in requests}) > 1:
        raise WorkloadError(
            f"{path} names different numbers of users; a trace is one closed loop or none"
        )
    return requests


def describe(requests: Sequence[Request]) -> dict[str, Any]:
    """What a workload asks for, as realised. In a closed loop the answers set the rate."""
    tokens = [request.num_tokens for request in requests]
    at = sorted(request.at for request in requests)
    span = at[-1] - at[0]
    return {
        "requests": len(requests),
        "mean_num_tokens": float(np.mean(tokens)),
        "requested_rate": (len(requests) - 1) / span if span else None,
        "index_of_dispersion": _index_of_dispersion(at),
        "users": requests[0].users,
    }


def described(load: Mapping[str, Any]) -> str:
    """`describe` in words."""
    if load["users"]:
        when = f"{load['users']} users, each of whom sends the next when its last is answered"
    elif load["requested_rate"] is None:
        when = "all at once"
    else:
        when = f"{load['requested_rate']:.4g} requests a second"
        if load["index_of_dispersion"] is not None:
            when += f" with index of dispersion {load['index_of_dispersion']:.2f}"
    return (
        f"{load['requests']} requests, {load['mean_num_tokens']:.1f} completion tokens on "
        f"average, {when}"
    )


def _index_of_dispersion(at: Sequence[float]) -> float | None:
    """Variance / mean of arrivals counted in windows of ten mean gaps: 1 for Poisson, more for
    bursts; None below 5 windows.
    """
    windows = len(at) // 10
    if windows < 5 or at[0] == at[-1]:
        return None
    counts, _ = np.histogram(at, bins=windows)
    return float(counts.var(ddof=1) / counts.mean())


def dumps(value: Any) -> str:
    """JSON as results are saved: indented, and refusing NaN, which no other reader accepts."""
    return json.dumps(value, indent=1, allow_nan=False) + "\n"
