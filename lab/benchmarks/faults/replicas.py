"""Faults of a fleet on Ray Serve: replicas that are killed or hang, a controller that is, settings
that change under load. An optional part: it needs Ray.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec

import psutil

from client.calls import ServerError, get
from client.load import replay
from client.outcomes import Outcome
from lab.benchmarks.faults.tools import (
    Fault,
    Finding,
    Served,
    after,
    all_answered,
    replaying,
    requests_of,
    summary,
    until,
)

FLEET = ("-m", "server.replicas.serve", "dynamic", "--replicas", "2")
SLOW = {"loop_interval_ms": 20, "max_batch_size": 32}
REPLACED_S = 90.0


def pids(served: Served) -> dict[str, int]:
    """The process of each replica, by its name."""
    names = get(f"{served.url}/stats")["replicas"]
    return {name: get(f"{served.url}/replicas/{name}/")["pids"][-1] for name in names}


def answering(served: Served) -> set[str]:
    """The replicas that answer; none if one is silent."""
    try:
        return {*get(f"{served.url}/stats", 15)["replicas"]}
    except ServerError:
        return set()


@contextmanager
def load(served: Served, seconds: float) -> Iterator[list[Outcome]]:
    """20 requests a second of a second each while the block runs, and until it is over."""
    requests = requests_of(round(20 * seconds), 40, a_second=20)
    with replaying(served, requests, timeout_s=600) as outcomes:
        time.sleep(1.5)
        yield outcomes


def one_of_two(number: int, served: Served, short: bool) -> Iterator[Finding]:
    """A replica gets this signal under load."""
    before = pids(served)
    victim = min(before)
    with load(served, 8 if short else 40) as outcomes:
        os.kill(before[victim], number)
        replaced = until(lambda: len(answering(served) - {victim}) == 2, REPLACED_S)
    with suppress(ProcessLookupError):
        os.kill(before[victim], signal.SIGKILL)
    lost = [outcome.error for outcome in outcomes if not outcome.answer]
    only_its = all("is gone; send it once more" in error for error in lost)
    yield summary(outcomes), only_its and len(lost) < len(outcomes) / 2
    yield f"two replicas again {after(replaced)}", replaced is not None
    later = replay(served.url, requests_of(20, 4))
    yield f"then {summary(later)}", all_answered(later)


def controller(served: Served, short: bool) -> Iterator[Finding]:
    before = pids(served)
    with load(served, 6 if short else 20) as outcomes:
        for process in psutil.Process(served.process.pid).children(recursive=True):
            if "ServeController" in " ".join(process.cmdline()):
                process.kill()
    same = pids(served) == before
    yield summary(outcomes), all_answered(outcomes)
    yield f"the replicas are {'the same' if same else 'others'}", same


def changed(served: Served, short: bool) -> Iterator[Finding]:
    """SIGHUP: .env and the environment are read again."""
    before = pids(served)
    with load(served, 15 if short else 40) as outcomes:
        os.kill(served.process.pid, signal.SIGHUP)
        # no replica answers while one is silent
        replaced = until(lambda: bool(now := answering(served)) and not now & {*before}, REPLACED_S)
    yield summary(outcomes), all_answered(outcomes)
    yield f"new replicas {after(replaced)}", replaced is not None


FAULTS = [
    Fault("kill -9 of one of two replicas under load",
          "its own requests get an error; others are answered; another replica comes",
          partial(one_of_two, signal.SIGKILL), SLOW, FLEET),
    Fault("one of two replicas hangs (SIGSTOP) under load",
          "it is replaced; its own requests get an error; others are answered",
          partial(one_of_two, signal.SIGSTOP), SLOW, FLEET),
    Fault("kill -9 of the controller of two replicas under load",
          "every request is answered, the replicas stay",
          controller, SLOW, FLEET),
    Fault("new settings for two replicas under load (SIGHUP)",
          "one replica after another; no request is refused",
          changed, SLOW, FLEET),
] if find_spec("ray") else []  # fmt: skip
