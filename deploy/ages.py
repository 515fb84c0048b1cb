"""How old the reports were by which a router chose replicas: noted in the process of the ingress.

A module of its own: Ray copies a router's class with the module's other names, and not what that
imports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_seconds: deque[float] = deque(maxlen=10_000)


def note(seconds: float) -> None:
    _seconds.append(seconds)


def noted() -> Sequence[float]:
    """The last ones."""
    return list(_seconds)
