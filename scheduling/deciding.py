"""Calls of a policy and an order: since when one runs, and what it raised, in words."""

from __future__ import annotations

from collections.abc import Callable

from scheduling.scheduler import Scheduler
from scheduling.user_policies import SOURCES, described, file_of, reason

LONGEST_S = 60.0  # after which a plan is taken to go on for ever


class Deciding:
    """Used as a context around what calls a scheduler's policy or order, one at a time."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]):
        kinds = type(scheduler.policy), type(scheduler.order)
        self._users = [kind for kind in kinds if kind in SOURCES]  # classes of users' files
        self._names = " with ".join(SOURCES[kind].word for kind in self._users) or kinds[0].__name__
        self._clock = clock
        self._since: float | None = None

    def __enter__(self) -> None:
        self._since = self._clock()

    def __exit__(self, *error: object) -> None:
        self._since = None

    def hangs_because(self) -> str | None:
        """Return a sentence about a call that has run for LONGEST_S. Takes no lock."""
        since = self._since
        if since is None or self._clock() - since <= LONGEST_S:
            return None
        return f"a plan of {self._names} has been running for more than {LONGEST_S:.0f} s"

    def in_words(self, error: BaseException, deciding: bool) -> str:
        """Return what failed, with the line of a user's file; deciding: not in the engine."""
        why = reason(error, *self._users) if deciding else None
        return why or described(error, *map(file_of, self._users))
