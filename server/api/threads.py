"""Threads that are started with the first request that needs one."""

from __future__ import annotations

import threading
from collections.abc import Callable

from scheduling.errors import Overloaded


def started(name: str, run: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread. Raises Overloaded where the system starts no more threads."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise Overloaded(
            f"The server could not start its {name} thread ({error}); try again later, or start it "
            "with a higher limit of threads (ulimit -u)."
        ) from None
    return thread
