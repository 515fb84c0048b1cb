"""Faults of a fleet on Ray Serve: replicas that are killed or hang, a controller that is, settings
that change under load. An optional part: there are none without Ray.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec

import psutil

from benchmarks.faults.tools import Seen, Served, asks, fault, serving, told, until
from client.calls import ServerError, get
from client.load import replay
from client.outcomes import Outcome

FLEET = ("-m", "deploy.serve", "dynamic", "--replicas", "2")
SLOW = {"loop_interval_ms": 20, "max_batch_size": 32}
REPLACED_S = 90.0


def replicas(served: Served) -> dict[str, int]:
    """The process of each, by its name."""
    names = get(f"{served.url}/stats")["replicas"]
    return {name: get(f"{served.url}/replicas/{name}/")["pids"][-1] for name in names}


def named(served: Served) -> set[str]:
    """The replicas that answer; none if one is silent."""
    try:
        return {*get(f"{served.url}/stats", 15)["replicas"]}
    except ServerError:
        return set()


@contextmanager
def load(served: Served, seconds: float) -> Iterator[list[Outcome]]:
    """20 requests a second of a second each while the block runs, and until it is over."""
    outcomes: list[Outcome] = []
    requests = asks(round(20 * seconds), 40, a_second=20)
    thread = threading.Thread(target=lambda: outcomes.extend(replay(served.url, requests)))
    thread.start()
    time.sleep(1.5)
    try:
        yield outcomes
    finally:
        thread.join()


def lost(outcomes: list[Outcome]) -> list[str]:
    return [outcome.error for outcome in outcomes if not outcome.answer]


def unlike_gone(errors: list[str]) -> list[str]:
    return [error for error in errors if "is gone; send it once more" not in error]


def gone_of_two(number: int) -> Callable[[bool], Seen]:
    """A replica gets this signal under load."""

    def run(short: bool) -> Seen:
        with serving(SLOW, FLEET) as served:
            before = replicas(served)
            victim = min(before)
            with load(served, 8 if short else 40) as outcomes:
                start = time.monotonic()
                os.kill(before[victim], number)
                replaced = until(lambda: len(named(served) - {victim}) == 2, REPLACED_S)
                seconds = time.monotonic() - start
            with suppress(ProcessLookupError):
                os.kill(before[victim], signal.SIGKILL)
            after = replay(served.url, asks(20, 4))
        errors = lost(outcomes)
        text = f"{told(outcomes)}; two replicas again after {seconds:.1f} s"
        kept = replaced is not None and not unlike_gone(errors) and len(errors) < len(outcomes) / 2
        return Seen(text, kept and all(outcome.answer for outcome in after))

    return run


def controller(short: bool) -> Seen:
    with serving(SLOW, FLEET) as served:
        before = replicas(served)
        with load(served, 6 if short else 20) as outcomes:
            for process in psutil.Process(served.process.pid).children(recursive=True):
                if "ServeController" in " ".join(process.cmdline()):
                    process.kill()
        same = replicas(served) == before
        text = f"{told(outcomes)}; the replicas are {'the same' if same else 'others'}"
        return Seen(text, same and not lost(outcomes))


def changed(short: bool) -> Seen:
    """SIGHUP: .env and the environment are read again."""
    with serving(SLOW, FLEET) as served:
        before = replicas(served)
        with load(served, 15 if short else 40) as outcomes:
            os.kill(served.process.pid, signal.SIGHUP)
            new = until(
                lambda: bool(names := named(served)) and names.isdisjoint(before), REPLACED_S
            )
        text = f"{told(outcomes)}; replicas are {'new' if new is not None else 'old'}"
        return Seen(text, new is not None and not lost(outcomes))


if find_spec("ray"):
    fault(
        "kill -9 of one of two replicas under load",
        "those that it had are told; others are answered; another replica comes",
    )(gone_of_two(signal.SIGKILL))
    fault(
        "one of two replicas hangs (SIGSTOP) under load",
        "it is replaced; those that it had are told; others are answered",
    )(gone_of_two(signal.SIGSTOP))
    fault(
        "kill -9 of the controller of two replicas under load",
        "nobody notices: everybody is answered, the replicas stay",
    )(controller)
    fault(
        "new settings for two replicas under load (SIGHUP)",
        "one replica after another; nobody is refused",
    )(changed)
