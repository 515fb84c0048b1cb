"""LoRA adapters over HTTP: named as models, counted, loaded and unloaded."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from config.shapes import SHAPES
from generate.lora import random_adapter
from scheduling.errors import ModelNotFound
from scheduling.inference import Inference
from tests.generate.test_lora import save
from tests.server.api.test_door import KEY, LOAD, OF_MODELS, UNLOAD
from tests.server.observers.test_metrics import families
from tests.servers import ClientOf, wait_until

WITH_KEY, HEADERS = {"api_key": KEY}, {"Authorization": f"Bearer {KEY}"}


def test_every_route_takes_an_adapter_for_a_model(client_of: ClientOf, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    client = client_of(lora_random="2:8", request_log=str(log))
    for path, body in OF_MODELS.items():
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
    client.application.extensions["engine"].close()
    logged = [json.loads(line)["adapter"] for line in log.read_text().splitlines()]
    assert logged == [None, "lora-1"] * 3


def test_models_and_adapters_that_run_are_told_in_vllm_s_form(client_of: ClientOf) -> None:
    client = client_of("static", lora_random="3:8", max_loras=5)
    listed = client.get("/v1/models").get_json()["data"]
    facts = [(each["id"], each["root"], each["parent"]) for each in listed]
    assert facts[:2] == [("fake", "fake", None), ("lora-0", "lora-0", "fake")]
    assert client.get("/v1/models/lora-0").get_json() == listed[1]
    manager = client.application.extensions["engine"].manager
    manager.enqueue(long := [Inference([0], 900, adapter="lora-2"), Inference([0], 900)])
    wait_until(lambda: manager.snapshot().running == 2)
    manager.enqueue(more := [Inference([0], 1, adapter="lora-1")])
    text = client.get("/metrics").get_data(as_text=True)
    manager.cancel([*long, *more])
    [gauge] = families(text)["vllm:lora_requests_info"].samples
    names = "max_lora", "running_lora_adapters", "waiting_lora_adapters"
    assert [gauge.labels[name] for name in names] == ["5", "lora-2", "lora-1"]


@pytest.mark.parametrize(("settings", "path", "body", "status", "said"), [
    ({}, LOAD, {}, 403, "Only a server with a key reads folders on request; start it with --ap"),
    ({"api_key": KEY, "lora_random": ""}, LOAD, {}, 400, "start with --lora NAME=FOLDER."),
    (WITH_KEY, LOAD, {"lora_name": "lora-0"}, 400, "lora-0 has been loaded; unload it, or"),
    (WITH_KEY, LOAD, {"lora_name": "fake"}, 400, "fake has been loaded; unload it, or choose"),
    (WITH_KEY, LOAD, {"lora_name": "a b"}, 400, "'a b' is no name; use 1 … 128 letters"),
    (WITH_KEY, LOAD, {"lora_path": "/nowhere"}, 404, "there is no folder /nowhere; give its"),
    (WITH_KEY, LOAD, {"lora_path": "tests"}, 404, "there is no folder tests; give its whole"),
    (WITH_KEY, LOAD, {"lora_path": "/" + "x" * 5000}, 400, "lora_path: String should have at m"),
    (WITH_KEY, LOAD, {"lora_path": "/\0"}, 404, "there is no folder /"),
    (WITH_KEY, LOAD, {"lora_path": "~nobody/x"}, 404, "there is no folder ~nobody/x; give its"),
    (WITH_KEY, UNLOAD, {"lora_name": "fake"}, 404, "there is no adapter 'fake'; GET /v1/mod"),
    (WITH_KEY, UNLOAD, {}, 404, "there is no adapter 'sql'; GET /v1/models has all"),
])  # fmt: skip
def test_what_cannot_be_loaded_or_unloaded_is_refused_in_a_sentence(
    client_of: ClientOf, settings: dict[str, Any], path: str, body: Any, status: int, said: str
) -> None:
    client = client_of(**{"lora_random": "1:8", **settings})
    asked = {"lora_name": "sql", "lora_path": "/"} | body
    answer = client.post(path, json=asked, headers=HEADERS)
    assert answer.status_code == status and said in answer.get_json()["error"]["message"]


def test_an_adapter_comes_and_goes_beside_requests(client_of: ClientOf, tmp_path: Path) -> None:
    """Its requests in flight end before it goes; none begins from then on."""
    client = client_of(**WITH_KEY, lora_random="1:8")
    server = client.application.extensions["engine"]

    def asked(path: str, **body: Any) -> tuple[int, str]:
        response = client.application.test_client().post(path, json=body, headers=HEADERS)
        return response.status_code, response.get_data(as_text=True)

    sql, ask = {"lora_name": "of/sql", "lora_path": str(tmp_path)}, OF_MODELS["/inference"]
    assert asked(LOAD, **sql) == (200, "Success: LoRA adapter 'of/sql' added successfully.")
    assert asked("/inference", **ask, model="of/sql")[0] == 200
    card = client.get("/v1/models/of/sql", headers=HEADERS).get_json()
    assert (card["root"], card["parent"]) == (str(tmp_path), "fake")
    server.manager.enqueue(running := [Inference([0], 400, adapter="of/sql")])
    with ThreadPoolExecutor(1) as pool:
        unloading = pool.submit(asked, UNLOAD, lora_name="of/sql")
        wait_until(lambda: "of/sql" not in server.models.roots)
        with pytest.raises(ModelNotFound):  # one that was read before
            server.manager.enqueue([Inference([0], 3, adapter="of/sql")])
        assert asked(LOAD, **sql)[0] == 400 and not unloading.done()
        assert unloading.result() == (200, "Success: LoRA adapter 'of/sql' removed successfully.")
    assert running[0].done.is_set() and len(running[0].tokens) == 400


def test_another_adapter_of_a_name_is_another_one(client_of: ClientOf, tmp_path: Path) -> None:
    """Neither its slot nor the prefix cache has anything of the first one."""
    client = client_of(**WITH_KEY, model="demo", lora_random="1:8", prefix_caching=True)

    def asked(path: str, **body: Any) -> Any:
        return client.post(path, json=body, headers=HEADERS)

    def text() -> str:
        ask = {"prompt": "If the file object is a list", "num_tokens": 30, "temperature": 0}
        return str(asked("/inference", **ask, model="sql").get_json()["completion"])

    texts: list[str] = []
    for name in ("one", "two", "one"):
        if not (folder := tmp_path / name).exists():
            save(folder, random_adapter("", 8, len(texts), SHAPES["demo"]))
        assert asked(LOAD, lora_name="sql", lora_path=str(folder)).status_code == 200
        texts += [text(), text()]
        assert asked(UNLOAD, lora_name="sql").status_code == 200
    assert texts[0] == texts[1] == texts[4] != texts[2] == texts[3]
    (tmp_path / "empty").mkdir()
    for odd in (None, "[" * 100_000, '{"r": 8.0, "lora_alpha": 8}', '{"r": 8, "lora_alpha": NaN}'):
        if odd:  # an adapter with other settings
            save(tmp_path / "empty", random_adapter("", 8, 1, SHAPES["demo"]))
            (tmp_path / "empty" / "adapter_config.json").write_text(odd)
        refused = asked(LOAD, lora_name="sql", lora_path=str(tmp_path / "empty"))
        assert refused.status_code == 400 and "empty" in refused.get_json()["error"]["message"]
