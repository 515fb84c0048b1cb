"""Users with a rate and lengths of their own, and the priorities and classes of requests.

All are drawn from the seed apart from all else, so that a seed's prompts, lengths and arrivals are
the same with and without priorities or classes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from client import draws
from client.draws import Lengths, WorkloadError, in_microseconds, number
from scheduling.inference import Slo
from scheduling.policies.deadlines import read_slo_classes

NAME = re.compile(r"[\w.-]+")  # a user's or a server's: any of these may be a file name
MISSING = re.compile(r"#?NA|(#?N/A )?#?N/A|n/a|<NA>|NULL|null|None|-?nan|-?NaN|-?1\.#(IND|QNAN)")
SECONDS = re.compile(r"([\d.]+)-([\d.]+)")


def missing(name: str | None) -> str:
    """Return why a variant, user or class cannot have a name in requests.csv, if so."""
    return f"{name} is a missing value to pandas.read_csv" if MISSING.fullmatch(name or "") else ""


class Drawn(NamedTuple):
    """Requests by time: their instants in seconds, their users and completion tokens."""

    at: np.ndarray
    user: np.ndarray  # number of its user in `names`
    names: list[str]  # by their first requests
    num_tokens: np.ndarray


class Stream(NamedTuple):
    """Poisson arrivals of one user, `rate` a second. A user who is named twice has two."""

    user: str
    rate: float
    lengths: Lengths
    begins: float = 0.0
    ends: float | None = None  # None: with the trace

    @classmethod
    def parse(cls, spec: str) -> Stream:
        """Return the stream of "b,2,choice:1,25,10-40". Raises WorkloadError."""
        try:
            user, rate, rest = spec.split(",", 2)
            # lengths may have commas, `choice:1,25,100`, but no hyphens
            lengths, _, last = rest.rpartition(",")
            seconds = SECONDS.fullmatch(last)
            begins, ends = map(float, seconds.groups()) if seconds else (0.0, None)
            if not NAME.fullmatch(user) or (ends is not None and not begins < ends < math.inf):
                raise ValueError
            if why := missing(user):
                raise WorkloadError(f"{why}; choose another name")
            distribution = draws.lengths(lengths if seconds else rest)
            return cls(user, number(rate), distribution, begins, ends)
        except WorkloadError as error:
            raise WorkloadError(f"--users {spec!r}: {error}") from None
        except ValueError:
            raise WorkloadError(
                f"unknown user {spec!r}; give NAME,RATE,LENGTHS or NAME,RATE,LENGTHS,FROM-TO, such "
                f"as modest,2,uniform:50:200,10-40: two requests per second from second 10 to 40"
            ) from None

    def draw(
        self, n: int | None, until: float, seed: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return instants and lengths of the first n requests; if n is None, of all before `until`.
        They are drawn apart, so that the same requests can come at another rate.
        """
        rng = np.random.default_rng([*seed, 0])
        if n is not None:
            at = rng.exponential(1 / self.rate, n).cumsum()
        else:
            seconds = (until if self.ends is None else self.ends) - self.begins
            at = self.begins + np.sort(rng.uniform(0, seconds, rng.poisson(self.rate * seconds)))
        return in_microseconds(at), self.lengths(np.random.default_rng([*seed, 1]), len(at))


class Users:
    """Two users or more, who send at once."""

    def __init__(self, specs: Sequence[str]):
        """Raises WorkloadError for an unknown form, and for one user alone."""
        self._streams = [Stream.parse(spec) for spec in specs]
        if len({stream.user for stream in self._streams}) < 2:
            raise WorkloadError(
                "--users needs two users or more, such as greedy,20,uniform:50:200 "
                "modest,2,uniform:50:200,10-40; for one, give --arrival and --lengths"
            )

    @property
    def until(self) -> float | None:
        """End of the trace in seconds: the last stated end of a user; None where none is stated."""
        return max((s.ends for s in self._streams if s.ends is not None), default=None)

    @property
    def rate(self) -> float:
        """Requests per second of all users, while each of them sends."""
        return sum(s.rate for s in self._streams)

    def draw(self, n: int | None, seed: int) -> Drawn:
        """Return all requests by time: the first n, or until `until`. Raises WorkloadError."""
        until = self.until
        assert (n is None) != (until is None), "n is for users without a stated end"
        drawn = [s.draw(n, until or 0.0, [seed, 9, k]) for k, s in enumerate(self._streams)]
        at, tokens = (np.concatenate(columns) for columns in zip(*drawn))
        streams = np.repeat(np.arange(len(drawn)), [len(instants) for instants, _ in drawn])
        by_time = np.argsort(at, kind="stable")[:n]
        users = [stream.user for stream in self._streams]
        names = list(dict.fromkeys(users[k] for k in streams[by_time].tolist()))
        if absent := set(users) - set(names):
            fix = "give it a higher rate" + (", or more seconds" if until else " or --numsamples")
            raise WorkloadError(
                f"user {min(absent)} sends none of the {len(by_time)} requests of seed {seed}; "
                f"{fix}"
            )
        number_of = np.array([names.index(user) for user in users])
        return Drawn(at[by_time], number_of[streams[by_time]], names, tokens[by_time])


class Shares:
    """Values that requests have, and which share of the requests has each."""

    def __init__(
        self, name: str, specs: Sequence[str], shares: Sequence[float], values: Sequence[int]
    ):
        """name: the flag's. Raises WorkloadError unless the shares sum to 1."""
        if not math.isclose(total := sum(shares), 1, abs_tol=1e-6):
            every = " ".join(specs)
            raise WorkloadError(f"the shares of {name} {every} sum to {total:g}; make it 1")
        self._shares, self._values = np.array(shares) / total, values

    def draw(self, n: int, *seed: int) -> np.ndarray:
        """Return the value of each of n requests."""
        return np.random.default_rng(seed).choice(self._values, n, p=self._shares)


def read_priorities(specs: Sequence[str]) -> Shares:
    """Return levels, 1 the highest: ["0.1:1", "0.9:2"], a tenth has 1. Raises WorkloadError."""
    try:
        pairs = [spec.split(":") for spec in specs]
        shares, levels = [number(share) for share, _ in pairs], [int(level) for _, level in pairs]
        if min(levels) < 0 or len(set(levels)) < len(specs):
            raise ValueError
    except ValueError:
        raise WorkloadError(
            f"unknown priorities {' '.join(specs)!r}; give SHARE:LEVEL of each level, such as "
            f"0.1:1 0.9:2: a tenth of the requests has level 1, the highest (0: the server's "
            f"default)"
        ) from None
    return Shares("--priorities", specs, shares, levels)


def read_slo_mix(specs: Sequence[str]) -> tuple[dict[str, Slo], Shares]:
    """Return classes with limits and their numbers: ["0.3:chat=ttft:200,tpot:50", "0.7:batch=…"].
    Raises WorkloadError.
    """
    try:
        pairs = [spec.split(":", 1) for spec in specs]
        shares = [number(share) for share, _ in pairs]
    except ValueError:
        raise WorkloadError(
            f"unknown mix {' '.join(specs)!r}; give SHARE:NAME=ttft:MS,tpot:MS of each class, "
            f"such as 0.3:interactive=ttft:200,tpot:50 0.7:batch=ttft:10000"
        ) from None
    try:
        classes = read_slo_classes(" ".join(each for _, each in pairs))
        if why := next(filter(None, map(missing, classes)), ""):
            raise ValueError(f"{why}; choose another name")
    except ValueError as error:
        raise WorkloadError(f"--slo-mix: {error}") from None
    return classes, Shares("--slo-mix", specs, shares, range(len(shares)))
