"""The waiting queue of vllm_order.py. Each request has a mirror, an `Inference` of ours, which an
order sorts; vLLM computes what the order names first.

An order that fails, or takes a minute, is replaced by first come, first served, which the log says.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm_order_settings import Predict, predictor_of

from scheduling import user_policies
from scheduling.errors import InvalidRequest
from scheduling.history import Memory
from scheduling.inference import CachedPrefix, Inference, Row, Slo, State
from scheduling.ledger import Ledger
from scheduling.policies import Fcfs, Limits, Order, View
from scheduling.policies.victims import NEWEST
from scheduling.prefix_cache import PrefixCache
from scheduling.queue import WaitingQueue

LONGEST_S = 60.0  # after which an order is taken to go on for ever
logger = logging.getLogger("vllm.order")
_key = secrets.token_bytes(16)  # of the users' names in this process' recordings


class OrderHangs(BaseException):
    """Raised in an order that goes on for LONGEST_S."""


_deciding = False  # whether an order's code runs


def _hangs(*_: Any) -> None:
    if _deciding:
        raise OrderHangs(f"it has been running for more than {LONGEST_S:.0f} s")


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise OrderHangs after LONGEST_S, and each second from then on: an order may swallow it.
    Python runs handlers of signals in its main thread alone, where vLLM's core has its loop.
    """
    global _deciding
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _hangs)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S, 1.0)
    _deciding = True
    try:
        yield
    finally:
        _deciding = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class OrderedQueue(RequestQueue):
    """vLLM's waiting queue, by an order of ours.

    A *pass* is what vLLM takes from it in one `schedule`: its order is asked once, and requests
    that vLLM skips return to their places.
    """

    def __init__(self, scheduler: Any, order: Order, predict: Predict):
        self.order, self._scheduler, self._predict = order, scheduler, predict
        self.mirrors: dict[int, Inference] = {}  # of all in flight, by the recorder's numbers
        self.requests: dict[int, Any] = {}  # vLLM's, of the same
        self.running: dict[int, Inference] = {}
        self.processed = 0  # prompt and completion tokens since the start, each once
        self.ledger = Ledger(order.weights) if order.by_user else None
        self.memories: dict[type[Memory], Any] = {kind: kind() for kind in order.remembers}
        self._waiting = WaitingQueue(order.place, 1, order.by_user)
        self._arriving: dict[int, Inference] = {}  # since the last schedule
        self._limits = Limits(
            scheduler.max_num_running_reqs, scheduler.max_num_scheduled_tokens, scheduler.block_size
        )
        self._caching = bool(scheduler.cache_config.enable_prefix_caching)
        self._failed = False
        self.end_pass()

    # ---- requests come, and go

    def mirror(self, number: int, request: Any, at: float) -> Inference:
        """Return the mirror of a request that the scheduler gets at this time."""
        params = request.sampling_params
        said = (params.extra_args if params else None) or {}
        ids: Any = request.prompt_token_ids or range(request.num_prompt_tokens)
        mirror = Inference(
            ids,
            request.max_tokens,
            user=_user(said.get("user", request.cache_salt), self.order.weights),
            priority=int(_number(said.get("priority")) or 0),
            slo=Slo(_number(said.get("ttft_ms")), _number(said.get("tpot_ms"))),
            id=number,
            group=number,
            arrived_at=at,
        )
        expected = _number(said.get("expected_tokens")) or self._expected(ids, request.max_tokens)
        mirror.standing.predicted_tokens = int(expected)
        self.mirrors[number], self.requests[number] = mirror, request
        return mirror

    def _expected(self, ids: Any, max_tokens: int) -> int:
        try:
            with limited():
                return max(1, int(self._predict(ids, max_tokens)))
        except (*user_policies.FAULTS, OrderHangs) as error:
            self._predict = predictor_of("")
            said = user_policies.described(error)
            logger.error("PREDICTOR failed, max_tokens from now on: %s", said)
            return max_tokens

    def begin_pass(self) -> None:
        """Let the requests wait that came since the last schedule."""
        self._in_pass = True
        arriving, self._arriving = self._arriving, {}
        for mirror in arriving.values():
            try:
                with limited():
                    try:
                        self.order.check([mirror])
                    except InvalidRequest:  # a level that there is not
                        mirror.priority = 0
                        self.order.check([mirror])
                    self.order.arrive([mirror], self.processed)
            except (*user_policies.FAULTS, OrderHangs) as error:
                self._fall_back(error)
            self._wait(mirror)

    def _wait(self, mirror: Inference) -> None:
        if self._caching:
            mirror.prefix = CachedPrefix([b"", *self.requests[mirror.id].block_hashes])
        try:
            with limited():
                self._waiting.put(mirror)
        except (*user_policies.FAULTS, OrderHangs) as error:
            self._fall_back(error)
            self._waiting.put(mirror)
        if self.ledger:
            self.ledger.wait(mirror, mirror.arrived_at)

    def _leave(self, mirror: Inference) -> None:
        self._waiting.take(mirror)
        if self.ledger:
            self.ledger.leave(mirror)

    def forget(self, numbers: Iterable[int]) -> None:
        """Requests are over."""
        for number in numbers:
            for each in (self.mirrors, self.requests, self.running):
                each.pop(number, None)

    # ---- iterations

    def planned(self, step: dict[str, Any]) -> None:
        """Take what vLLM will compute: requests that joined, and those that gave up before."""
        now = step["at"]
        starts = {number: start for number, start, _ in step["rows"]} if self._popped else {}
        for number, mirror in self._popped.items():
            self._leave(mirror)
            if self.ledger:
                self.ledger.admit(mirror, now)
            mirror.state, self.running[number] = State.RUNNING, mirror
            mirror.admitted_at = mirror.admitted_at or now
            mirror.computed = starts[number]  # found in the prefix cache
            found = min(mirror.computed, len(mirror.prompt_ids))
            self.processed += max(0, found - mirror.interruptions.recompute_until)
        self.end_pass()
        self.forget(step["aborted"])
        if self.memories:
            known = [(self.mirrors[i], *row) for i, *row in step["rows"] if i in self.mirrors]
            rows = [
                Row(i, start, n, [], start + n >= len(i.prompt_ids) + len(i.tokens), False)
                for i, start, n in known
            ]
            for memory in self.memories.values():
                memory.planned(rows, now)

    def sampled(self, step: dict[str, Any]) -> None:
        """Take what vLLM has computed."""
        until, sampled = step["until"], []
        for number, start, n, made in step["rows"]:
            if (mirror := self.mirrors.get(number)) is None:
                continue
            mirror.tokens += [0] * made
            mirror.token_times += [until] * made
            sampled += [mirror] * made
            if number in self.running:  # else it was preempted meanwhile
                if not mirror.decodes:
                    first = max(start, mirror.interruptions.recompute_until)
                    self.processed += max(0, min(start + n, len(mirror.prompt_ids)) - first)
                mirror.computed = start + n
                if mirror.prefix:
                    mirror.prefix.n_blocks = mirror.computed // self._limits.block_size
                mirror.decodes = bool(mirror.tokens) and mirror.uncomputed == 1
            mirror.is_over = number in step["finished"]
        self.processed += len(sampled)
        for each in (self.ledger, *self.memories.values()):
            if each is not None:
                each.sampled(sampled, until)
        self.forget(step["finished"])

    def _preempt(self, mirror: Inference) -> None:
        del self.running[mirror.id]
        past = mirror.interruptions
        past.recompute_until = max(past.recompute_until, mirror.computed)
        past.preempted_at = self._scheduler.now
        past.preemptions += 1
        mirror.computed, mirror.decodes = 0, False
        self._wait(mirror)

    # ---- the order

    def end_pass(self) -> None:
        """vLLM has taken what it takes in one `schedule`."""
        self._in_pass, self._popped = False, dict[int, Inference]()
        self._names: Iterator[Inference] | None = None
        self._head: Inference | None = None

    def _first(self) -> Inference | None:
        """Return the first request in the order; None if the order holds all others back."""
        while self._head is None and len(self):
            try:
                with limited():
                    if self._names is None:
                        queue, view = self._waiting.queues[0], self._view()
                        self._names = iter(self.order.ordered(queue, view))
                    named = next(self._names, None)
                if named is None and (self._popped or self.running):
                    break
                if named is None:
                    raise ValueError(f"it names none of {len(self)} requests, and nothing runs")
                if named.id in self._popped and self._failed:
                    continue
                if named.id in self._popped or self._waiting.by_id.get(named.id) is not named:
                    raise ValueError("it names a request twice, or one that does not wait")
                self._head = named
            except (*user_policies.FAULTS, OrderHangs) as error:
                self._fall_back(error)
        return self._head

    def _view(self) -> View:
        running = self.running.values()
        return View(
            now=self._scheduler.now, queues=self._waiting.queues, running=running, rows=running,
            pool=PrefixCache(0, self._limits.block_size), find=self._finder(), limits=self._limits,
            order=self.order, victim=NEWEST, processed=self.processed, ledger=self.ledger,
            memories=self.memories,
        )  # fmt: skip

    def _finder(self) -> Any:
        """Return vLLM's own look-up of cached blocks, of each waiting request once in a pass."""
        found: dict[int, range] = {}

        def find(mirror: Inference) -> range:
            if not self._caching or mirror.state is not State.WAITING:
                return range(0)
            if mirror.id not in found:
                manager, request = self._scheduler.kv_cache_manager, self.requests[mirror.id]
                tokens = manager.get_computed_blocks(request)[1]
                found[mirror.id] = range(tokens // self._limits.block_size)
            return found[mirror.id]

        return find

    def _fall_back(self, error: BaseException) -> None:
        """Serve first come, first served from now on."""
        if self._failed:
            raise error
        path = user_policies.file_of(type(self.order))
        said = user_policies.described(error, path)
        logger.error("ORDER failed, first come, first served from now on: %s", said)
        self.order, self._failed, self._names, self._head = Fcfs(), True, None, None
        waiting, self._waiting = self._waiting.by_id, WaitingQueue(self.order.place, 1, False)
        for mirror in waiting.values():
            self._waiting.put(mirror)

    # ---- what vLLM calls

    def _number(self, request: Any) -> int:
        return self._scheduler.number(request)

    def add_request(self, request: Any) -> None:
        number = self._number(request)
        self.running.pop(number, None)
        self._arriving[number] = self.mirrors[number]

    def peek_request(self) -> Any:
        if (first := self._first()) is None:
            raise IndexError("peek from an empty queue")
        return self.requests[first.id]

    def pop_request(self) -> Any:
        request = self.peek_request()
        assert self._head is not None
        self._popped[self._head.id] = self._head
        self._head = None
        return request

    def prepend_request(self, request: Any) -> None:
        number = self._number(request)
        if self._popped.pop(number, None) is None:
            self._preempt(self.running[number])

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Any) -> None:
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            number = self._number(request)
            self._arriving.pop(number, None)
            if number in self._waiting.by_id:
                self._leave(self.mirrors[number])

    def __bool__(self) -> bool:
        """Return whether vLLM may take one; the order is asked only if a row is free."""
        if not self._in_pass or len(self._scheduler.running) >= self._limits.max_batch_size:
            return len(self) > 0
        return self._first() is not None

    def __len__(self) -> int:
        return len(self._waiting.by_id) + len(self._arriving) - len(self._popped)

    def __iter__(self) -> Iterator[Any]:
        """Return those that wait by their keys, those that an order sorts anew as they came."""
        waiting = self._waiting.queues[0].by_key.values()
        return (self.requests[i.id] for i in waiting if i.id not in self._popped)


def _number(value: Any) -> float | None:
    """Return a number above 0 that a request states; None if it states none."""
    try:
        return number if 0 < (number := float(value)) < float("inf") else None
    except (TypeError, ValueError):
        return None


def _user(name: Any, weights: Any) -> str | None:
    """Return a user's name as recordings have it: hidden, unless the order's settings name it."""
    if name is None or name in weights:
        return name
    return hashlib.blake2b(str(name).encode(), key=_key, digest_size=6).hexdigest()
