"""Workloads: requests drawn once from a seed. `Workload.requests` makes a trace, which every mode
replays.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from client import draws
from client.draws import Arrivals, Prefixes, Sessions, TokenIds, WorkloadError, folded_normal
from client.trace_file import Context
from client.traces import ANONYMOUS, LIMITED, Request, Trace, openings
from client.users import Drawn, Users, read_priorities, read_slo_mix
from scheduling.inference import Slo

PROMPTS = ("text", "ids")
# between the seeds of two traces' requests: what is drawn by them differs from trace to trace, such
# as the texts, and the errors of a length predictor
SEEDS_APART = 10**6
REFERENCE = 2**20  # draws, whose mean is a distribution's within 0.1% (of a standard deviation)


class Workload:
    """Draws requests: completion lengths from `lengths`, prompts of |N(10, 10)| counting words or
    token ids, arrivals apart.

    Lengths: `normal` is the original experiment's clip(|⌈N(100, 100)⌉|, 1, 200), `choice` its
    choice of 1, 25 and 100; `exponential` and `lognormal` are rounded up, and cut at their cap.
    Prompts: `text`, or random `ids`, as many as there would be words, or as `prompt_lengths` says;
    `prefixes` ("K:TOKENS:ZIPF") put shared ids before them.
    `sessions` ("TURNS:THINK_S") make conversations of the requests; `priorities` ("SHARE:LEVEL"
    each) draw a level for each request or conversation, `slo_mix` ("SHARE:NAME=ttft:MS,tpot:MS"
    each) a class with limits, `adapters` ("N:DISTRIBUTION") a LoRA adapter. None of this changes
    the lengths or the arrivals that are drawn from a seed. `users` ("NAME,RATE,LENGTHS[,FROM-TO]"
    each) bring lengths and arrivals of their own. Lengths that do not fit into the `context` are
    cut. Raises WorkloadError for unknown values, and those that do not go together.
    """

    def __init__(
        self,
        lengths: str | None = None,
        seed: int = 0,
        temperature: float = 0.0,
        prompts: str | None = None,
        prompt_lengths: str | None = None,
        prefixes: str | None = None,
        sessions: str | None = None,
        users: Sequence[str] | None = None,
        priorities: Sequence[str] | None = None,
        slo_mix: Sequence[str] | None = None,
        adapters: str | None = None,
        context: Context | None = None,
    ):
        lengths = "normal" if lengths is None else lengths
        assert prompts in (None, *PROMPTS), "choices of the flag"
        self._draw_lengths = draws.lengths(lengths)
        self._draw_prompts = draws.lengths(prompt_lengths) if prompt_lengths else None
        self._prefixes = Prefixes.parse(prefixes) if prefixes else None
        self._sessions = Sessions.parse(sessions) if sessions else None
        self._users = Users(users) if users else None
        self._levels = read_priorities(priorities) if priorities else None
        self._mix = read_slo_mix(slo_mix) if slo_mix else None
        self._draw_adapters: Callable[[int, int], Sequence[str | None]] = lambda n, seed: [None] * n
        if adapters:
            self._draw_adapters = draws.adapters(adapters)
        if (prefixes or prompt_lengths) and prompts == "text":
            raise WorkloadError(
                "shared prefixes and prompts of stated lengths are token ids; leave out --prompts "
                "text"
            )
        self._as_ids = prompts == "ids" or bool(prefixes or prompt_lengths)
        if sessions and self._as_ids:
            raise WorkloadError(
                "a conversation is text, as its answers are, and shares its own past; with "
                "--sessions leave out --prompts ids, --prompt-lengths and --prefixes"
            )
        self._turns = self._sessions.turns if self._sessions else 1
        self.seed, self.temperature, self._context = seed, temperature, context
        words = {
            "lengths": "of each user" if users else lengths, "prompt_lengths": prompt_lengths,
            "prefixes": prefixes, "prompts": "ids" if self._as_ids else None,
            "sessions": sessions, "priorities": " ".join(priorities or ()),
            "slo_mix": " ".join(slo_mix or ()), "adapters": adapters,
            "arrival": " ".join(users or ()),
        }  # fmt: skip
        self.words = {name: value for name, value in words.items() if value}  # for a report

    @functools.cached_property
    def mean_num_tokens(self) -> float:
        """Mean completion tokens of the distribution; a draw's own mean differs."""
        return float(np.mean(self._draw_lengths(np.random.default_rng(0), REFERENCE)))

    def requests(self, n: int | None, arrival: str = "burst", scaled: bool = False) -> Trace:
        """Return n requests that arrive as `arrival` says; the same for the same arguments.

        Of conversations the first turns arrive so. Users arrive as they say, and where they say
        until when, n is None. scaled: the mean length is the distribution's own, as nearly as its
        lengths allow, and the rate exactly that of `arrival`. A draw of a few hundred is apart from
        either by several percent. Raises WorkloadError for an unknown arrival, or one that
        conversations cannot have.
        """
        rng = np.random.default_rng(self.seed)
        if self._users:
            drawn = self._users.draw(n, self.seed)
            words = self._prompt_lengths(rng, len(drawn.at))
            return self._trace(Arrivals(drawn.at), drawn.num_tokens, words, "", drawn)
        assert n is not None, "only users can have a stated end instead"
        tokens = self._draw_lengths(rng, n)
        if scaled:
            self._to_mean(tokens)
        words = self._prompt_lengths(rng, n)
        conversations = math.ceil(n / self._turns)
        opening = openings(arrival, conversations, self.seed, scaled, self._turns > 1)
        return self._trace(opening, tokens, words, arrival if scaled else "")

    def _prompt_lengths(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """Return the words, or token ids, of n prompts. rng: after the completions' lengths."""
        if self._draw_prompts:
            return self._draw_prompts(np.random.default_rng([self.seed, 14]), n)
        return folded_normal(rng, n, mean=10, std=10, most=64)

    def _trace(
        self,
        opening: Arrivals,
        tokens: np.ndarray,
        words: np.ndarray,
        draw: str,
        drawn: Drawn | None = None,
    ) -> Trace:
        """Return requests of these lengths. opening: the conversations'. draw: as in `_prompts`."""
        tokens, words = self._cut(tokens, words)
        n, number = len(tokens), np.arange(len(tokens))
        conversation = number // self._turns
        after = np.where(number % self._turns, number - 1, -1)
        at, think_s, priority = opening.at[conversation], np.full(n, math.nan), np.zeros(n, int)
        if self._sessions:
            think_s = np.where(after < 0, math.nan, self._sessions.think(n, self.seed))
        conversations = math.ceil(n / self._turns)
        if self._levels:  # a conversation keeps its own
            priority = self._levels.draw(conversations, self.seed, 8)[conversation]
        classes, slo_class = {ANONYMOUS: Slo()}, np.zeros(n, int)
        if self._mix:
            classes, shares = self._mix
            slo_class = shares.draw(conversations, self.seed, 10)[conversation]
        models = self._draw_adapters(conversations, self.seed)
        of_class = list(classes.items())
        user, names = (drawn.user, drawn.names) if drawn else (np.zeros(n, int), [ANONYMOUS])
        prompt = self._prompts(words, draw)

        def make(i: int) -> Request:
            later = after[i] >= 0
            name, slo = of_class[slo_class[i]]
            request = Request(
                id=i, at=float(at[i]), users=opening.users, num_tokens=int(tokens[i]),
                temperature=self.temperature, seed=(self.seed * SEEDS_APART + i) % 2**63,
                model=models[conversation[i]], user=names[user[i]] or None,
                priority=int(priority[i]) or None, slo_class=name or None,
                slo_ttft_ms=slo.ttft_ms, slo_tpot_ms=slo.tpot_ms,
                after=i - 1 if later else None,
                think_s=float(think_s[i]) if later else None,
            )  # fmt: skip
            return request.model_copy(update=prompt(i))  # hundreds of ids are not validated

        slo_ms = {
            name: np.array([getattr(slo, f"{name}_ms") or math.inf for slo in classes.values()])
            for name in LIMITED
        }
        return Trace(
            make, number, at, tokens, user, names, priority, slo_class, list(classes),
            {name: limits[slo_class] for name, limits in slo_ms.items()},
            after, think_s, opening.users,
        )  # fmt: skip

    def _cut(self, tokens: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return lengths that fit into the context, as far as prefixes leave room."""
        if self._context is None:
            return tokens, words
        most, sizes = self._context.tokens, np.arange(words.max() + 1)  # prompts' tokens, by words
        if not self._as_ids:
            sizes = np.array([self._context.count(draws.count(n)) for n in sizes.tolist()])
        elif self._prefixes:
            sizes += self._prefixes.tokens
        words = np.minimum(words, max(1, int((sizes < most).sum()) - 1))
        fitting = np.minimum(tokens, np.maximum(1, most - sizes[words]))
        if n := int((fitting < tokens).sum()):
            self.words["cut"] = f"{n:,} of {len(tokens):,} completions at the context of {most:,}"
        return fitting, words

    def _prompts(self, words: np.ndarray, draw: str) -> Callable[[int], dict[str, Any]]:
        """Return a function from a request's number to its prompt, as long as its words.

        draw: which one of own ids. A sweep's rates meet one server: prompts of an earlier rate are
        in its cache, and own ids that are sent again would be found there.
        """
        if not self._as_ids:
            turns = self._turns
            return lambda i: {"prompt": " " * (i % turns > 0) + draws.count(int(words[i]))}
        own = TokenIds(np.random.default_rng([self.seed, 3, zlib.crc32(draw.encode())]), words)
        if self._prefixes:
            shared = self._prefixes.draw(len(own), self.seed)
            return lambda i: {"prompt_ids": shared[i] + own[i]}
        return lambda i: {"prompt_ids": own[i]}

    def _to_mean(self, tokens: np.ndarray) -> None:
        """Draw lengths anew while that brings their mean nearer to the distribution's."""
        rng = np.random.default_rng([self.seed, 2])
        missing = round(self.mean_num_tokens * len(tokens)) - int(tokens.sum())
        tries = 100 * len(tokens)
        for i, drawn in zip(rng.integers(0, len(tokens), tries), self._draw_lengths(rng, tries)):
            if not missing:
                break
            change = int(drawn - tokens[i])
            if abs(missing - change) < abs(missing):
                tokens[i] = drawn
                missing -= change
