"""LoRA adapters over HTTP: named as models, counted, loaded and unloaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families

from scheduling.inference import Inference
from tests.servers import wait_until

BODIES: dict[str, dict[str, Any]] = {
    "/inference": {"prompt": "hi", "num_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/tokenize": {"prompt": "hi"},
}


def test_every_route_takes_an_adapter_s_name_for_a_model(
    client_of: Callable[..., FlaskClient], tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    client = client_of(lora_random="2:8", request_log=str(log))
    for path, body in BODIES.items():
        assert client.post(path, json=body).status_code == 200
        answer = client.post(path, json=body | {"model": "lora-1"}).get_json()
        assert answer.get("model", "lora-1") == "lora-1"
        refused = client.post(path, json=body | {"model": "lora-2"})
        assert refused.status_code == 404
        assert refused.get_json()["error"] == {
            "message": "There is no model 'lora-2' here; this server has 'fake', 'lora-0', "
            "'lora-1'.",
            "type": "invalid_request_error", "param": "model", "code": "model_not_found",
        }  # fmt: skip
    stats = client.get("/stats").get_json()
    assert {name: each["completed"] for name, each in stats["adapters"].items()} == {"lora-1": 3}
    client.application.extensions["server"].close()
    logged = [json.loads(line)["adapter"] for line in log.read_text().splitlines()]
    assert logged == [None, "lora-1"] * 3


def test_models_are_listed_in_vllm_s_form(client_of: Callable[..., FlaskClient]) -> None:
    client = client_of(lora_random="1:8")
    listed = client.get("/v1/models").get_json()["data"]
    facts = [(each["id"], each["root"], each["parent"]) for each in listed]
    assert facts == [("fake", "fake", None), ("lora-0", "lora-0", "fake")]
    assert client.get("/v1/models/lora-0").get_json() == listed[1]


def test_vllm_s_gauge_tells_adapters_that_run_and_that_wait(
    client_of: Callable[..., FlaskClient],
) -> None:
    client = client_of("static", lora_random="3:8", max_loras=5)
    manager = client.application.extensions["server"].manager
    manager.enqueue(long := [Inference([0], 900, adapter="lora-2"), Inference([0], 900)])
    wait_until(lambda: manager.snapshot().running == 2)
    manager.enqueue(more := [Inference([0], 1, adapter="lora-1")])
    text = client.get("/metrics").get_data(as_text=True)
    manager.cancel([*long, *more])
    families = {family.name: family for family in text_string_to_metric_families(text)}
    [gauge] = families["vllm:lora_requests_info"].samples
    names = "max_lora", "running_lora_adapters", "waiting_lora_adapters"
    assert [gauge.labels[name] for name in names] == ["5", "lora-2", "lora-1"]
