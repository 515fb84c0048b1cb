"""Batching policies: which inferences run in the next iteration, and who may join.

A policy is a pure function of a `View`: it reads no clock, holds no lock and keeps no state, so the
same code runs in the server, in tests in virtual time, and in a simulator. It knows nothing of torch
or HTTP. Whatever it returns, the `Scheduler` carries out.

    nobatch    one request at a time
    static     when idle, take what waits; nobody joins; all are answered when the longest is done
    windowed   static, but a batch waits until enough requests have come or the oldest has waited enough
    dynamic    iteration-level scheduling (Orca, OSDI 2022, section 3.1): join and leave between iterations
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from scheduling.inference import Inference


@dataclass(frozen=True, slots=True)
class View:
    """What a policy may know. Time is in seconds on the scheduler's clock, KV is counted in blocks."""

    now: float
    waiting: Collection[Inference]  # in arrival order
    running: Collection[Inference]  # in admission order; in a request-level batch, held ones too
    free_blocks: int
    max_batch_size: int  # rows
    token_budget: int  # prefill tokens an iteration


@dataclass(slots=True)
class Plan:
    """What to do next: whom to admit, what to compute, and when to look again if there is nothing to do."""

    admit: list[Inference] = field(default_factory=list)
    run: list[tuple[Inference, int]] = field(default_factory=list)  # (inference, tokens to compute)
    wake_at: float | None = None
    reason: str = ""  # why this batch was formed; empty when nobody was admitted


class Policy(Protocol):
    """The seam between deciding and doing.

    `request_level` says that a batch is answered as a whole: rows that have all their tokens are held
    until the longest is done.
    """

    request_level: bool

    def group_limit(self, max_batch_size: int) -> int | None:
        """Prompts that one request may carry at most, where they are never split over two batches; None: any number."""
        ...

    def plan(self, view: View) -> Plan: ...


class NoBatching:
    """One request at a time, in order of arrival."""

    request_level = False

    def group_limit(self, max_batch_size: int) -> int | None:
        return None

    def plan(self, view: View) -> Plan:
        if view.running:
            return Plan(run=share_budget(view.running, view.token_budget))
        return _start(list(islice(view.waiting, 1)), view, "idle")


class Static:
    """Run to completion: the batch is what waits when the engine is idle.

    Rows that are done keep being computed (as *idle rows*) until the batch ends, as deployed static
    batching does; with `compact` they are dropped, as FasterTransformer does. Either way nobody joins.
    """

    request_level = True

    def __init__(self, compact: bool = False):
        self.compact = compact

    def group_limit(self, max_batch_size: int) -> int:
        return max_batch_size

    def plan(self, view: View) -> Plan:
        if view.running:
            return self._continue(view)
        return self._begin(view, "idle")

    def _begin(self, view: View, reason: str) -> Plan:
        return _start(_whole_groups(view, self.group_limit(view.max_batch_size)), view, reason)

    def _continue(self, view: View) -> Plan:
        rows = [inference for inference in view.running if not (self.compact and inference.is_over)]
        return Plan(run=share_budget(rows, view.token_budget))


class Windowed(Static):
    """Static batches that wait for company ("dynamic batching" in Triton and Wallaroo).

    A batch forms when `target` requests wait, or when the oldest has waited `delay_s`, measured from
    its arrival, so that time spent behind a running batch counts. It takes at most `limit` rows.
    """

    def __init__(self, delay_s: float, target: int, limit: int | None = None, compact: bool = False):
        super().__init__(compact)
        self.delay_s = delay_s
        self.target = target
        self.limit = limit

    def group_limit(self, max_batch_size: int) -> int:
        return max_batch_size if self.limit is None else min(self.limit, max_batch_size)

    def plan(self, view: View) -> Plan:
        if view.running:
            return self._continue(view)
        oldest = next(iter(view.waiting), None)
        if oldest is None:
            return Plan()
        due = oldest.arrived_at + self.delay_s
        if len(view.waiting) >= self.target:
            reason = "target"
        elif view.now >= due:
            reason = "delay"
        else:
            return Plan(wake_at=due)
        return self._begin(view, reason)


class Dynamic:
    """Iteration-level scheduling, first come, first served (Orca, algorithm 1).

    An inference joins as soon as a row is free and KV blocks for its whole life can be reserved, so
    nothing is ever preempted. Nobody overtakes a head of queue that does not fit.
    """

    request_level = False

    def group_limit(self, max_batch_size: int) -> int | None:
        return None

    def plan(self, view: View) -> Plan:
        admit: list[Inference] = []
        rows, blocks = view.max_batch_size - len(view.running), view.free_blocks
        for inference in view.waiting:
            if len(admit) == rows or inference.blocks_needed > blocks:
                break
            blocks -= inference.blocks_needed
            admit.append(inference)
        return _start(admit, view, "join")


def share_budget(rows: Iterable[Inference], token_budget: int) -> list[tuple[Inference, int]]:
    """Give every decoding row its one token, and share `token_budget` among prompts in row order.

    A prompt longer than what is left is computed in chunks; a row that gets nothing sits this iteration
    out. Decode rows are never charged, so a long prompt cannot stall them.
    """
    run = []
    for inference in rows:
        if not inference.prefill_left or inference.is_over:
            run.append((inference, 1))
        elif token_budget:
            n = min(inference.prefill_left, token_budget)
            token_budget -= n
            run.append((inference, n))
    return run


def _start(admit: list[Inference], view: View, reason: str) -> Plan:
    run = share_budget(chain(view.running, admit), view.token_budget)
    return Plan(admit=admit, run=run, reason=reason if admit else "")


def _whole_groups(view: View, rows: int) -> list[Inference]:
    """Take from the head of the queue, never splitting a group; stop at the first that does not fit."""
    taken: list[Inference] = []
    blocks = view.free_blocks
    for _, members in groupby(view.waiting, key=lambda inference: inference.group):
        group = list(members)
        needed = sum(inference.blocks_needed for inference in group)
        if len(taken) + len(group) > rows or needed > blocks:
            break
        blocks -= needed
        taken += group
    return taken
