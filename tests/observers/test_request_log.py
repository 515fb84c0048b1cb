"""The request log: a whole JSON line for each request that ended, in order, and serving goes on
without it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from client.calls import get
from client.load import replay
from client.workloads import Workload
from config import MODES
from scheduling.inference import Inference, Iteration
from tests.counts import nightly_but
from tests.servers import assert_all_answered, server
from tests.spelling import Spelling

FIELDS = (
    "id group leader request_id user adapter priority predicted_tokens mode state finish_reason "
    "error batch_id position prompt_tokens cached_tokens num_tokens completion_tokens preemptions "
    "preempted_s paused_s recomputed_tokens draft_tokens accepted_tokens arrived_at admitted_at "
    "token_times answered_at"
)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("mode", nightly_but(["dynamic"], MODES))
def test_every_request_of_a_load_is_a_line_in_the_order_in_which_they_ended(
    mode: str, tmp_path: Path
) -> None:
    path = tmp_path / "log.jsonl"
    requests = Workload("uniform:1:30", seed=4).requests(40, "burst")
    with server(mode, {"model": "fake", "request_log": str(path), "max_batch_size": 8}) as url:
        outcomes = replay(url, requests)
        assert_all_answered(outcomes)
        stats = get(f"{url}/stats")
    found = lines(path)
    assert len(found) == 40 and all(line.keys() == {*FIELDS.split()} for line in found)
    for line in found:
        ending = line["state"], line["finish_reason"], line["error"]
        assert ending == ("finished", "length", None)
        times = line["token_times"]
        assert line["arrived_at"] <= line["admitted_at"] <= times[0] <= line["answered_at"]
        assert (
            times == sorted(times) and len(times) == line["completion_tokens"] == line["num_tokens"]
        )
        assert abs(line["arrived_at"] - time.time()) < 600
    answered = [line["answered_at"] for line in found]
    assert answered == sorted(answered)
    assert sum(line["completion_tokens"] for line in found) == stats["total_output_tokens"]
    queue_ms = 1e3 * sum(line["admitted_at"] - line["arrived_at"] for line in found) / 40
    assert queue_ms == pytest.approx(stats["mean_queue_time_ms"], abs=0.01)
    batches: dict[int, list[int]] = {}
    for line in found:
        batches.setdefault(line["batch_id"], []).append(line["position"])
    if mode in ("static", "windowed"):
        assert list(batches) == sorted(batches), "whole batches, one after another"
        assert all(rows == sorted(rows) for rows in batches.values()), "in the order of their rows"
    last = max(map(max, batches.values()))
    assert last == 0 if mode == "nobatch" else 0 < last < 8


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_line_has_the_request_s_id_which_its_answer_tells_its_user_level_and_predicted_length(
    client_of: Callable[..., FlaskClient], tmp_path: Path, stream: bool
) -> None:
    """What no header can hold, or is too long for one, gets another id."""
    client, found = client_of(order="sjf", request_log=str(tmp_path / "log.jsonl")), []
    body = {"prompt": ["hi", "there"], "num_tokens": 2, "stream": stream}
    body |= {"user": "ann", "priority": -1}
    for given in ("trace-7;a=b", "x" * 128, "x" * 129, "a b", "é", "", None):
        headers = {} if given is None else {"X-Request-Id": given}
        response = client.post("/inference", json=body, headers=headers)
        assert response.status_code == 200 and response.data
        [told] = response.headers.getlist("X-Request-Id")
        found += [told, told]
    client.application.extensions["server"].close()
    assert [line["request_id"] for line in lines(tmp_path / "log.jsonl")] == found
    for line in lines(tmp_path / "log.jsonl"):
        assert (line["user"], line["priority"], line["predicted_tokens"]) == ("ann", -1, 2)
    assert found[:3] == ["trace-7;a=b", "trace-7;a=b", "x" * 128]
    assert len(set(found)) == 7 and all(re.fullmatch("[0-9a-f]{32}", id_) for id_ in found[4:])


def test_paused_time_is_the_same_in_the_answer_the_log_and_the_stats(
    client_of: Callable[..., FlaskClient], tmp_path: Path
) -> None:
    class Pausing(Spelling):
        """Marks each request as a scheduler does that left it out for a while."""

        def generate(self, iteration: Iteration) -> list[int]:
            for row in iteration.rows:
                row.inference.interruptions.paused_s = 0.25 * len(row.inference.prompt_ids)
            return super().generate(iteration)

    path = tmp_path / "log.jsonl"
    client = client_of(engine=Pausing, request_log=str(path))
    told = [
        client.post("/inference", json={"prompt": prompt, "num_tokens": 2}).get_json()["timings"]
        for prompt in ("a", "bc")
    ]
    stats = client.get("/stats").get_json()
    client.application.extensions["server"].close()
    assert [timings["paused_s"] for timings in told] == [0.25, 0.5]
    assert [line["paused_s"] for line in lines(path)] == [0.25, 0.5]
    assert (stats["paused_s"], stats["preempted_s"]) == (0.75, 0.0)


def test_what_ended_otherwise_is_a_line_too(
    client_of: Callable[..., FlaskClient], tmp_path: Path
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"from": "an earlier run"}\n')
    client = client_of("nobatch", request_log=str(path))
    manager = client.application.extensions["server"].manager
    manager.enqueue([Inference([0], 1000)])
    client.post("/inference", json={"prompt": "hi", "num_tokens": 5, "timeout_s": 0.02})
    manager.close()
    client.application.extensions["server"].request_log.close()
    earlier, expired, stopped = lines(path)
    assert earlier == {"from": "an earlier run"}
    late: dict[str, Any] = {
        "state": "expired", "error": "deadline_passed", "batch_id": None, "admitted_at": None,
        "token_times": [], "finish_reason": None,
    }  # fmt: skip
    assert expired | late == expired
    drained = {"state": "failed", "error": "draining", "batch_id": 0, "position": 0}
    assert stopped | drained == stopped
