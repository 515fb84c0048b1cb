"""Workloads: what is asked, how much of it, and when. A workload is drawn once from a seed and
saved as a trace.

A trace is a file of JSON lines, one request each; `at` is seconds from the start. Where `users` is
given the loop is closed: a request goes out as soon as fewer than `users` are in flight. Where
`after` is given, the request is a later turn of a conversation. `user` and `priority`, where given,
are told to the server. Every mode replays the same trace.
"""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from client import draws, groups
from client.columns import NOBODY, Trace
from client.draws import Arrivals, Sessions, WorkloadError, arrivals, folded_normal
from client.prompts import PROMPTS, Prefixes, TokenIds, count
from client.users import Priorities, Sent, Users

SELECTIONS = ("random", "descend")
# between the seeds of two traces' requests: what is drawn by them differs from trace to trace, such
# as the texts, and the errors of a length predictor
SEEDS_APART = 10**6
REFERENCE = 2**20  # draws, whose mean is a distribution's within 0.1% (of a standard deviation)


class Request(BaseModel):
    """One line of a trace. What is not the client's own goes to the server as it is.

    `prompt` of a later turn is its own words alone, and `at` when its conversation begins.
    """

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
    user: str | None = Field(default=None, min_length=1)  # on whose behalf it is sent
    priority: int | None = Field(default=None, ge=0)  # its level, 1 is the highest
    after: int | None = None  # id of the turn before it: sent `think_s` after that one's answer
    think_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    def body(self) -> dict[str, Any]:
        """The JSON body of POST /inference."""
        own = {"id", "at", "users", "after", "think_s"}
        return self.model_dump(exclude=own, exclude_none=True)

    @property
    def ids(self) -> list[int]:
        """The prompt in ids; of a text those that `--tokenizer bytes` gives it; of a later turn
        its own alone.
        """
        return self.prompt_ids or list((self.prompt or "").encode())

    def continuing(self, said: str) -> Request:
        """The turn as it is sent: the conversation so far, and its own words after it."""
        return self.model_copy(update={"prompt": said + (self.prompt or "")})


class PromptData:
    """Draws requests: completion lengths from `lengths`, prompts of |N(10, 10)| counting words or
    token ids, arrivals apart.

    Lengths: `normal` is the original experiment's clip(|⌈N(100, 100)⌉|, 1, 200), `choice` its
    choice of 1, 25 and 100; `exponential` and `lognormal` are rounded up, and cut at their cap.
    Selection: `random`, or `descend` for the longest first. Prompts: `text`, or random `ids`, as
    many as there would be words; `prefixes` ("K:TOKENS:ZIPF") put shared ids before them.
    `sessions` ("TURNS:THINK_S") make conversations of the requests; `priorities` ("SHARE:LEVEL"
    each) draw a level for each request or conversation. None of this changes the lengths or the
    arrivals that are drawn from a seed. `users` ("NAME,RATE,LENGTHS[,FROM-TO]" each) bring lengths
    and arrivals of their own. Raises WorkloadError for what it does not know, or what does not go
    together.
    """

    def __init__(
        self,
        lengths: str = "normal",
        selection: str = "random",
        seed: int = 0,
        temperature: float = 0.0,
        prompts: str | None = None,
        prefixes: str | None = None,
        sessions: str | None = None,
        users: Sequence[str] | None = None,
        priorities: Sequence[str] | None = None,
    ):
        for what, given, valid in (
            ("selection", selection, SELECTIONS),
            ("prompts", prompts or "text", PROMPTS),
        ):
            if given not in valid:
                raise WorkloadError(f"unknown {what} {given!r}; valid ones are {', '.join(valid)}")
        self._draw_lengths = draws.lengths(lengths)
        self._prefixes = Prefixes.parse(prefixes) if prefixes else None
        self._sessions = Sessions.parse(sessions) if sessions else None
        self._users = Users(users) if users else None
        self._priorities = Priorities(priorities) if priorities else None
        if prefixes and prompts == "text":
            raise WorkloadError("shared prefixes are token ids; leave out --prompts text")
        if sessions and (prefixes or prompts == "ids"):
            raise WorkloadError(
                "a conversation is text, as its answers are, and shares its own past; with "
                "--sessions leave out --prompts ids and --prefixes"
            )
        self._as_ids = prompts == "ids" or prefixes is not None
        self.selection, self.seed, self.temperature = selection, seed, temperature
        told = {"lengths": lengths, "selection": selection, "prefixes": prefixes}
        told |= {"prompts": "ids" if self._as_ids else None, "sessions": sessions}
        told |= {"priorities": " ".join(priorities or ())}
        if users:
            told |= {"lengths": "of each user", "arrival": " ".join(users)}
        self.told = {name: value for name, value in told.items() if value}  # as a report names it

    @functools.cached_property
    def mean_num_tokens(self) -> float:
        """Completion tokens of a request on average, of the distribution and not of a draw."""
        return float(np.mean(self._draw_lengths(np.random.default_rng(0), REFERENCE)))

    def requests(self, n: int | None, arrival: str = "burst", scaled: bool = False) -> Trace:
        """Return n requests that arrive as `arrival` says; the same for the same arguments.

        Of conversations the first turns arrive so. Users arrive as they say, and where they say
        until when, n is None. scaled: their mean length is the
        distribution's own, as nearly as its lengths allow, and their rate exactly that of
        `arrival`. A draw of a few hundred is apart from either by several percent. Raises
        WorkloadError for an arrival that it does not know, or that conversations cannot have.
        """
        if self._users:
            sent = self._users.draw(n, self.seed)
            words = folded_normal(np.random.default_rng(self.seed), len(sent.at), 10, 10, most=64)
            return self._trace(Arrivals(sent.at), sent.num_tokens, words, "", sent)
        assert n is not None, "users alone can say until when instead"
        rng = np.random.default_rng(self.seed)
        tokens = self._draw_lengths(rng, n)
        if scaled:
            self._to_mean(tokens)
        words = folded_normal(rng, n, mean=10, std=10, most=64)
        if self.selection == "descend":
            longest_first = np.argsort(-tokens, kind="stable")
            tokens, words = tokens[longest_first], words[longest_first]
        opening = _opening(arrival, math.ceil(n / self._turns), self.seed, scaled, self._turns > 1)
        return self._trace(opening, tokens, words, arrival if scaled else "")

    @property
    def _turns(self) -> int:
        return self._sessions.turns if self._sessions else 1

    def _trace(
        self,
        opening: Arrivals,
        tokens: np.ndarray,
        words: np.ndarray,
        draw: str,
        sent: Sent | None = None,
    ) -> Trace:
        """Requests of so many tokens and words; conversations are opened. draw: of `_prompts`."""
        n, number = len(tokens), np.arange(len(tokens))
        talk = number // self._turns
        after = np.where(number % self._turns, number - 1, -1)
        at, think_s, priority = opening.at[talk], np.full(n, math.nan), np.zeros(n, int)
        if self._sessions:
            think_s = np.where(after < 0, math.nan, self._sessions.think(n, self.seed))
        if self._priorities:  # a conversation keeps its own
            priority = self._priorities.draw(math.ceil(n / self._turns), self.seed)[talk]
        user, names = (sent.user, sent.names) if sent else (np.zeros(n, int), [NOBODY])
        prompt = self._prompts(words, draw)

        def make(i: int) -> Request:
            later = after[i] >= 0
            return Request(
                id=i,
                at=float(at[i]),
                users=opening.users,
                num_tokens=int(tokens[i]),
                temperature=self.temperature,
                seed=(self.seed * SEEDS_APART + i) % 2**63,
                user=names[user[i]] or None,
                priority=int(priority[i]) or None,
                after=i - 1 if later else None,
                think_s=float(think_s[i]) if later else None,
                **prompt(i),
            )

        return Trace(make, number, at, tokens, user, names, priority, after, think_s, opening.users)

    def _prompts(self, words: np.ndarray, draw: str) -> Callable[[int], dict[str, Any]]:
        """What gives the prompt of a request by its number, as long as its words.

        draw: which one of own ids. A sweep's rates meet one server: what one of them sent before
        is in its cache, and own ids that are sent again would be found there.
        """
        if not self._as_ids:
            turns = self._turns
            return lambda i: {"prompt": " " * (i % turns > 0) + count(int(words[i]))}
        own = TokenIds(np.random.default_rng([self.seed, 3, zlib.crc32(draw.encode())]), words)
        if self._prefixes:
            shared = self._prefixes.draw(len(own), self.seed)
            return lambda i: {"prompt_ids": shared[i] + own[i]}
        return lambda i: {"prompt_ids": own[i]}

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


def rescheduled(requests: Sequence[Request], arrival: str, seed: int) -> Trace:
    """The same requests, sent as `arrival` says; of conversations the first turns.

    Raises WorkloadError for an arrival that it does not know, or that conversations cannot have.
    """
    trace = Trace.of(requests)
    firsts, at = trace.firsts, trace.at.copy()
    opening = _opening(arrival, len(firsts), seed, False, len(firsts) < len(trace))
    at[firsts] = opening.at
    for i in np.flatnonzero(trace.after >= 0):
        at[i] = at[trace.after[i]]

    def make(i: int) -> Request:
        return trace[i].model_copy(update={"at": float(at[i]), "users": opening.users})

    return replace(trace, make=make, at=at, users=opening.users)


def _opening(arrival: str, n: int, seed: int, scaled: bool, conversing: bool) -> Arrivals:
    """The arrivals of n requests, or of the first turns of n conversations. Raises
    WorkloadError.
    """
    found = arrivals(arrival, n, seed, scaled)
    if conversing and found.users:
        raise WorkloadError(
            f"--arrival {arrival} sends a request for every answer, and in a conversation answers "
            f"say already what is sent next; name another, such as poisson:2"
        )
    return found


def describe(requests: Sequence[Request]) -> dict[str, Any]:
    """What a workload asks for, as realised.

    In a closed loop the answers set the rate; in conversations they set that of later turns, and
    what is told is the rate at which conversations begin.
    """
    trace = Trace.of(requests)
    at = np.sort(trace.at[trace.firsts])
    span = float(at[-1] - at[0])
    rate = (len(at) - 1) / span if span else None
    pauses = trace.think_s[trace.after >= 0]
    return {
        "requests": len(trace),
        "mean_num_tokens": float(np.mean(trace.num_tokens)),
        "requested_rate": None if len(pauses) else rate,
        "index_of_dispersion": _index_of_dispersion(at),
        "users": trace.users,
        **groups.asked(trace),
        "conversations": {
            "number": len(at), "rate": rate, "mean_think_s": float(np.mean(pauses)),
        } if len(pauses) else None,
    }  # fmt: skip


def described(load: Mapping[str, Any]) -> str:
    """`describe` in words."""
    talk = load.get("conversations")  # earlier versions knew none
    rate = talk["rate"] if talk else load["requested_rate"]
    if load["users"]:
        when = f"{load['users']} users, each of whom sends the next when its last is answered"
    elif rate is None:
        when = "all at once"
    else:
        when = f"{rate:.4g} {'conversations' if talk else 'requests'} a second"
        if load["index_of_dispersion"] is not None:
            when += f" with index of dispersion {load['index_of_dispersion']:.2f}"
    of = f" in {talk['number']} conversation{'s' * (talk['number'] > 1)}" if talk else ""
    if talk:
        when += f", each later turn {talk['mean_think_s']:.3g} s on average after an answer"
    return (
        f"{load['requests']:,} requests{of}, {load['mean_num_tokens']:.1f} completion tokens on "
        f"average, {when}{groups.asked_in_words(load)}"
    )


def _index_of_dispersion(at: np.ndarray) -> float | None:
    """Variance / mean of arrivals counted in windows of ten mean gaps: 1 for Poisson, more for
    bursts; None below 5 windows.
    """
    windows = len(at) // 10
    if windows < 5 or at[0] == at[-1]:
        return None
    counts, _ = np.histogram(at, bins=windows)
    return float(counts.var(ddof=1) / counts.mean())


def save_json(path: Path, value: Any) -> None:
    """JSON as results are saved: indented, and refusing NaN, which no other reader accepts."""
    with path.open("w") as file:  # piece by piece: one string of it can be as large as a run
        file.writelines(json.JSONEncoder(indent=1, allow_nan=False).iterencode(value))
        file.write("\n")
