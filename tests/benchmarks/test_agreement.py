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


def gauge(text: str, name: str) -> float:
    return float(re.findall(rf"^{re.escape(name)}{{.*}} (\S+)$", text, re.MULTILINE)[0])


def round_trip_ms(url: str) -> float:
    """What HTTP takes on this machine just now, when nothing is to be computed."""
    times = []
    for _ in range(30):
        started = time.perf_counter()
        get(f"{url}/health")
        times.append(time.perf_counter() - started)
    return 1e3 * sorted(times)[len(times) // 2]


def witnesses(
    mode: str, log: Path, stream: bool
) -> tuple[dict[str, dict[str, float]], dict[str, Any], float]:
    """One run, as each of the four tells it; the client's whole result; and the milliseconds in
    which they may differ.
    """
    requests = Workload("uniform:150:350", seed=3).requests(
        20, "poisson:8"
    )  # long, so that HTTP's milliseconds are few
    with server(mode, {"model": "fake", "max_batch_size": 8, "request_log": str(log)}) as url:
        result, outcomes = measure(
            Target(mode, url, wire("inference", stream=stream)), requests, {}, 60, Watch()
        )
        allowed_ms = max(
            10.0, 4 * round_trip_ms(url)
        )  # 10 ms, but on a machine several times slower than usual
        time.sleep(0.3)  # the log's thread writes after the answer
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        metrics = scrape(url)
    assert [outcome.error for outcome in outcomes if outcome.error] == []

    def of(told: dict[str, Any]) -> dict[str, float]:
        names = {
            "requests": "completed",
            "prompt": "total_input_tokens",
            "completion": "total_output_tokens",
            "queue": "mean_queue_time_ms",
            "ttft": "mean_ttft_ms",
            "e2el": "mean_e2el_ms",
        }
        return {name: told[key] for name, key in names.items()}

    def mean(first: str, second: str) -> float:
        return 1e3 * sum(line[second] - line[first] for line in lines) / len(lines)

    def histogram(name: str) -> float:
        return 1e3 * gauge(metrics, f"{name}_sum") / gauge(metrics, f"{name}_count")

    for line in lines:
        line["first_token_at"] = line["token_times"][0]
    told = {
        "client": of(result),
        "/stats": of(result["server"]),
        "/metrics": {
            "requests": sum(
                float(n)
                for n in re.findall(
                    r"^vllm:request_success_total{.*} (\S+)$", metrics, re.MULTILINE
                )
            ),
            "prompt": gauge(metrics, "vllm:prompt_tokens_total"),
            "completion": gauge(metrics, "vllm:generation_tokens_total"),
            "queue": histogram("vllm:request_queue_time_seconds"),
            "ttft": histogram("vllm:time_to_first_token_seconds"),
            "e2el": histogram("vllm:e2e_request_latency_seconds"),
        },
        "log": {
            "requests": len(lines),
            "prompt": sum(line["prompt_tokens"] for line in lines),
            "completion": sum(line["completion_tokens"] for line in lines),
            "queue": mean("arrived_at", "admitted_at"),
            "ttft": mean("arrived_at", "first_token_at"),
            "e2el": mean("arrived_at", "answered_at"),
        },
    }
    return told, result, allowed_ms


@pytest.mark.parametrize(
    ("mode", "stream"),
    nightly_but([("dynamic", True)], [*product(MODES, (False,)), ("dynamic", True)]),
)
def test_client_stats_metrics_and_log_agree_and_littles_law_holds(
    mode: str, stream: bool, tmp_path: Path
) -> None:
    for attempt in range(3):  # the machine may stand still between the server and its client
        told, result, allowed_ms = witnesses(mode, tmp_path / f"{attempt}.jsonl", stream)
        client = told["client"]
        for exact in ("requests", "prompt", "completion"):
            assert len({witness[exact] for witness in told.values()}) == 1, exact
        if all(
            abs(witness[name] - client[name]) <= max(0.05 * client[name], allowed_ms)
            for witness in told.values() for name in ("queue", "ttft", "e2el")
        ):  # fmt: skip
            break
    else:
        pytest.fail(f"the four do not agree within 5% or {allowed_ms:.0f} ms: {told}")
    # L as the client counts it, and λ · W with the server's W
    law = result["littles_law"]
    allowed = max(0.05, allowed_ms / client["e2el"])
    assert law["in_flight"] == pytest.approx(law["rate_x_latency"], rel=allowed)
