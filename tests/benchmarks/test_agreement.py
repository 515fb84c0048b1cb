"""Four witnesses of one run agree: the client, /stats, /metrics and the request log; and Little's
law holds.
"""

from __future__ import annotations

import json
import re
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from client.calls import get
from client.load import Watch
from client.wire import wire
from client.workloads import Workload
from compare.measure import Target, measure
from config import MODES
from tests.counts import nightly_but
from tests.servers import scrape, server

pytestmark = pytest.mark.alone
EXACT = ("completed", "total_input_tokens", "total_output_tokens")
CLOSE = {  # ms, with the histogram in /metrics and the two stamps in the log
    "mean_queue_time_ms": ("vllm:request_queue_time_seconds", "arrived_at", "admitted_at"),
    "mean_ttft_ms": ("vllm:time_to_first_token_seconds", "arrived_at", "first_token_at"),
    "mean_e2el_ms": ("vllm:e2e_request_latency_seconds", "arrived_at", "answered_at"),
}
Witness = dict[str, float]


def metric(text: str, name: str) -> float:
    return sum(
        float(value) for value in re.findall(rf"^{re.escape(name)}{{.*}} (\S+)$", text, re.M)
    )


def round_trip_ms(url: str) -> float:
    """The time of HTTP on this machine just now, when nothing is to be computed."""
    times = []
    for _ in range(30):
        started = time.perf_counter()
        get(f"{url}/health")
        times.append(time.perf_counter() - started)
    return 1e3 * sorted(times)[len(times) // 2]


def of_metrics(text: str) -> Witness:
    names = ("request_success_total", "prompt_tokens_total", "generation_tokens_total")
    counts = dict(zip(EXACT, (metric(text, f"vllm:{name}") for name in names)))
    return counts | {
        name: 1e3 * metric(text, f"{histogram}_sum") / metric(text, f"{histogram}_count")
        for name, (histogram, *_) in CLOSE.items()
    }


def of_log(lines: list[dict[str, Any]]) -> Witness:
    for line in lines:
        line["first_token_at"] = line["token_times"][0]
    tokens = [sum(line[name] for line in lines) for name in ("prompt_tokens", "completion_tokens")]
    return dict(zip(EXACT, (len(lines), *tokens))) | {
        name: 1e3 * sum(line[second] - line[first] for line in lines) / len(lines)
        for name, (_, first, second) in CLOSE.items()
    }


def witnesses(mode: str, log: Path, stream: bool) -> tuple[list[Witness], dict[str, Any], float]:
    """One run, as each of the four reports it, the client first; the client's whole result; and the
    milliseconds in which they may differ.
    """
    # long, so that HTTP's milliseconds are few
    requests = Workload("uniform:150:350", seed=3).requests(20, "poisson:8")
    with server(mode, {"model": "fake", "max_batch_size": 8, "request_log": str(log)}) as url:
        target = Target(mode, url, wire("inference", stream=stream))
        result, outcomes = measure(target, requests, {}, 60, Watch())
        # 10 ms, but on a machine several times slower than usual
        allowed_ms = max(10.0, 4 * round_trip_ms(url))
        time.sleep(0.3)  # the log's thread writes after the answer
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        metrics = scrape(url)
    assert [outcome.error for outcome in outcomes if outcome.error] == []
    return [result, result["server"], of_metrics(metrics), of_log(lines)], result, allowed_ms


@pytest.mark.parametrize(
    ("mode", "stream"),
    nightly_but([("dynamic", True)], [*product(MODES, (False,)), ("dynamic", True)]),
)
def test_client_stats_metrics_and_log_agree_and_littles_law_holds(
    mode: str, stream: bool, tmp_path: Path
) -> None:
    for attempt in range(3):  # the machine may stand still between the server and its client
        found, result, allowed_ms = witnesses(mode, tmp_path / f"{attempt}.jsonl", stream)
        for name in EXACT:
            assert len({witness[name] for witness in found}) == 1, name
        if all(
            abs(witness[name] - result[name]) <= max(0.05 * result[name], allowed_ms)
            for witness in found
            for name in CLOSE
        ):
            break
    else:
        pytest.fail(f"the four do not agree within 5% or {allowed_ms:.0f} ms")
    # L as the client counts it, and λ · W with the server's W
    law = result["littles_law"]
    allowed = max(0.05, allowed_ms / result["mean_e2el_ms"])
    assert law["in_flight"] == pytest.approx(law["rate_x_latency"], rel=allowed)
