"""Ages of the reports by which a router chose replicas, kept in the process of the ingress.

In a module of its own: Ray copies a router's class together with the globals of its module, but not
the modules that it imports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_seconds: deque[float] = deque(maxlen=10_000)


def note(seconds: float) -> None:
    """Keep an age."""
    _seconds.append(seconds)


def noted() -> Sequence[float]:
    """Return the last 10,000 ages."""
    return list(_seconds)
