"""An engine that is broken for good: all requests are answered, no new one is taken, and the server
ends.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from batching import FAILURES, BatchingManager
from generate.fake import FakeGenerator
from scheduling.errors import EngineFailed, GenerationFailed
from scheduling.inference import Generator, Inference, Iteration, TokenEvent
from scheduling.policies import Dynamic
from tests.scheduling.test_batching import wait
from tests.servers import PATIENCE_S, ClientOf
from tests.spelling import Spelling
from tests.virtual import make_scheduler


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
    """A GPU after an illegal memory access fails in every iteration from then on, and /ready stayed
    200.
    """
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
        inference = Inference([0], 1)
        manager.enqueue([inference])
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
    inference = Inference([0], 1)
    manager.enqueue([inference])
    loading.set()
    wait(inference)
    assert isinstance(inference.error, EngineFailed)
    assert "loading failed: no such file" in str(inference.error)
    ended(manager)
    assert manager.not_ready_because() == "loading failed: no such file"
    assert [type(error) for error in reported] == [OSError]
    manager.close()


def test_a_listener_that_raises_disturbs_nobody() -> None:
    def listener(update: TokenEvent) -> None:
        raise ValueError("a defect")

    manager, failures = started(FakeGenerator(lambda seconds: None))
    heard, other = Inference([0], 3, listener=listener), Inference([0], 3)
    manager.enqueue([heard, other])
    wait(heard, other)
    assert heard.error is None and len(heard.tokens) == 3
    assert not failures and manager.not_ready_because() is None
    manager.close()


def test_over_http_a_broken_engine_is_503_and_ready_says_why(client_of: ClientOf) -> None:
    engine = Spelling()
    engine.fails = True
    client = client_of(engine=lambda: engine)
    body: dict[str, Any] = {"prompt": "hi", "num_tokens": 3}
    statuses = [client.post("/inference", json=body).status_code for _ in range(FAILURES)]
    assert statuses == [500] * FAILURES
    ended(client.application.extensions["server"].manager)
    ready, refused = client.get("/ready"), client.post("/inference", json=body)
    assert ready.status_code == refused.status_code == 503
    assert "no luck" in ready.get_json()["reason"]
    assert refused.get_json()["error"]["code"] == "engine_failed"
    assert client.get("/health").status_code == 200
