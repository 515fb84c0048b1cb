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
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from client import draws, groups
from client.draws import Arrivals, Sessions, WorkloadError, arrivals, folded_normal
from client.prompts import PROMPTS, Prefixes, count, token_ids
from client.users import Priorities, Sent, Users

SELECTIONS = ("random", "descend")
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

    def requests(
        self, n: int | None, arrival: str = "burst", scaled: bool = False
    ) -> list[Request]:
        """Return n requests that arrive as `arrival` says; the same for the same arguments.

        Of conversations the first turns arrive so. Users arrive as they say, and where they say
        until when, n is None. scaled: their mean length is the
        distribution's own, as nearly as its lengths allow, and their rate exactly that of
        `arrival`. A draw of a few hundred is apart from either by several percent. Raises
        WorkloadError for an arrival that it does not know, or that conversations cannot have.
        """
        if self._users:
            requests = self._of_users(self._users.draw(n, self.seed))
        else:
            assert n is not None, "users alone can say until when instead"
            requests = self._arriving(n, arrival, scaled)
        return self._with_levels(requests) if self._priorities else requests

    def _arriving(self, n: int, arrival: str, scaled: bool) -> list[Request]:
        rng = np.random.default_rng(self.seed)
        tokens = self._draw_lengths(rng, n)
        if scaled:
            self._to_mean(tokens)
        words = folded_normal(rng, n, mean=10, std=10, most=64)
        if self.selection == "descend":
            longest_first = np.argsort(-tokens, kind="stable")
            tokens, words = tokens[longest_first], words[longest_first]
        turns = self._sessions.turns if self._sessions else 1
        at, users = _opening(arrival, math.ceil(n / turns), self.seed, scaled, turns > 1)
        requests = [
            Request(
                id=i, at=at[i // turns], users=users, num_tokens=int(tokens[i]),
                temperature=self.temperature, seed=i, **prompt,
            )
            for i, prompt in enumerate(self._prompts(words, arrival if scaled else ""))
        ]  # fmt: skip
        return self._in_turns(requests, self._sessions) if self._sessions else requests

    def _of_users(self, sent: Sequence[Sent]) -> list[Request]:
        words = folded_normal(np.random.default_rng(self.seed), len(sent), 10, 10, most=64)
        return [
            Request(
                id=i, at=each.at, user=each.user, num_tokens=each.num_tokens,
                temperature=self.temperature, seed=i, **prompt,
            )
            for i, (each, prompt) in enumerate(zip(sent, self._prompts(words, "")))
        ]  # fmt: skip

    def _with_levels(self, requests: Sequence[Request]) -> list[Request]:
        """The requests with levels of priority; a conversation keeps its own."""
        assert self._priorities
        turns = self._sessions.turns if self._sessions else 1
        levels = self._priorities.draw(math.ceil(len(requests) / turns), self.seed)
        return [
            request.model_copy(update={"priority": levels[request.id // turns]})
            for request in requests
        ]

    def _prompts(self, words: np.ndarray, draw: str) -> list[dict[str, Any]]:
        """Of each request its prompt, as long as so many words.

        draw: which one of own ids. A sweep's rates meet one server: what one of them sent before
        is in its cache, and own ids that are sent again would be found there.
        """
        if not self._as_ids:
            return [{"prompt": count(int(n))} for n in words]
        own = token_ids(np.random.default_rng([self.seed, 3, zlib.crc32(draw.encode())]), words)
        if self._prefixes:
            shared = self._prefixes.draw(len(own), self.seed)
            own = [prefix + suffix for prefix, suffix in zip(shared, own)]
        return [{"prompt_ids": ids} for ids in own]

    def _in_turns(self, requests: Sequence[Request], sessions: Sessions) -> list[Request]:
        """The requests as conversations, each turn after the one before it."""
        think_s = sessions.think(len(requests), self.seed)
        return [
            request.model_copy(
                update={
                    "after": request.id - 1,
                    "think_s": think_s[request.id],
                    "prompt": f" {request.prompt}",
                }
            )
            if request.id % sessions.turns
            else request
            for request in requests
        ]

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


def rescheduled(requests: Sequence[Request], arrival: str, seed: int) -> list[Request]:
    """The same requests, sent as `arrival` says; of conversations the first turns.

    Raises WorkloadError for an arrival that it does not know, or that conversations cannot have.
    """
    firsts = _firsts(requests)
    at, users = _opening(arrival, len(firsts), seed, False, len(firsts) < len(requests))
    begins = {request.id: t for request, t in zip(firsts, at)}
    for request in requests:
        if request.after is not None:
            begins[request.id] = begins[request.after]
    return [
        request.model_copy(update={"at": begins[request.id], "users": users})
        for request in requests
    ]


def _firsts(requests: Sequence[Request]) -> list[Request]:
    """The requests that wait for no answer."""
    return [request for request in requests if request.after is None]


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
    firsts = _firsts(requests)
    at = sorted(request.at for request in firsts)
    span = at[-1] - at[0]
    rate = (len(firsts) - 1) / span if span else None
    pauses = [request.think_s for request in requests if request.think_s is not None]
    return {
        "requests": len(requests),
        "mean_num_tokens": float(np.mean([request.num_tokens for request in requests])),
        "requested_rate": None if pauses else rate,
        "index_of_dispersion": _index_of_dispersion(at),
        "users": requests[0].users,
        **groups.asked(requests),
        "conversations": {
            "number": len(firsts), "rate": rate, "mean_think_s": float(np.mean(pauses)),
        } if pauses else None,
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
        f"{load['requests']} requests{of}, {load['mean_num_tokens']:.1f} completion tokens on "
        f"average, {when}{groups.asked_in_words(load)}"
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
