"""Requests become rows, rows become iterations: a state machine without thread, lock or clock.

Knows inferences, rows, KV blocks (as integers) and time as it is told; knows no torch and no HTTP.

    Snapshot    how full the scheduler is
    Scheduler   enqueue → schedule → apply, with the exits fail and expire
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scheduling.blocks import BlockPool
from scheduling.errors import Cancelled, DeadlinePassed, InvalidRequest, Overloaded, ServingError
from scheduling.inference import Inference, Iteration, Row, State
from scheduling.policies import Policy, View

SPARE_DEADLINES = 64  # of answered requests, which may be kept beside as many as are in flight
_EXITS: dict[type[ServingError], State] = {Cancelled: State.CANCELLED, DeadlinePassed: State.EXPIRED}


class Snapshot(NamedTuple):
    """How full a scheduler is, and how many tokens it has seen computed since the start."""

    waiting: int
    running: int  # held ones too, but not those whose row is idle and who have their answer
    blocks_used: int
    n_blocks: int
    prompt_tokens: int
    completion_tokens: int


class Scheduler:
    """Carries out a policy's plans: rows, KV blocks, states, time stamps.

    A state machine without thread, lock or clock; every method that needs the time is told it.
    `decoder_batch_sizes`: an iteration of decode rows alone is filled up with padding rows to the smallest of them
    that holds it; none: it is as large as its rows.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_batch_size: int,
        token_budget: int,
        n_blocks: int,
        block_size: int,
        max_in_flight: int,
        decoder_batch_sizes: Sequence[int] = (),
    ):
        self.policy = policy
        self.max_batch_size = max_batch_size
        self.token_budget = token_budget
        self.block_size = block_size
        self.max_in_flight = max_in_flight
        self._group_limit = policy.group_limit(max_batch_size)
        self.decoder_batch_sizes = sorted(decoder_batch_sizes)
        self.pool = BlockPool(n_blocks)
        self.waiting: OrderedDict[int, Inference] = OrderedDict()  # O(1) to leave from the middle
        self.running: dict[int, Inference] = {}
        self._deadlines: list[tuple[float, int, Inference]] = []
        self._next_id = 0
        self._batches = 0
        self._prompt_tokens = self._completion_tokens = 0

    def enqueue(self, inferences: Sequence[Inference], now: float) -> None:
        """Queue one inference, or a group of them: all or none.

        Raises InvalidRequest for what could never run, and Overloaded beyond max_in_flight.
        """
        needed = [-(-(len(i.prompt_ids) + i.num_tokens) // self.block_size) for i in inferences]
        limit = self._group_limit
        if limit is not None and len(inferences) > limit:
            raise InvalidRequest(
                f"Maximum batch size exceeded: {len(inferences)} prompts in one request, at most {limit} in this mode."
            )
        if (most := max(needed) if limit is None else sum(needed)) > self.pool.n_blocks:
            raise self._beyond_pool(most)
        if len(self.waiting) + len(self.running) + len(inferences) > self.max_in_flight:
            raise Overloaded(
                f"{len(self.waiting)} requests are waiting and {len(self.running)} running; try again later, "
                "or start the server with a larger --max-waiting."
            )
        group = self._next_id
        for inference, blocks in zip(inferences, needed):
            inference.id, self._next_id = self._next_id, self._next_id + 1
            inference.group, inference.blocks_needed, inference.arrived_at = group, blocks, now
            self.waiting[inference.id] = inference
            if inference.deadline is not None:
                heapq.heappush(self._deadlines, (inference.deadline, inference.id, inference))

    def _beyond_pool(self, needed: int) -> InvalidRequest:
        return InvalidRequest(
            f"The request needs {needed} KV blocks of {self.block_size} tokens and the whole pool has "
            f"{self.pool.n_blocks}: ask for fewer tokens, or start the server with a larger --kv-cache-gb (on a GPU: "
            "--gpu-memory-utilization)."
        )

    def schedule(self, now: float) -> tuple[Iteration, float | None]:
        """Ask the policy and carry its plan out; return the next iteration (no rows: nothing to run) and `wake_at`."""
        view = View(
            now=now,
            waiting=self.waiting.values(),
            running=self.running.values(),
            free_blocks=self.pool.free_blocks,
            max_batch_size=self.max_batch_size,
            token_budget=self.token_budget,
        )
        plan = self.policy.plan(view)
        for inference in plan.admit:
            inference.blocks = self.pool.allocate(inference.blocks_needed)  # raises before anything has moved
            del self.waiting[inference.id]
            inference.state, inference.admitted_at = State.RUNNING, now
            inference.batch, inference.position = self._batches, len(self.running)
            self.running[inference.id] = inference
        self._batches += bool(plan.admit)
        rows = [self._row(inference, n) for inference, n in plan.run]
        used = self.pool.n_blocks - self.pool.free_blocks
        padding = self._padding(rows)
        return Iteration(rows, len(self.running), len(self.waiting), used, plan.reason, padding), plan.wake_at

    def _padding(self, rows: Sequence[Row]) -> int:
        n = len(rows)
        if n and self.decoder_batch_sizes and all(row.decodes for row in rows):
            return next((size for size in self.decoder_batch_sizes if size >= n), n) - n
        return 0

    def _row(self, inference: Inference, n_tokens: int) -> Row:
        if inference.is_over:  # recompute the last position: its cache does not grow
            start = max(0, inference.computed - 1)
            return Row(inference, start, 1, inference.blocks, samples=True, idle=True)
        samples = n_tokens >= inference.prefill_left
        return Row(inference, inference.computed, n_tokens, inference.blocks, samples, idle=False)

    def apply(self, iteration: Iteration, ids: Sequence[int], now: float) -> list[Inference]:
        """Take the sampled ids; return the inferences that are to be answered."""
        sampled = iter(ids)
        for row in iteration.rows:
            token = next(sampled) if row.samples else None
            inference = row.inference
            if row.idle or inference.state is not State.RUNNING:  # cancelled meanwhile: its id is dropped
                continue
            if not row.decodes:
                self._prompt_tokens += row.n_tokens
            inference.computed += row.n_tokens
            if token is not None:
                self._completion_tokens += 1
                inference.tokens.append(token)
                inference.token_times.append(now)
                inference.stopped = inference.stop is not None and inference.stop(token)
        return self._release(now)

    def _release(self, now: float) -> list[Inference]:
        """Answer what is done: each on its own, or in a request-level batch all of them once nobody is left.

        There a stream is answered with its own last token all the same; its row stays, idle, until the batch ends.
        """
        over = [inference for inference in self.running.values() if inference.is_over]
        leave = not self.policy.request_level or len(over) == len(self.running)
        answered = [i for i in over if i.state is State.RUNNING and (leave or i.streamed)]
        for inference in over if leave else ():
            del self.running[inference.id]
        for inference in answered:
            self._end(inference, State.FINISHED, now)
        return answered

    def fail(self, inferences: Iterable[Inference], error: ServingError, now: float) -> list[Inference]:
        """End the given inferences with an error, wherever they are; return all that are now to be answered.

        Those already over are left alone. Blocks are free at once. In a request-level batch the row of a
        cancelled or expired inference stays, idle, until the batch ends; one that failed takes its row along.
        """
        ended = []
        state = _EXITS.get(type(error), State.FAILED)
        for inference in inferences:
            if inference.state is State.WAITING:
                self.waiting.pop(inference.id, None)
            elif inference.state is not State.RUNNING:
                continue
            elif state is State.FAILED or not self.policy.request_level:
                del self.running[inference.id]
            inference.error = error
            self._end(inference, state, now)
            ended.append(inference)
        return ended + self._release(now)

    def expire(self, now: float) -> list[Inference]:
        """End every inference whose deadline has passed."""
        late = []
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].answered_at is not None):
            late.append(heapq.heappop(self._deadlines)[2])  # those answered in time are dropped here too
        if len(self._deadlines) > 2 * (len(self.waiting) + len(self.running)) + SPARE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if entry[2].answered_at is None]
            heapq.heapify(self._deadlines)
        return self.fail(late, DeadlinePassed("The request's deadline passed before its answer."), now)

    def limit_blocks(self, n_blocks: int, now: float) -> list[Inference]:
        """Make the pool as large as the engine's, before anything has run; return the requests that it can never hold."""
        self.pool = BlockPool(n_blocks)
        groups: dict[int, list[Inference]] = {}
        for inference in self.waiting.values():
            groups.setdefault(inference.id if self._group_limit is None else inference.group, []).append(inference)
        too_large = [group for group in groups.values() if sum(i.blocks_needed for i in group) > n_blocks]
        return [i for group in too_large for i in self.fail(group, self._beyond_pool(sum(m.blocks_needed for m in group)), now)]

    def next_deadline(self) -> float | None:
        """When `expire` must be called next, if anything has a deadline."""
        return self._deadlines[0][0] if self._deadlines else None

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def in_flight(self) -> list[Inference]:
        return [*self.waiting.values(), *self.running.values()]

    def snapshot(self) -> Snapshot:
        used = self.pool.n_blocks - self.pool.free_blocks
        tokens = self._prompt_tokens, self._completion_tokens
        running = sum(inference.state is State.RUNNING for inference in self.running.values())
        return Snapshot(len(self.waiting), running, used, self.pool.n_blocks, *tokens)

    def _end(self, inference: Inference, state: State, now: float) -> None:
        inference.state, inference.answered_at = state, now
        self.pool.free(inference.blocks)
        inference.blocks = []
