"""How a program ends: by an error in a sentence, by Ctrl-C, or by a signal that is taken for it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from client.quoting import printable


def fail(error: object, code: int = 1) -> NoReturn:
    """End the program with an error, and its exit code: 2 for what a command line got wrong."""
    print(printable(f"error: {error}"), file=sys.stderr)
    sys.exit(code)


def end_as_on_ctrl_c() -> None:
    """End on SIGTERM, and on the SIGHUP of a terminal that is closed, as on Ctrl-C.

    By a SIGINT of our own, with which asyncio ends what is in flight, and not by an exception: one
    that is raised while an object is being deleted is lost. A script's background job is started
    with SIGINT ignored. Only the first of these signals counts: a closed terminal sends two, of
    which the second would stop what the first lets end. `nohup` has SIGHUP ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    both = signal.SIGTERM, signal.SIGHUP
    signals = [each for each in both if signal.getsignal(each) is not signal.SIG_IGN]

    def stop(*_: object) -> None:
        for each in signals:
            signal.signal(each, lambda *_: None)  # a program that is started does not inherit it
        signal.raise_signal(signal.SIGINT)

    for each in signals:
        signal.signal(each, stop)


@contextmanager
def held() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the context, where KeyboardInterrupt is raised."""
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
