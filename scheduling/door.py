"""What is said at the door: what can never run, how long a level's requests may wait and how many
of them, and what a user may ask for in a minute.

Queue policies are Triton's (its model configuration's `ModelQueuePolicy`), a window is that of the
rate limit that fair queueing is compared with (Sheng et al., OSDI 2024, section 5).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from scheduling.errors import InvalidRequest, RateLimited
from scheduling.inference import Inference

if TYPE_CHECKING:
    from scheduling.policies import Limits, Policy

MINUTE_S = 60.0
EXAMPLE = "1:timeout_ms=500,action=delay,max_size=100,override=yes"
DEFAULT = "default"  # in place of a level: of those that have no policy of their own
IDLE_USERS = 1024  # windows kept before those that are empty are dropped


def refuse_too_large(
    group: Sequence[Inference], policy: Policy, limits: Limits, n_blocks: int
) -> None:
    """Raise InvalidRequest for a group of which no batch can be, or a pool of so many KV blocks."""
    most = policy.most_rows(limits.max_batch_size)
    if policy.request_level and len(group) > most:
        raise InvalidRequest(
            f"Maximum batch size exceeded: {len(group)} completions in one request, at most {most} "
            "in this mode."
        )
    needed = [limits.blocks(inference.whole_life) for inference in group]
    if (blocks := sum(needed) if policy.request_level else max(needed)) > n_blocks:
        raise InvalidRequest(
            f"The request needs {blocks} KV blocks of {limits.block_size} tokens and the whole "
            f"pool has {n_blocks}: ask for fewer tokens, or start the server with a larger "
            "--kv-cache."
        )


@dataclass(frozen=True)
class QueuePolicy:
    """Of one level's queue. timeout_ms, max_size: 0 is none. A request that has waited `timeout_ms`
    is rejected, or goes behind all others of its level; with `override` it may ask for a shorter
    time.
    """

    timeout_ms: float = 0.0
    action: Literal["reject", "delay"] = "reject"
    max_size: int = 0
    override: bool = False

    def timeout_s(self, asked_s: float | None) -> float | None:
        """How long a request may wait that itself asks for `asked_s`; None: for ever."""
        if not self.timeout_ms:
            return None
        own = self.timeout_ms / 1e3
        return min(own, asked_s) if asked_s is not None and self.override else own


def read_queue_policies(text: str, levels: int = 0) -> dict[int, QueuePolicy]:
    """Read `LEVEL:name=value,…;…`, or none. Where LEVEL is `default`, the policy is that of each of
    the levels 1 … `levels` that has none of its own. Raises ValueError with a sentence.
    """
    found: dict[Any, QueuePolicy] = {}
    for part in filter(None, text.split(";") if text != "none" else ()):
        name, colon, settings = part.partition(":")
        name = name.strip()
        if not colon or not (name == DEFAULT or name.isdecimal()):
            raise ValueError(f"{part!r} names no level; write it as {EXAMPLE!r}")
        level = name if name == DEFAULT else int(name)
        if level in found:
            raise ValueError(f"level {level} has two policies; give it one")
        found[level] = _queue_policy(part, settings)
    default = found.pop(DEFAULT, None)
    return found if default is None else dict.fromkeys(range(1, levels + 1), default) | found


def _queue_policy(part: str, settings: str) -> QueuePolicy:
    """part: all that is said of the level, for messages."""
    told: dict[str, Any] = {}
    for pair in filter(None, settings.split(",")):
        name, _, value = pair.partition("=")
        one = _value(name.strip(), value.strip())
        if told.keys() & one:
            raise ValueError(f"{part!r} gives {name.strip()} twice; give it once")
        told |= one
    policy = QueuePolicy(**told)
    if not policy.timeout_ms and (policy.override or policy.action == "delay"):
        raise ValueError(f"{part!r} says what follows a timeout_ms, and has none; add it")
    return policy


def _value(name: str, value: str) -> dict[str, Any]:
    try:
        if name == "timeout_ms" and 0 <= float(value) < float("inf"):
            return {name: float(value)}
        if name == "max_size" and int(value) >= 0:
            return {name: int(value)}
    except ValueError:
        pass
    if name == "action" and value in ("reject", "delay"):
        return {name: value}
    if name == "override" and value in ("yes", "no"):
        return {name: value == "yes"}
    raise ValueError(
        f"{name}={value} is not understood: timeout_ms and max_size are numbers from 0 on, action "
        f"is reject or delay, override yes or no, as in {EXAMPLE!r}"
    )


def read_user_weights(text: str) -> dict[str, float]:
    """Read `NAME=WEIGHT,…`, or none. Raises ValueError with a sentence."""
    found: dict[str, float] = {}
    for pair in filter(None, text.split(",") if text != "none" else ()):
        name, _, value = pair.rpartition("=")
        try:
            weight = float(value)
        except ValueError:
            weight = 0.0
        if not name or not 1e-6 <= weight <= 1e6:
            raise ValueError(
                f"{pair!r} is no weight; write NAME=WEIGHT with a weight from 0.000001 to 1000000, "
                "such as alice=2,bob=1"
            )
        if name in found:
            raise ValueError(f"{name} has two weights; give it one")
        found[name] = weight
    return found


class _Window:
    """What one user was let in with in the last minute."""

    def __init__(self) -> None:
        self.entries: deque[tuple[float, int]] = deque()  # when, tokens
        self.tokens = 0

    def slide(self, now: float) -> None:
        while self.entries and self.entries[0][0] <= now - MINUTE_S:
            self.tokens -= self.entries.popleft()[1]


class UserLimits:
    """Requests and tokens a minute that each user may ask for; None: as many as it likes.

    Tokens are a request's prompts and all that it may generate, as it says at the door. A request
    that is refused counts for nothing.
    """

    def __init__(self, requests: int | None, tokens: int | None):
        self._requests = requests
        self._tokens = tokens
        self._windows: dict[str | None, _Window] = {}
        self._most_windows = IDLE_USERS

    def admit(self, group: Sequence[Inference], now: float) -> None:
        """Count a request. Raises RateLimited, and InvalidRequest for one that is beyond a whole
        minute's tokens.
        """
        if self._requests is None and self._tokens is None:
            return
        user = group[0].user
        asked = sum(
            member.num_tokens + (len(member.prompt_ids) if member.leader is None else 0)
            for member in group
        )
        if self._tokens is not None and asked > self._tokens:
            raise InvalidRequest(
                f"The request asks for {asked} tokens, and a user may ask for {self._tokens} a "
                "minute; ask for fewer."
            )
        window = self._windows.setdefault(user, _Window())
        window.slide(now)
        if (wait_s := self._wait_s(window, asked, now)) is not None:
            raise RateLimited(
                f"{'This user' if user else 'Whoever names no user'} has asked for "
                f"{len(window.entries)} requests and {window.tokens} tokens in the last minute, "
                f"of {_limit(self._requests)} and {_limit(self._tokens)}; try again in "
                f"{math.ceil(wait_s)} s.",
                retry_after_s=wait_s,
            )
        window.entries.append((now, asked))
        window.tokens += asked
        if len(self._windows) > self._most_windows:
            self._forget(now)

    def _wait_s(self, window: _Window, asked: int, now: float) -> float | None:
        """Until enough of the window has passed; None: it has."""
        requests, tokens = len(window.entries), window.tokens
        if self._fits(requests, tokens + asked):
            return None
        for at, its in window.entries:
            requests, tokens = requests - 1, tokens - its
            if self._fits(requests, tokens + asked):
                return at + MINUTE_S - now
        raise AssertionError("an empty window lets everybody in")

    def _fits(self, requests: int, tokens: int) -> bool:
        """One more request, with whose tokens there are so many."""
        return (self._requests is None or requests < self._requests) and (
            self._tokens is None or tokens <= self._tokens
        )

    def _forget(self, now: float) -> None:
        for window in self._windows.values():
            window.slide(now)
        self._windows = {user: own for user, own in self._windows.items() if own.entries}
        self._most_windows = max(IDLE_USERS, 2 * len(self._windows))


def _limit(most: int | None) -> str:
    return "any number" if most is None else str(most)
