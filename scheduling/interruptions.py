"""Preemptions and pauses of an inference."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Interruptions:
    """Preemptions (KV given up and computed again later) and pauses (KV kept) of an inference."""

    preemptions: int = 0
    preempted_at: float | None = None  # time of the preemption, while it waits again
    paused_at: float | None = None  # time of the pause, while it lasts
    # those that are over: from, to, and preempted or paused
    spans: list[tuple[float, float, str]] = field(default_factory=list)
    recompute_until: int = 0  # tokens computed before it was preempted
    recomputed_tokens: int = 0

    def end(self, now: float) -> None:
        """Note a preemption's wait or a pause, if there is one, up to now."""
        self.spans += self.lasting(now)
        self.preempted_at = self.paused_at = None

    def lasting(self, now: float) -> list[tuple[float, float, str]]:
        """Return the span that is not over, if there is one, up to now."""
        begun = (self.preempted_at, "preempted"), (self.paused_at, "paused")
        return [(at, now, kind) for at, kind in begun if at is not None]

    def seconds(self, kind: str) -> float:
        """Return the total of the spans of a kind."""
        return sum([until - since for since, until, each in self.spans if each == kind], 0.0)

    preempted_s = property(lambda self: self.seconds("preempted"))
    paused_s = property(lambda self: self.seconds("paused"))
