"""The handler thread with the fake generator: nothing ends it, no request is forgotten."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from batching import BatchingManager
from generate.fake import FakeGenerator, token
from scheduling.errors import DeadlinePassed, Draining, GenerationFailed, InvalidRequest
from scheduling.inference import Generator, Inference, State, TokenEvent
from scheduling.policies import Dynamic, NoBatching, Policy, Windowed
from scheduling.records import IterationRecord
from tests.spelling import Spelling
from tests.virtual import every_policy, make_scheduler

ALL = every_policy()
ManagerOf = Callable[..., BatchingManager]
PATIENCE_S = 20  # a guard against hanging, not a measurement


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
        assert not manager._scheduler.has_work and pool.free_blocks == pool.n_blocks, (
            "blocks or requests were lost"
        )


def wait(*inferences: Inference) -> None:
    for inference in inferences:
        assert inference.done.wait(PATIENCE_S), "nobody answered"


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: type(policy).__name__)
def test_many_threads_get_the_tokens_of_each(policy: Policy, manager_of: ManagerOf) -> None:
    manager = manager_of(policy)
    inferences = [Inference([i, 1, 2], 1 + i % 7) for i in range(60)]
    threads = [
        threading.Thread(target=manager.enqueue, args=([inference],)) for inference in inferences
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait(*inferences)
    for inference in inferences:
        assert inference.tokens == [
            token(inference.prompt_ids, 0, index) for index in range(inference.num_tokens)
        ]


def test_a_policy_that_raises_fails_its_requests_and_not_the_thread(
    manager_of: ManagerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manager_of(Dynamic())
    with monkeypatch.context() as patch:
        patch.setattr(Dynamic, "plan", lambda self, view: 1 / 0)
        doomed = Inference([0], 1)
        manager.enqueue([doomed])
        wait(doomed)
    assert isinstance(doomed.error, GenerationFailed)
    later = Inference([0], 1)
    manager.enqueue([later])
    wait(later)
    assert later.error is None and manager.not_ready_because() is None


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


def test_an_observer_that_raises_disturbs_nobody(manager_of: ManagerOf) -> None:
    broken, whole = Recorder(OSError("disk full")), Recorder()
    manager = manager_of(Dynamic())
    for observer in (broken, whole):
        manager.observe(observer)
    inference = Inference([0], 3)
    manager.enqueue([inference])
    wait(inference)
    assert broken.live_rows == whole.live_rows == [1, 1, 1]
    assert broken.states == whole.states == [State.FINISHED]


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


def test_draining_finishes_what_is_in_flight_and_refuses_the_rest(manager_of: ManagerOf) -> None:
    gate = Spelling([1], gated=True)
    manager = manager_of(Dynamic(), gate)
    inference = Inference([0], 3)
    manager.enqueue([inference])
    assert gate.started.acquire(timeout=PATIENCE_S)
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

    manager = BatchingManager(make_scheduler(Dynamic(), block_size=4), load)
    large, small = Inference([0] * 8, 2), Inference([0] * 4, 4)
    manager.enqueue([large])
    manager.enqueue([small])
    assert manager.not_ready_because() == "the model is still loading"
    assert not small.done.is_set(), "requests wait for the model"
    loading.set()
    wait(large)
    wait(small)
    assert isinstance(large.error, InvalidRequest) and "the whole pool has 2" in str(large.error)
    assert small.error is None and manager.snapshot().n_blocks == 2
    manager.close()


def test_an_iteration_that_never_ends_makes_the_server_unready(manager_of: ManagerOf) -> None:
    gate = Spelling([1], gated=True)
    manager = manager_of(Dynamic(), gate)
    manager.enqueue([Inference([0], 1)])
    assert gate.started.acquire(timeout=PATIENCE_S)
    assert manager.not_ready_because() is None
    time.sleep(0.02)
    assert "an iteration has been running" in (
        manager.not_ready_because(stalled_after_s=0.01) or ""
    )
    gate.go.release()


def test_the_handler_sleeps_between_iterations_for_the_loop_interval(manager_of: ManagerOf) -> None:
    manager = manager_of(Dynamic(), loop_interval_s=0.02)
    inference = Inference([0], 5)
    manager.enqueue([inference])
    wait(inference)
    assert min(b - a for a, b in zip(inference.token_times, inference.token_times[1:])) >= 0.02


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

    inference = Inference([1], 100, listener=listen)
    manager.enqueue([inference])
    wait(inference)
    cancelling[0].join()
    assert told[-1] and not told[0]


def test_a_window_without_end_is_flushed_by_its_target(manager_of: ManagerOf) -> None:
    manager = manager_of(
        Windowed(max_batch_delay_ms=1e13, batch_size_target=2)
    )  # longer than a thread can wait
    first, second = Inference([1], 2), Inference([1], 2)
    manager.enqueue([first])
    assert not first.done.wait(0.1)
    manager.enqueue([second])
    wait(first, second)
