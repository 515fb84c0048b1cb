"""An engine that spells a text, for tests of what is served."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from string import ascii_lowercase

from scheduling.inference import Generator, Iteration
from tests.servers import PATIENCE_S


class Spelling(Generator):
    """Spells the same ids for each request, again and again; while `fails`, every iteration raises.

    gated: an iteration releases `started`, and waits for a release of `go`.
    """

    def __init__(self, text: Sequence[int] = ascii_lowercase.encode(), gated: bool = False) -> None:
        self.text, self.gated = text, gated
        self.started, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.fails = False

    def generate(self, iteration: Iteration) -> list[int]:
        self.started.release()
        assert not self.gated or self.go.acquire(timeout=PATIENCE_S)
        if self.fails:
            raise RuntimeError("no luck")
        sampled = [row.inference for row in iteration.rows if row.samples]
        return [self.text[len(each.tokens) % len(self.text)] for each in sampled]
