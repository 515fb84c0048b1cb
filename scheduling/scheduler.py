"""Requests become rows, rows become iterations: a state machine without thread, lock or clock.

Knows inferences, rows, KV blocks (as integers) and the times it is given; no torch and no HTTP.

    enqueue → schedule → apply, with the exits fail and expire
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scheduling.adapters import Adapters
from scheduling.admission import never_fitting, refuse_too_large
from scheduling.errors import Cancelled, DeadlinePassed, Overloaded, ServingError
from scheduling.extensions import HOOKS, Extension, overridden
from scheduling.inference import Inference, Iteration, State
from scheduling.iteration import rows_of
from scheduling.latency import Shortage
from scheduling.ledger import Ledger
from scheduling.padding import padding
from scheduling.pauses import PausedRows, PromotedRows
from scheduling.policies import Limits, Order, Plan, Policy, Rule, Victim, View
from scheduling.policies.victims import NEWEST
from scheduling.prefix_cache import PrefixCache
from scheduling.queue import Timers, WaitingQueue
from scheduling.records import Snapshot
from scheduling.repetition import plans_repeat, same_rows
from scheduling.speculation import Speculation, kept
from scheduling.user_policies import check_plan

EXITS: dict[type[ServingError], State] = {Cancelled: State.CANCELLED, DeadlinePassed: State.EXPIRED}


class Scheduler:
    """Carries out a policy's plans: rows, KV blocks, states, time stamps.

    What it or a `View` names is a field, `extensions` (`building.features`) are known by their
    hooks alone; it calls the hooks of both.
    """

    def __init__(
        self,
        policy: Policy,
        order: Order,
        limits: Limits,
        pool: PrefixCache,
        extensions: Sequence[Extension] = (),
        victim: Victim = NEWEST,
        *,
        adapters: Adapters | None = None,
        speculation: Speculation | None = None,
    ):
        self.policy, self.order, self.victim = policy, order, victim
        self.limits, self.pool = limits, pool
        self.queue = WaitingQueue(order.place, policy.n_bins, order.by_user)
        self.waiting: Mapping[int, Inference] = self.queue.by_id
        self.running: dict[int, Inference] = {}
        self.prompt_tokens = self.completion_tokens = 0  # since the start, each once
        self._deadlines: Timers[Inference] = Timers(lambda i: i.answered_at is not None)
        self._unanswered: dict[int, Inference] = {}  # by id, wherever they are
        self._next_id = 0
        self._batches = 0

        after_s = order.promote_after_s
        self.pauses = PausedRows(order) if after_s is None else PromotedRows(order, after_s)
        self.shortage, self.adapters, self.speculation = Shortage(), adapters, speculation
        self.ledger = Ledger(order.weights) if order.by_user else None
        rules: list[Rule | Extension] = [policy, order, victim, *extensions]
        self.memories = {kind: kind() for rule in rules for kind in rule.remembers}
        # finished inferences that are answered once earlier ones are
        self.held: dict[int, Inference] = {}
        core = self.ledger, *self.memories.values(), speculation, adapters, self.pauses
        self._timers: list[Timers[Any]] = [self._deadlines]
        self.extensions: list[Extension] = []
        self._hooks: dict[str, list[Extension]] = {hook: [] for hook in HOOKS}
        for each in (*extensions, *core, self.shortage):
            if each is not None:
                self.attach(each)
        self.plans_repeat = plans_repeat(policy, order, speculation)

    def attach(self, extension: Extension) -> None:
        """Call an extension from now on, after those attached before."""
        extension.attach(self)
        self.extensions.append(extension)
        if extension.timers is not None:
            self._timers.append(extension.timers)
        for hook in overridden(extension):
            self._hooks[hook].append(extension)

    def enqueue(self, inferences: Sequence[Inference], now: float) -> None:
        """Queue a request, all or none. Raises InvalidRequest, or Overloaded beyond the limits."""
        refuse_too_large(inferences, self.policy, self.limits, self.pool.n_blocks)
        self.order.check(inferences)
        running = len(self.running) + len(self.held)
        if len(self.waiting) + running + len(inferences) > self.limits.max_in_flight:
            raise Overloaded(
                f"{len(self.waiting)} requests are waiting and {running} running; try "
                "again later, or start the server with a larger --max-waiting."
            )
        for extension in self._hooks["check"]:
            extension.check(inferences, now)
        group = self._next_id
        for inference in inferences:
            inference.id, inference.group, inference.arrived_at = self._next_id, group, now
            self._unanswered[inference.id] = inference
            self._next_id += 1
        for extension in self._hooks["arrive"]:
            extension.arrive(inferences, now)
        self.order.arrive(inferences, self.processed)
        for inference in inferences:
            self._wait(inference, now)
            if inference.deadline is not None:
                self._deadlines.add(inference.deadline, inference)

    def schedule(self, now: float) -> tuple[Iteration, float | None]:
        """Carry the policy's plan out; return the next iteration, maybe empty, and `wake_at`.

        Raises ValueError, before anything has changed, if the plan is impossible.
        """
        for extension in self._hooks["before_plan"]:
            extension.before_plan(now)
        view = self.view(now)
        plan, same = Plan(), self.plans_repeat
        rows, reserved = same_rows(view, self.policy) if same else ([], {})
        if not rows:
            plan = self.policy.plan(view)
            check_plan(plan, self.policy)
            rows, reserved = rows_of(plan, view, self.policy, self.running.keys(), self.waiting)
        self.shortage.note(plan.short_of_blocks, now)
        for inference, _ in reserved.values():  # first, before reservations evict the blocks found
            if found := view.find(inference):
                self.prompt_tokens += self.pool.share_found(inference, found)
        for inference in plan.preempt:
            self._preempt(inference, now)
        if plan.short_of_blocks and plan.preempt and not (rows or plan.admit):
            return self.schedule(now)  # its first row gave way to itself, as vLLM's may
        for inference, tokens in reserved.values():
            self.pool.reserve(inference, tokens)
        for inference, _ in plan.admit:
            self._admit(inference, now)
        running, adapters = self.running.values(), self.adapters
        loads = adapters.place(plan.admit, rows, running) if adapters is not None else ()
        for extension in self._hooks["planned"]:
            extension.planned(rows, now)
        self._batches += bool(plan.admit)
        iteration = Iteration(
            rows, len(self.running), len(self.waiting),
            blocks_used=self.pool.n_blocks - self.pool.free_blocks, reason=plan.reason,
            padding=padding(rows, self.limits), preempted=len(plan.preempt), loads=loads,
        )  # fmt: skip
        return iteration, plan.wake_at

    def view(self, now: float) -> View:
        """Return what a policy may know now."""
        return View(
            now=now, queues=self.queue.queues, running=self.running.values(), pool=self.pool,
            find=self.pool.finder(), limits=self.limits, order=self.order, victim=self.victim,
            request_level=self.policy.request_level, rows=self.pauses.rows.values(),
            paused=self.pauses.paused.values(), processed=self.processed, ledger=self.ledger,
            memories=self.memories, speculation=self.speculation, adapters=self.adapters,
        )  # fmt: skip

    def _wait(self, inference: Inference, now: float) -> None:
        """Queue an inference that arrives, or was preempted."""
        self.queue.put(inference)
        for extension in self._hooks["wait"]:
            extension.wait(inference, now)

    def stop_waiting(self, inference: Inference) -> None:
        """Take an inference that is admitted, or ends, from the queue."""
        self.queue.take(inference)
        for extension in self._hooks["leave"]:
            extension.leave(inference)

    def _admit(self, inference: Inference, now: float) -> None:
        """Waiting → running."""
        self.stop_waiting(inference)
        for extension in self._hooks["admit"]:
            extension.admit(inference, now)
        inference.state = State.RUNNING
        if inference.admitted_at is None:
            inference.admitted_at = now
            inference.standing.batch = self._batches
            inference.standing.position = len(self.running)
            self.pool.count_query(inference)
        inference.interruptions.end(now)
        self.running[inference.id] = inference

    def _preempt(self, inference: Inference, now: float) -> None:
        """Running → waiting: its blocks are free, and what they held is computed again later."""
        self._stop_running(inference, now)
        interrupted = inference.interruptions
        interrupted.recompute_until = max(interrupted.recompute_until, inference.computed)
        interrupted.preempted_at = now
        interrupted.preemptions += 1
        inference.computed = 0
        if inference.prefix is not None:
            inference.prefix.n_blocks = 0
        inference.decodes = False  # for policies it joins like a prompt, if of one token
        self.pool.release(inference)
        self._wait(inference, now)

    def _stop_running(self, inference: Inference, now: float) -> None:
        del self.running[inference.id]
        for extension in self._hooks["stop_running"]:
            extension.stop_running(inference, now)

    def apply(self, iteration: Iteration, ids: Iterable[int], now: float) -> list[Inference]:
        """Take the sampled ids, pending ones below 0; return the inferences to answer."""
        sampled, size = iter(ids), self.limits.block_size
        running = State.RUNNING  # looked up once, which is slow in Python 3.11
        preemptive, got_token, over = self.order.preemptive, [], []
        for row in iteration.rows:
            inference, _, n_tokens, _, samples, idle, recomputed, drafts = row
            # without drafts the iterator itself, of which the loop takes one: faster than a list
            new = kept(drafts, sampled) if drafts else sampled if samples else ()
            if idle or inference.state is not running:
                if samples and not drafts:  # one that was cancelled meanwhile: its id is dropped
                    next(sampled)
                continue
            tokens, stop = inference.tokens, inference.stop
            for token in new:
                got_token.append(inference)
                tokens.append(token)
                inference.token_times.append(now)
                if stop is not None and token >= 0:
                    inference.stopped = stop(token)
                if len(tokens) == inference.num_tokens or inference.stopped:
                    inference.is_over = True
                    over.append(inference)
                if not drafts or inference.is_over:
                    break
            else:
                if samples and not drafts:
                    raise IndexError("the engine returned too few ids")
            if drafts and self.speculation is not None:
                n_tokens = self.speculation.verified(row, self.pool)
            inference.computed += n_tokens
            if preemptive:
                self.order.computed(inference, n_tokens - recomputed, now)
            if not inference.decodes:
                self.prompt_tokens += row.new_prompt_tokens
                inference.interruptions.recomputed_tokens += recomputed
                inference.decodes = bool(inference.tokens) and inference.uncomputed == 1
            prefix = inference.prefix
            if prefix is not None and inference.computed >= (prefix.n_blocks + 1) * size:
                self.pool.cache_computed(inference, prefix)
        self.completion_tokens += len(got_token)
        for extension in self._hooks["sampled"]:
            extension.sampled(got_token, now)
        return self.finish(over, now) if over else []

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; blocks that are shared now stay shared."""
        self.pool.forget_all()

    def forget_adapter(self, name: str) -> None:
        """Forget an adapter that no inference in flight has: its name may come to mean another."""
        if self.adapters is not None:
            self.adapters.forget(name)
        self.pool.forget_all()

    def finish(self, over: list[Inference], now: float) -> list[Inference]:
        """Answer finished inferences: each on its own, or in a request-level batch all at its end
        but for streams, whose rows stay, idle, until then.
        """
        leave = True
        if self.policy.request_level:
            over = [inference for inference in self.running.values() if inference.is_over]
            leave = len(over) == len(self.running)
        answered = [i for i in over if i.state is State.RUNNING and (leave or i.streamed)]
        for inference in over if leave else ():
            self._stop_running(inference, now)
        for inference in answered:
            self.pool.release(inference)
        for extension in self._hooks["finish"]:
            answered = extension.finish(answered)
        for inference in answered:
            self._end(inference, State.FINISHED, now)
        return answered

    def fail(
        self, inferences: Iterable[Inference], error: ServingError, now: float
    ) -> list[Inference]:
        """End inferences with an error, unless they are over; return all to answer now.

        Blocks are free at once. In a request-level batch the row of a cancelled or expired one
        stays, idle, until the batch ends; one that failed takes its row along.
        """
        return self._fail([(inference, error) for inference in inferences], now)

    def _fail(
        self, errors: Iterable[tuple[Inference, ServingError]], now: float
    ) -> list[Inference]:
        """End inferences, each with an error of its own."""
        ended = []
        for inference, error in errors:
            state = EXITS.get(type(error), State.FAILED)
            if inference.state not in (State.WAITING, State.RUNNING):
                continue
            if inference.id in self.waiting:
                self.stop_waiting(inference)
            elif inference.id in self.running and (
                state is State.FAILED or not self.policy.request_level
            ):
                self._stop_running(inference, now)
            inference.error = error
            self._end(inference, state, now)
            ended.append(inference)
        return ended + self.finish([], now) if ended else []

    def expire(self, now: float) -> list[Inference]:
        """End every inference whose deadline, or time in its level's queue, has passed."""
        due = self.next_deadline()
        if due is None or due > now:
            return []
        passed = DeadlinePassed("The request's deadline passed before its answer.")
        ended = self._fail([(late, passed) for late in self._deadlines.due(now)], now)
        for extension in self._hooks["expire"]:
            ended += self._fail(extension.expire(now), now)
        return ended

    def next_deadline(self) -> float | None:
        """Return when `expire` must be called next, if anything has a deadline."""
        times = [timers.next for timers in self._timers]
        return min([at for at in times if at is not None], default=None)

    def limit_blocks(self, n_blocks: int, now: float) -> list[Inference]:
        """Make the pool as large as the engine's; return the requests that it can never hold."""
        self.pool.limit(n_blocks)
        never = never_fitting(self.waiting.values(), self.policy, self.limits, n_blocks)
        return self._fail(never, now)

    @property
    def processed(self) -> int:
        """Prompt and completion tokens since the start, each once."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def in_flight(self) -> list[Inference]:
        """Return the inferences that are not answered, and those that have idle rows."""
        return [*(self._unanswered | self.running).values()]

    def snapshot(self) -> Snapshot:
        """Return how full it is now."""
        pool = self.pool
        running = [each.state for each in self.running.values()].count(State.RUNNING)
        return Snapshot(
            len(self.waiting),
            running + len(self.held),
            pool.n_blocks - pool.free_blocks,
            pool.n_blocks,
            self.prompt_tokens,
            self.completion_tokens,
            pool.queries,
            pool.hits,
        )

    def _end(self, inference: Inference, state: State, now: float) -> None:
        self._unanswered.pop(inference.id, None)
        for extension in self._hooks["end"]:
            extension.end(inference, now)
        inference.state, inference.answered_at, inference.is_over = state, now, True
        inference.interruptions.end(now)
        self.pool.release(inference)
