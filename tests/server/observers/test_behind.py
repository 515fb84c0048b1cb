"""Observers behind the handler thread: all is observed, in order, before anyone reads it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from scheduling.inference import Inference, Iteration
from scheduling.records import IterationRecord
from server.observers import behind
from server.observers.behind import Behind
from tests.servers import ClientOf


class Slow:
    """An observer that waits, and may raise."""

    def __init__(self, raises: bool = False):
        self.seen: list[Any] = []
        self.go, self.raises = threading.Event(), raises

    def iteration(self, record: IterationRecord) -> None:
        self.answered(record)

    def answered(self, inference: Any) -> None:
        assert self.go.wait(60)
        self.seen.append(inference)
        if self.raises:
            raise ValueError("a defect")


def test_a_slow_observer_holds_nothing_up_until_its_backlog_is_full_and_misses_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(behind, "BACKLOG", 5)
    slow, other = Slow(raises=True), Slow()
    other.go.set()
    ours = Behind([slow, other])
    told: list[Any] = [Inference([0], 1), IterationRecord(0.0, 0.0, Iteration([], 0, 0, 0))] * 3
    for each in told:
        (ours.answered if isinstance(each, Inference) else ours.iteration)(each)
    ours.answered(told[0])
    waits = threading.Thread(target=ours.iteration, args=[told[1]])
    waits.start()
    waits.join(0.1)
    assert waits.is_alive() and slow.seen == [], "the handler thread waits for a full backlog"
    slow.go.set()
    waits.join(60)
    ours.close()
    assert slow.seen == other.seen == [*told, *told[:2]]
    assert caplog.text.count("an observer failed; serving goes on") == 8
    ours.flush()  # does nothing, and ends


def test_stats_and_metrics_are_exact_after_each_answer(client_of: ClientOf) -> None:
    client, texts = client_of(), []
    for n in range(1, 30):
        client.post("/inference", json={"prompt": "a", "num_tokens": 2})
        assert client.get("/stats").get_json()["completed"] == n
        texts.append(client.get("/metrics").get_data(as_text=True))
        name = 'e2e_request_latency_seconds_count{mode="dynamic",model_name="fake"}'
        assert f"vllm:{name} {n}.0" in texts[-1]
        assert client.get(f"/requests/{n - 1}").get_json()["requests"][0]["state"] == "finished"
