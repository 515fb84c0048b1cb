"""Priority levels, each with a queue policy of its own (Triton's `ModelQueuePolicy`)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from scheduling.errors import InvalidRequest
from scheduling.inference import Inference
from scheduling.policies.base import setting
from scheduling.policies.orders import Bounded

MOST_LEVELS = 64
EXAMPLE = "1:timeout_ms=500,action=delay,max_size=100,override=yes"
DEFAULT = "default"  # in place of a level: of those that have no policy of their own


@dataclass(frozen=True)
class QueuePolicy:
    """Limits of one level's queue; 0 is none. A request that has waited `timeout_ms` is rejected,
    or goes behind all others of its level; with `override` it may ask for a shorter time.
    """

    timeout_ms: float = 0.0
    action: Literal["reject", "delay"] = "reject"
    max_size: int = 0
    override: bool = False

    def timeout_s(self, wanted_s: float | None) -> float | None:
        """Return how long a request that wants `wanted_s` may wait; None: for ever."""
        if not self.timeout_ms:
            return None
        own = self.timeout_ms / 1e3
        return min(own, wanted_s) if wanted_s is not None and self.override else own


def read_queue_policies(text: str, levels: int = 0) -> dict[int, QueuePolicy]:
    """Read `LEVEL:name=value,…;…`, or none. Where LEVEL is `default`, the policy is that of each of
    the levels 1 … `levels` that has none of its own. Raises ValueError with a sentence.
    """
    policies: dict[Any, QueuePolicy] = {}
    for part in filter(None, text.split(";") if text != "none" else ()):
        name, colon, settings = part.partition(":")
        name = name.strip()
        if not colon or not (name == DEFAULT or name.isdecimal()):
            raise ValueError(f"{part!r} names no level; write it as {EXAMPLE!r}")
        level = name if name == DEFAULT else int(name)
        if level in policies:
            raise ValueError(f"level {level} has two policies; give it one")
        policies[level] = _queue_policy(part, settings)
    default = policies.pop(DEFAULT, None)
    return policies if default is None else dict.fromkeys(range(1, levels + 1), default) | policies


def _queue_policy(part: str, settings: str) -> QueuePolicy:
    """Read one level's settings. part: the whole text of the level, for messages."""
    values: dict[str, Any] = {}
    for pair in filter(None, settings.split(",")):
        name, _, value = (text.strip() for text in pair.partition("="))
        if name in values:
            raise ValueError(f"{part!r} gives {name} twice; give it once")
        values[name] = _value(name, value)
    policy = QueuePolicy(**values)
    if not policy.timeout_ms and (policy.override or policy.action == "delay"):
        raise ValueError(f"{part!r} says what follows a timeout_ms, and has none; add it")
    return policy


def _value(name: str, value: str) -> Any:
    with contextlib.suppress(ValueError):
        if name == "timeout_ms" and 0 <= float(value) < float("inf"):
            return float(value)
        if name == "max_size" and int(value) >= 0:
            return int(value)
    if name == "action" and value in ("reject", "delay"):
        return value
    if name == "override" and value in ("yes", "no"):
        return value == "yes"
    raise ValueError(
        f"{name}={value} is not understood: timeout_ms and max_size are numbers from 0 on, action "
        f"is reject or delay, override yes or no, as in {EXAMPLE!r}"
    )


@dataclass(frozen=True)
class Priority(Bounded):
    """Levels, 1 first; within one as they came (Triton's priority levels; vLLM's priorities).

    With KV blocks on demand, those of the lowest level give way. `queue_policy`: what each level's
    queue holds, and for how long (Triton's queue policies).
    """

    priority_levels: int = setting(
        3, "number of levels, of which 1 goes first", ge=1, le=MOST_LEVELS
    )
    default_priority_level: int | None = setting(
        None, "level of a request that states none, or 0", "the middle one", ge=1
    )
    queue_policy: str = setting(
        "", f"limits of a level's queue, and of all others: {EXAMPLE};default:…", "none"
    )

    @cached_property
    def queue_policies(self) -> Mapping[int, QueuePolicy]:
        return read_queue_policies(self.queue_policy, self.priority_levels)

    def check(self, group: Sequence[Inference]) -> None:
        default = self.default_priority_level or (self.priority_levels + 1) // 2
        level = group[0].priority or default
        if not 1 <= level <= self.priority_levels:
            raise InvalidRequest(
                f"priority must be 1 … {self.priority_levels}, the level of this server's that it "
                f"means, or 0 for level {default}.",
                param="priority",
            )
        for member in group:
            member.priority = level

    def rank(self, inference: Inference) -> tuple[int, bool]:
        return inference.priority, inference.standing.state is not None

    def delay(self, inference: Inference) -> None:
        inference.standing.state = "delayed"
