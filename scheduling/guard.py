"""A guard of users' own policies and orders: turns errors, and slow plans, into a sentence."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from scheduling.policies.base import Plan, Policy, View
from scheduling.policies.orders import Order
from scheduling.policies.own import SOURCES, described, file_of

LONGEST_S = 1.0  # of a plan, and of what else calls an order


class TooSlow(Exception):
    """A plan, or a key, took too long; raised in the middle of it."""

    def __str__(self) -> str:
        return f"it took longer than {LONGEST_S:g} s"


def reason(error: Exception, *kinds: type) -> str | None:
    """Return a sentence about what a user's own policy or order raised, with the line of its file;
    None if no class of these is one.
    """
    own = [kind for kind in kinds if kind in SOURCES]
    if not own:
        return None
    names = " with ".join(SOURCES[kind].word for kind in own)
    return f"{names} failed: {described(error, *map(file_of, own))}"


def watched(*parts: Policy | Order) -> AbstractContextManager[None]:
    """Watch what calls a user's own policy or order; others are trusted. In a browser, which has no
    threads, the page ends the worker instead.
    """
    watches = SOURCES.keys() & map(type, parts) and sys.platform != "emscripten"
    return watchdog().watch() if watches else nullcontext()


def planned(policy: Policy, order: Order, view: View) -> Plan:
    """Return the policy's plan. With a user's own policy or order raises TooSlow if that takes
    longer than LONGEST_S, and TypeError for what is no plan.
    """
    if not {type(policy), type(order)} & SOURCES.keys():
        return policy.plan(view)
    with watched(policy, order):
        plan = policy.plan(view)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan returned {plan!r}, which is no Plan")
    return plan


class Watchdog:
    """A thread that raises TooSlow in others that plan for too long.

    Python delivers it between two of its own instructions: a call that waits, as in time.sleep, is
    interrupted only once it is back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began_at: dict[int, float] = {}  # by the id of the thread that plans
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the calling thread meanwhile. Raises TooSlow."""
        thread = threading.get_ident()
        with self._lock:
            self._began_at[thread] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._began_at.pop(thread, None)

    def _watch(self) -> None:
        while True:
            time.sleep(LONGEST_S / 4)
            with self._lock:
                late = time.monotonic() - LONGEST_S
                for thread in [id for id, began_at in self._began_at.items() if began_at < late]:
                    del self._began_at[thread]  # once
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread), ctypes.py_object(TooSlow)
                    )


watchdog = functools.cache(Watchdog)
