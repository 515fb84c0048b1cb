"""A server that computes nothing, whose rows are all taken: synthetic events for the live page."""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import psutil

from config import Config
from live.history import QUEUE
from live.observer import Live, about
from scheduling.inference import Inference, Iteration, IterationRecord, Row, State
from scheduling.totals import Scene

POLLS = 7  # of a page a second
PROMPT, COMPLETION = (4, 64), (1, 128)  # tokens: what the page's load asks for


class Busy:
    """A server whose rows are all taken. It is its own manager, as far as `Live` asks one."""

    def __init__(self, config: Config, rate: float):
        self.live = Live(self, about(config, "none"))
        self._now = 0.0
        self._rate, self._done, self._polls = rate, 0, 0
        self._cursor: int | None = None
        self._n_blocks = config.n_blocks
        self._rng = random.Random(0)
        self._asked = 0
        self._queue = deque(self._ask() for _ in range(QUEUE))
        self._rows = [self._admit() for _ in range(config.max_batch_size)]
        self.live.events(None)  # who looks only later is not told of what was before

    def clock(self) -> float:
        return self._now

    def scene(self, n: int) -> Scene:
        return Scene(self._n_blocks // 2, 0, 0, list(self._queue)[:n], self._n_blocks)

    def polls(self, iterations: int) -> Iterator[str]:
        """What a page is told, each time it asks, of so many more iterations."""
        for _ in range(iterations):
            self._iterate()
            if self._now * POLLS > self._polls:
                self._polls += 1
                yield self._poll()
        yield self._poll()

    def anew(self) -> str:
        """What a page is told that has just been opened."""
        self._cursor = None
        return self._poll()

    def _poll(self) -> str:
        told = self.live.events(self._cursor)
        self._cursor = int(told.split('"cursor":', 1)[1].split(",", 1)[0])
        return told

    def _iterate(self) -> None:
        began, self._done = self._now, self._done + 1
        self._now = self._done / self._rate
        seconds = self._rng.uniform(0.5, 0.95) / self._rate
        rows = [
            Row(i, i.computed, 1 if i.tokens else len(i.prompt_ids), i.blocks, True, False)
            for i in self._rows
        ]
        iteration = Iteration(rows, len(rows), len(self._queue), self._n_blocks // 2)
        self.live.iteration(IterationRecord(began, seconds, iteration))
        for k, (inference, _, n, *_) in enumerate(rows):
            inference.computed += n
            inference.tokens.append(0)
            inference.token_times.append(began + seconds)
            if len(inference.tokens) == inference.num_tokens:
                inference.state, inference.answered_at = State.FINISHED, began + seconds
                self.live.answered(inference)
                self._rows[k] = self._admit()

    def _admit(self) -> Inference:
        """The first of the queue, behind which another one comes."""
        self._queue.append(self._ask())
        inference = self._queue.popleft()
        inference.state = State.RUNNING
        return inference

    def _ask(self) -> Inference:
        inference = Inference([0] * self._rng.randint(*PROMPT), self._rng.randint(*COMPLETION))
        inference.id, inference.arrived_at = self._asked, self._now
        self._asked += 1
        return inference


def serve(config: Config, rate: float, parts: Sequence[int], to: Connection) -> None:
    """A process of one server: of each part, so many iterations, what a page is told, and then the
    bytes that this process has.
    """
    busy = Busy(config, rate)
    for iterations in parts:
        for told in busy.polls(iterations):
            to.send(told)
        gc.collect()
        to.send(psutil.Process().memory_info().rss)
