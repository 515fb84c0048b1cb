"""Requests become rows, rows become iterations: a state machine without thread, lock or clock.

Knows inferences, rows, KV blocks (as integers) and time as it is told; knows no torch and no HTTP.

    enqueue → schedule → apply, with the exits fail and expire
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

from scheduling.admission import UserLimits, refuse_too_large
from scheduling.errors import Cancelled, DeadlinePassed, InvalidRequest, Overloaded, ServingError
from scheduling.extensions import PausedRows, ResponseOrder
from scheduling.inference import Inference, Iteration, Row, State
from scheduling.iteration import padding, rows_of
from scheduling.policies import MODES, ORDERS, Fcfs, Limits, Order, Policy, View, chosen
from scheduling.policies.lengths import predictor
from scheduling.prefix_cache import PrefixCache
from scheduling.queue import Timers, WaitingQueue

_EXITS: dict[type[ServingError], State] = {
    Cancelled: State.CANCELLED,
    DeadlinePassed: State.EXPIRED,
}


class Snapshot(NamedTuple):
    """How full a scheduler is, and how many tokens it has seen computed since the start."""

    waiting: int
    running: int  # held ones too, but not those whose row is idle and who have their answer
    blocks_used: int
    n_blocks: int
    prompt_tokens: int  # those found in the prefix cache, too
    completion_tokens: int
    prefix_queries: int  # prompt tokens that were looked for in the prefix cache
    prefix_hits: int  # those found


class Scene(NamedTuple):
    """What there is to see at one instant."""

    free_blocks: int  # those whose content can still be found, too
    shared_blocks: int  # that several requests have
    cached_blocks: int  # of the free ones, those whose content can still be found
    queue: list[Inference]  # the first of those that wait, in the order
    n_blocks: int  # in the pool


@dataclass(slots=True)
class Totals:
    """Tokens since the start. Completions of one prompt count it once."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0

    @property
    def processed(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def looked_for(self, inference: Inference) -> None:
        """Its prompt, in the prefix cache."""
        if inference.keys is not None and inference.leader is None:
            self.prefix_queries += len(inference.prompt_ids)

    def found(self, inference: Inference, tokens: int) -> None:
        """So many tokens of its prompt, in the prefix cache."""
        if inference.leader is None:
            self.prompt_tokens += tokens
            self.prefix_hits += tokens

    def computed(self, row: Row) -> None:
        """A row that does not decode."""
        if row.inference.leader is None:
            end = min(row.start + row.n_tokens, len(row.inference.prompt_ids))
            self.prompt_tokens += max(0, end - row.start - row.recomputed)


class Scheduler:
    """Carries out a policy's plans: rows, KV blocks, states, time stamps.

    A state machine without thread, lock or clock; every method that needs the time is told it.
    `decoder_batch_sizes`: an iteration of decode rows alone is filled up with padding rows to the
    smallest of them that holds it; none: it is as large as its rows.
    """

    def __init__(
        self,
        policy: Policy,
        order: Order = Fcfs(),  # noqa: B008  (it is frozen)
        *,
        limits: Limits,
        n_blocks: int,
        max_in_flight: int,
        decoder_batch_sizes: Sequence[int] = (),
        length_predictor: str = "exact",
        user_limits: UserLimits = UserLimits(None, None),  # noqa: B008  (without any, it keeps none)
        preserve_ordering: bool = False,
    ):
        self.policy = policy
        self.order = order
        self.limits = limits
        self.max_in_flight = max_in_flight
        self.decoder_batch_sizes = sorted(decoder_batch_sizes)
        self.pool = PrefixCache(n_blocks, limits.block_size)
        self.queue = WaitingQueue(order, policy.n_bins, predictor(length_predictor), user_limits)
        self.running: dict[int, Inference] = {}
        self._pauses = PausedRows(order)
        self._response_order = ResponseOrder() if preserve_ordering else None
        self._deadlines: Timers[Inference] = Timers(lambda i: i.answered_at is not None)
        self._next_id = 0
        self._batches = 0
        self._totals = Totals()

    def enqueue(self, inferences: Sequence[Inference], now: float) -> None:
        """Queue one inference, or a group of them: all or none.

        Raises InvalidRequest for what could never run, and Overloaded beyond max_in_flight.
        """
        refuse_too_large(inferences, self.policy, self.limits, self.pool.n_blocks)
        self.order.check(inferences)
        running = len(self.running) + len(self._held)
        if len(self.waiting) + running + len(inferences) > self.max_in_flight:
            raise Overloaded(
                f"{len(self.waiting)} requests are waiting and {running} running; try "
                "again later, or start the server with a larger --max-waiting."
            )
        self.queue.check(inferences, now)
        group = self._next_id
        for inference in inferences:
            inference.id, inference.group, inference.arrived_at = self._next_id, group, now
            self._next_id += 1
        self.queue.enter(inferences, self._totals.processed, now)
        if self._response_order is not None:
            self._response_order.expect(inferences)
        for inference in inferences:
            self._pauses.watch(inference)
            if inference.deadline is not None:
                self._deadlines.add(inference.deadline, inference)

    @property
    def waiting(self) -> Mapping[int, Inference]:
        """Who waits, by id."""
        return self.queue.waiting

    @property
    def _held(self) -> Mapping[int, Inference]:
        """Who is finished, and has its answer once an earlier one has."""
        return self._response_order.held if self._response_order is not None else {}

    def schedule(self, now: float) -> tuple[Iteration, float | None]:
        """Ask the policy and carry its plan out; return the next iteration (no rows: nothing to
        run) and `wake_at`.

        Raises ValueError, before anything has moved, if the plan is impossible.
        """
        found: dict[int, list[int]] = {}  # looked up once, so that a plan is consistent

        def find(inference: Inference) -> Sequence[int]:
            if inference.keys is None:
                return ()
            if inference.id not in found:
                found[inference.id] = self.pool.found_for(inference)
            return found[inference.id]

        for inference in self._pauses.uncomputed_too_long(now):
            if inference.state is State.WAITING:
                self.queue.promote(inference, now)
            else:
                self._pauses.promote(inference, now)
        view = self._view(now)._replace(found=find)
        plan = self.policy.plan(view)
        rows, holds = rows_of(plan, view, self.policy, self.running.keys(), self.waiting)
        for inference, _ in holds:  # first of all, before others take what was found
            if found.get(inference.id):
                new = self.pool.share_found(inference, found[inference.id])
                self._totals.found(inference, new)
        for inference in plan.preempt:
            self._preempt(inference, now)
        for inference, tokens in holds:
            self.pool.hold(inference, self.limits.blocks(tokens))
        for inference, _ in plan.admit:
            self._admit(inference, now)
        self._pauses.settle(rows, now)
        self._batches += bool(plan.admit)
        used = self.pool.n_blocks - self.pool.free_blocks
        iteration = Iteration(
            rows,
            len(self.running),
            len(self.waiting),
            used,
            plan.reason,
            padding(rows, self.decoder_batch_sizes),
            preempted=len(plan.preempt),
            holds=plan.holds,
            closed=plan.closed,
        )
        return iteration, plan.wake_at

    def _view(self, now: float) -> View:
        return View(
            now=now,
            queues=self.queue.queues,
            running=self.running.values(),
            free_blocks=self.pool.free_blocks,
            n_blocks=self.pool.n_blocks,
            limits=self.limits,
            order=self.order,
            request_level=self.policy.request_level,
            rows=self._pauses.rows.values(),
            paused=self._pauses.paused.values(),
            processed=self._totals.processed,
            ledger=self.queue.ledger,
            references=self.pool.references,
        )

    def scene(self, n: int, now: float) -> Scene:
        """What there is to see, with the first n of those that wait. Nothing moves."""
        view = self._view(now)._replace(found=self.pool.found_for)
        queue = list(islice(chain.from_iterable(view.bins), n))
        pool = self.pool
        blocks = pool.free_blocks, pool.shared_blocks, pool.cached_blocks
        return Scene(*blocks, queue, pool.n_blocks)

    def repeats(self, iteration: Iteration) -> int:
        """How many iterations it and the next ones are in which its rows compute a token each, so
        that `apply_repeated` of all comes to what planning each does, if nobody leaves, comes (or
        it is `closed`) or is late. 1: nothing is known of the next one.
        """
        if not iteration.holds or self.order.by_service:
            return 1
        size, most = self.limits.block_size, sys.maxsize
        for row in reversed(iteration.rows):  # who computes a prompt came last
            inference, _, _, _, samples, idle, _ = row
            if idle:
                continue
            if not samples or inference.stop is not None:
                return 1
            if not inference.decodes and self.decoder_batch_sizes:  # the next one may be filled up
                return 1
            if (left := inference.num_tokens - len(inference.tokens)) < most:
                most = left
            if inference.keys is not None:  # a block that it fills can be found by others
                if not inference.decodes:
                    return 1
                most = min(most, (inference.num_cached_blocks + 1) * size - inference.computed)
        return most if most < sys.maxsize else 1

    def _admit(self, inference: Inference, now: float) -> None:
        """Waiting → running."""
        self.queue.leave(inference)
        self.queue.charge_prompt(inference)
        inference.state = State.RUNNING
        if inference.admitted_at is None:
            inference.admitted_at = now
            inference.batch, inference.position = self._batches, len(self.running)
            self._totals.looked_for(inference)
        inference.interruptions.end(now)
        self.running[inference.id] = inference
        self._pauses.begin(inference)

    def _preempt(self, inference: Inference, now: float) -> None:
        """Running → waiting: its blocks are free, and its KV is computed again when it is back."""
        self._end_running(inference, now)
        self.pool.release(inference)
        inference.interruptions.recompute_until = max(
            inference.interruptions.recompute_until, inference.computed
        )
        inference.computed = inference.num_cached_blocks = 0
        inference.decodes = False
        inference.interruptions.preempted_at = now
        inference.interruptions.preemptions += 1
        self.queue.wait_again(inference)
        self._pauses.watch(inference)

    def _end_running(self, inference: Inference, now: float) -> None:
        del self.running[inference.id]
        self._pauses.end(inference, now)

    def apply(self, iteration: Iteration, ids: Iterable[int], now: float) -> list[Inference]:
        """Take the sampled ids; return the inferences that are to be answered."""
        return self.apply_repeated(iteration, ids, [now])

    def apply_repeated(
        self, iteration: Iteration, ids: Iterable[int], times: Sequence[float]
    ) -> list[Inference]:
        """The same of an iteration and those after it, as many as it `repeats` at most, by when
        each ended: each row got its id each time.
        """
        sampled, size, n, now = iter(ids), self.limits.block_size, len(times), times[-1]
        running = State.RUNNING  # looked up once, which is slow in Python 3.11
        preemptive, served, over = self.order.preemptive, [], []
        for row in iteration.rows:
            inference, _, n_tokens, _, samples, idle, recomputed = row
            token = next(sampled) if samples else None
            # one that was cancelled meanwhile is not running: its id is dropped
            if idle or inference.state is not running:
                continue
            inference.computed += n_tokens + n - 1
            if preemptive:
                self.order.computed(inference, n_tokens - recomputed, now)
            if token is not None:
                served.append(inference)
                tokens = inference.tokens
                tokens += [token] * n
                inference.token_times.extend(times)
                if inference.stop is not None:
                    inference.stopped = inference.stop(token)
                if len(tokens) == inference.num_tokens or inference.stopped:
                    inference.is_over = True
                    over.append(inference)
            if not inference.decodes:
                self._totals.computed(row)
                inference.interruptions.recomputed_tokens += recomputed
                inference.decodes = bool(inference.tokens) and inference.uncomputed == 1
            if (
                inference.keys is not None
                and inference.computed >= (inference.num_cached_blocks + 1) * size
            ):
                self.pool.cache_computed(inference, inference.keys)
        self._totals.completion_tokens += len(served) * n
        self.queue.charge_completions(served)
        return self._release(over, now) if over else []

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; what is being shared stays shared."""
        self.pool.forget_all()

    def _release(self, over: list[Inference], now: float) -> list[Inference]:
        """Answer what is done now: each on its own, or in a request-level batch all of them once
        nobody is left.

        There a stream is answered with its own last token all the same; its row stays, idle, until
        the batch ends.
        """
        leave = True
        if self.policy.request_level:
            over = [inference for inference in self.running.values() if inference.is_over]
            leave = len(over) == len(self.running)
        answered = [i for i in over if i.state is State.RUNNING and (leave or i.streamed)]
        for inference in over if leave else ():
            self._end_running(inference, now)
        if self._response_order is not None:
            for inference in answered:
                self.pool.release(inference)
            answered = self._response_order.hold(answered) + self._response_order.free
        for inference in answered:
            self._end(inference, State.FINISHED, now)
            self.queue.learn(inference)
        return answered

    def fail(
        self, inferences: Iterable[Inference], error: ServingError, now: float
    ) -> list[Inference]:
        """End the given inferences with an error, wherever they are; return all that are now to be
        answered.

        Those already over are left alone. Blocks are free at once. In a request-level batch the row
        of a cancelled or expired inference stays, idle, until the batch ends; one that failed takes
        its row along.
        """
        return self._fail(((inference, error) for inference in inferences), now)

    def _fail(
        self, errors: Iterable[tuple[Inference, ServingError]], now: float
    ) -> list[Inference]:
        """The same, each with an error of its own."""
        ended = []
        for inference, error in errors:
            state = _EXITS.get(type(error), State.FAILED)
            if inference.state is State.WAITING:
                if inference.id in self.waiting:
                    self.queue.leave(inference)
            elif inference.state is not State.RUNNING:
                continue
            elif inference.id in self.running and (
                state is State.FAILED or not self.policy.request_level
            ):
                self._end_running(inference, now)
            inference.error = error
            self._end(inference, state, now)
            ended.append(inference)
        return ended + self._release([], now) if ended else []

    def expire(self, now: float) -> list[Inference]:
        """End every inference whose deadline has passed, or its time in its level's queue."""
        due = self.next_deadline()
        if due is None or due > now:
            return []
        passed = DeadlinePassed("The request's deadline passed before its answer.")
        ended = self._fail([(late, passed) for late in self._deadlines.due(now)], now)
        return ended + self._fail(self.queue.timed_out(now), now)

    def limit_blocks(self, n_blocks: int, now: float) -> list[Inference]:
        """Make the pool as large as the engine's, before anything has run; return the requests that
        it can never hold.
        """
        self.pool = PrefixCache(n_blocks, self.limits.block_size)
        groups: dict[int, list[Inference]] = {}
        for inference in self.waiting.values():
            groups.setdefault(
                inference.group if self.policy.request_level else inference.id, []
            ).append(inference)
        ended = []
        for group in groups.values():
            try:
                refuse_too_large(group, self.policy, self.limits, n_blocks)
            except InvalidRequest as error:
                ended += self._fail([(inference, error) for inference in group], now)
        return ended

    def next_deadline(self) -> float | None:
        """When `expire` must be called next, if anything has a deadline."""
        late, timeout = self._deadlines.next, self.queue.next_timeout
        if late is None or timeout is None:
            return timeout if late is None else late
        return min(late, timeout)

    @property
    def processed(self) -> int:
        """Prompt and completion tokens since the start, each once."""
        return self._totals.processed

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def in_flight(self) -> list[Inference]:
        return [*self.waiting.values(), *self.running.values(), *self._held.values()]

    def snapshot(self) -> Snapshot:
        used = self.pool.n_blocks - self.pool.free_blocks
        running = sum(inference.state is State.RUNNING for inference in self.running.values())
        running += len(self._held)
        seen = astuple(self._totals)
        return Snapshot(len(self.waiting), running, used, self.pool.n_blocks, *seen)

    def _end(self, inference: Inference, state: State, now: float) -> None:
        self._pauses.resume(inference, now)
        inference.state, inference.answered_at, inference.is_over = state, now, True
        inference.interruptions.end(now)
        self.pool.release(inference)
        if self._response_order is not None:
            self._response_order.forget(inference)


def build(settings: Any, kind: Callable[..., Scheduler] = Scheduler) -> Scheduler:
    """The scheduler of a server's settings, of which it reads the attributes; a Config has them.

    `kind`: takes what Scheduler takes.
    """
    return kind(
        chosen(MODES, settings.mode, settings),
        chosen(ORDERS, settings.order, settings),
        limits=Limits(settings.max_batch_size, settings.token_budget, settings.block_size),
        n_blocks=settings.n_blocks,
        max_in_flight=settings.max_in_flight,
        decoder_batch_sizes=settings.decoder_batch_sizes,
        length_predictor=settings.length_predictor,
        user_limits=UserLimits(settings.user_requests_per_minute, settings.user_tokens_per_minute),
        preserve_ordering=settings.preserve_ordering,
    )
