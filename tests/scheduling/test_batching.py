"""The handler thread forgets no request, and is ended by an engine that is broken for good."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from batching import FAILURES, BatchingManager
from generate.fake import FakeGenerator, token
from scheduling.errors import (
    DeadlinePassed,
    Draining,
    EngineFailed,
    GenerationFailed,
    InvalidRequest,
)
from scheduling.inference import Generator, Inference, Iteration, State, TokenEvent
from scheduling.policies import Dynamic, NoBatching, Policy, Windowed
from scheduling.records import IterationRecord
from tests.servers import PATIENCE_S, ClientOf, Spelling
from tests.virtual import every_policy, make_scheduler

ALL = every_policy()
ManagerOf = Callable[..., BatchingManager]


@pytest.fixture
def manager_of() -> Iterator[ManagerOf]:
    managers: list[BatchingManager] = []

    def make(policy: Policy, generator: Generator | None = None, **extra: Any) -> BatchingManager:
        scheduler = make_scheduler(policy, max_batch_size=4, n_blocks=1000)
        engine = generator or FakeGenerator(lambda seconds: None)
        managers.append(BatchingManager(scheduler, lambda: engine, **extra))
        return managers[-1]

    yield make
    for manager in managers:
        manager.close()
        pool = manager._scheduler.pool
        assert not manager._scheduler.has_work, "requests were lost"
        assert pool.free_blocks == pool.n_blocks, "blocks were lost"


def wait(*inferences: Inference) -> None:
    for inference in inferences:
        assert inference.done.wait(PATIENCE_S), "nobody answered"


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: type(policy).__name__)
def test_many_threads_get_the_tokens_of_each(policy: Policy, manager_of: ManagerOf) -> None:
    manager = manager_of(policy)
    inferences = [Inference([i, 1, 2], 1 + i % 7) for i in range(60)]
    with ThreadPoolExecutor(60) as pool:
        list(pool.map(lambda each: manager.enqueue([each]), inferences))
    wait(*inferences)
    for each in inferences:
        assert each.tokens == [token(each.prompt_ids, 0, i) for i in range(each.num_tokens)]


class Recorder:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.live_rows: list[int] = []
        self.states: list[State] = []

    def iteration(self, record: IterationRecord) -> None:
        self.live_rows.append(record.rows["live"])
        if self.error:
            raise self.error

    def answered(self, inference: Inference) -> None:
        assert not inference.done.is_set(), "observers are told before the caller wakes"
        self.states.append(inference.state)
        if self.error:
            raise self.error


def test_observers_and_listeners_that_raise_disturb_nobody(manager_of: ManagerOf) -> None:
    def listener(update: TokenEvent) -> None:
        raise ValueError("a defect")

    broken, whole = Recorder(OSError("disk full")), Recorder()
    manager = manager_of(Dynamic())
    for observer in (broken, whole):
        manager.observe(observer)
    manager.enqueue([inference := Inference([0], 3, listener=listener, streamed=True)])
    wait(inference)
    assert broken.live_rows == whole.live_rows == [1, 1, 1]
    assert broken.states == whole.states == [State.FINISHED]
    assert inference.error is None and manager.not_ready_because() is None


def test_observers_hear_of_requests_that_end_without_an_iteration(manager_of: ManagerOf) -> None:
    recorder = Recorder()
    manager = manager_of(Windowed(max_batch_delay_ms=3.6e06, batch_size_target=9))
    manager.observe(recorder)
    late, gone = Inference([0], 1, deadline=manager.clock() + 0.01), Inference([0], 1)
    manager.enqueue([late, gone])
    wait(late)
    manager.cancel([gone])
    assert recorder.states == [State.EXPIRED, State.CANCELLED] and recorder.live_rows == []
    assert isinstance(late.error, DeadlinePassed), "a deadline wakes the handler in a window"


def test_a_server_is_unready_when_an_iteration_never_ends_and_when_it_drains(
    manager_of: ManagerOf,
) -> None:
    """Draining finishes what is in flight, and refuses the rest."""
    gate = Spelling([1], gated=True)
    manager = manager_of(Dynamic(), gate)
    manager.enqueue([inference := Inference([0], 3)])
    assert gate.started.acquire(timeout=PATIENCE_S)
    assert manager.not_ready_because() is None
    time.sleep(0.02)
    why = manager.not_ready_because(stalled_after_s=0.01)
    assert why and "an iteration has been running" in why
    manager.drain()
    with pytest.raises(Draining):
        manager.enqueue([Inference([0], 1)])
    assert manager.not_ready_because() == "the server is shutting down"
    gate.go.release(3)
    wait(inference)
    assert inference.tokens == [1, 1, 1]


def test_closing_answers_everybody_in_flight(manager_of: ManagerOf) -> None:
    gate = Spelling([1], gated=True)
    manager = manager_of(NoBatching(), gate)
    running, waiting = Inference([0], 9), Inference([0], 9)
    manager.enqueue([running, waiting])
    assert gate.started.acquire(timeout=PATIENCE_S)
    closing = threading.Thread(target=manager.close)
    closing.start()
    wait(running, waiting)
    gate.go.release()
    closing.join(PATIENCE_S)
    assert isinstance(running.error, Draining) and isinstance(waiting.error, Draining)


def test_an_engine_that_found_less_memory_answers_those_it_can_never_hold() -> None:
    loading = threading.Event()

    def load() -> Generator:
        assert loading.wait(PATIENCE_S)
        generator = FakeGenerator(lambda seconds: None)
        generator.n_blocks = 2
        return generator

    manager = BatchingManager(make_scheduler(Dynamic()), load)
    large, small = Inference([0] * 8, 2), Inference([0] * 4, 4)
    for each in (large, small):
        manager.enqueue([each])
    assert manager.not_ready_because() == "the model is still loading"
    assert not small.done.is_set(), "requests wait for the model"
    loading.set()
    wait(large, small)
    assert isinstance(large.error, InvalidRequest) and "the whole pool has 2" in str(large.error)
    assert small.error is None and manager.snapshot().n_blocks == 2
    manager.close()


def test_the_handler_sleeps_between_iterations_for_the_loop_interval(manager_of: ManagerOf) -> None:
    manager = manager_of(Dynamic(), loop_interval_s=0.02)
    manager.enqueue([inference := Inference([0], 5)])
    wait(inference)
    assert min(b - a for a, b in zip(inference.token_times, inference.token_times[1:])) >= 0.02


class Waited:
    """A lock that counts the threads which wait for it."""

    def __init__(self, lock: threading.Condition) -> None:
        self.lock, self.waiting, self.most = lock, 0, 0

    def __enter__(self) -> None:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        self.lock.acquire()
        self.waiting -= 1

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lock, name)


@pytest.mark.parametrize("call", ["enqueue", "cancel", "expire"])
def test_of_threads_that_come_together_one_waits_for_the_handlers_lock(
    call: str, manager_of: ManagerOf
) -> None:
    gate = Spelling(gated=True)
    manager = manager_of(Dynamic(), gate)
    manager.enqueue([inference := Inference([0], 1)])
    assert gate.started.acquire(timeout=PATIENCE_S), "the handler thread waits for the engine"
    lock = manager._changed = Waited(manager._changed)  # type: ignore[assignment]
    inferences = [Inference([0], 1) for _ in range(20)]
    calls = {
        "enqueue": lambda each: manager.enqueue([each]),
        "cancel": lambda _: manager.cancel([inference]),
        "expire": lambda _: manager.expire(),
    }
    threads = [threading.Thread(target=calls[call], args=[each]) for each in inferences]
    with lock.lock:
        for thread in threads:
            thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert lock.most == 1
    gate.gated = False
    gate.go.release()
    wait(inference, *(inferences if call == "enqueue" else []))


def test_a_stream_learns_of_its_end_last(manager_of: ManagerOf) -> None:
    # A cancellation that came while the handler thread told a stream of its token overtook it, and
    # the stream, told that more would come, waited for good.
    manager = manager_of(Dynamic())
    told: list[bool] = []
    cancelling: list[threading.Thread] = []

    def listen(news: TokenEvent) -> None:
        if not cancelling:
            cancelling.append(threading.Thread(target=manager.cancel, args=([inference],)))
            cancelling[0].start()
            cancelling[0].join(0.2)  # time enough to overtake
        told.append(news.is_over)

    inference = Inference([1], 100, listener=listen, streamed=True)
    manager.enqueue([inference])
    wait(inference)
    cancelling[0].join()
    assert told[-1] and not told[0]


def test_a_window_without_end_is_flushed_by_its_target(manager_of: ManagerOf) -> None:
    longer_than_threads_wait = 1e13
    manager = manager_of(Windowed(max_batch_delay_ms=longer_than_threads_wait, batch_size_target=2))
    first, second = Inference([1], 2), Inference([1], 2)
    manager.enqueue([first])
    assert not first.done.wait(0.1)
    manager.enqueue([second])
    wait(first, second)


def started(generator: Generator) -> tuple[BatchingManager, list[BaseException]]:
    failures: list[BaseException] = []
    manager = BatchingManager(make_scheduler(Dynamic(), max_batch_size=2), lambda: generator)
    manager.on_failure(failures.append)
    return manager, failures


def ended(manager: BatchingManager) -> None:
    """Wait for the handler thread's end, and see that no request and no block is left."""
    manager._thread.join(PATIENCE_S)
    left = manager.snapshot()
    assert not manager._thread.is_alive()
    assert (left.waiting, left.running, left.blocks_used) == (0, 0, 0)


def test_failures_with_a_success_between_them_end_nothing() -> None:
    engine = Spelling()
    manager, failures = started(engine)
    for fails in 2 * [*[True] * (FAILURES - 1), False]:
        engine.fails = fails
        manager.enqueue([inference := Inference([0], 1)])
        wait(inference)
        assert (inference.error is not None) == fails
    assert manager.not_ready_because() is None and failures == []
    manager.close()


def test_after_three_failures_in_a_row_everybody_is_answered_and_nobody_new_is_taken() -> None:
    """/ready stayed 200 on a GPU that failed in every iteration."""
    engine = Spelling(gated=True)
    engine.fails = True
    manager, failures = started(engine)
    inferences = [Inference([0], 5) for _ in range(9)]  # of which two run at a time
    manager.enqueue(inferences)
    engine.go.release(FAILURES)
    wait(*inferences)
    ended(manager)
    kinds = [type(inference.error) for inference in inferences]
    assert kinds == [GenerationFailed] * 6 + [EngineFailed] * 3
    why = "3 iterations in a row failed, the last with RuntimeError: no luck"
    assert manager.not_ready_because() == why and why in str(inferences[-1].error)
    with pytest.raises(EngineFailed, match="send the request to another one"):
        manager.enqueue([Inference([0], 1)])
    assert [str(error) for error in failures] == [why]
    manager.on_failure(failures.append)
    assert len(failures) == 2, "a later observer is notified at once"
    manager.close()


@pytest.mark.parametrize("raised", [ZeroDivisionError("by zero"), SystemExit(3)])
def test_a_defect_of_the_loop_itself_is_no_silence(raised: BaseException) -> None:
    def defect() -> None:
        raise raised

    manager, failures = started(Spelling())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager._scheduler, "next_deadline", defect)
        patch.setattr(manager._scheduler, "schedule", lambda now: (Iteration([], 0, 1, 0), None))
        manager.enqueue([inference := Inference([0], 1)])
        wait(inference)
        ended(manager)
    assert isinstance(inference.error, EngineFailed) and failures[0] is raised
    why = f"the handler thread ended with {type(raised).__name__}: {raised}"
    assert manager.not_ready_because() == why
    manager.close()


def test_a_model_that_cannot_be_loaded_is_reported_and_waiting_requests_are_answered() -> None:
    loading, reported = threading.Event(), list[BaseException]()

    def load() -> Generator:
        assert loading.wait(PATIENCE_S)
        raise OSError("no such file")

    manager = BatchingManager(make_scheduler(Dynamic()), load)
    manager.on_failure(reported.append)
    manager.enqueue([inference := Inference([0], 1)])
    loading.set()
    wait(inference)
    assert isinstance(inference.error, EngineFailed)
    assert "loading failed: no such file" in str(inference.error)
    ended(manager)
    assert manager.not_ready_because() == "loading failed: no such file"
    assert [type(error) for error in reported] == [OSError]
    manager.close()


def test_over_http_a_broken_engine_is_503_and_ready_says_why(client_of: ClientOf) -> None:
    engine = Spelling()
    engine.fails = True
    client = client_of(engine=lambda: engine)
    body: dict[str, Any] = {"prompt": "hi", "num_tokens": 3}
    statuses = [client.post("/inference", json=body).status_code for _ in range(FAILURES)]
    assert statuses == [500] * FAILURES
    ended(client.application.extensions["engine"].manager)
    ready, refused = client.get("/ready"), client.post("/inference", json=body)
    assert ready.status_code == refused.status_code == 503
    assert "no luck" in ready.get_json()["reason"]
    assert refused.get_json()["error"]["code"] == "engine_failed"
    assert client.get("/health").status_code == 200
