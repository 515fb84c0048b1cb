"""/openapi.json: valid, whole, and true: a fuzzer and every kind of answer are held against it."""

from __future__ import annotations

import pickle
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from flask.testing import FlaskClient
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi import checks

from scheduling.inference import Inference, Iteration
from server.api.openapi import document
from server.api.routes import ROUTES, Route, offered
from tests.counts import tenth
from tests.servers import ClientOf, Spelling


@pytest.fixture
def quick(client_of: ClientOf) -> FlaskClient:
    """A server whose tokens cost nothing."""
    return client_of(engine=Spelling, max_model_len=128)


@pytest.fixture
def api(quick: FlaskClient) -> Any:
    return document_of(quick)


CHECKS = [
    checks.status_code_conformance, checks.content_type_conformance,
    checks.response_headers_conformance, checks.response_schema_conformance,
    checks.negative_data_rejection, checks.unsupported_method, checks.allow_header_conformance,
    checks.missing_required_header,
]  # fmt: skip


def fuzz(strategy: Any, cases: int, refused: bool = True) -> None:
    """refused: whether some may be, by what no schema says."""

    @settings(max_examples=cases, derandomize=True, database=None, deadline=None,
              phases=[Phase.explicit, Phase.generate],
              suppress_health_check=[*HealthCheck])  # fmt: skip
    @given(strategy)
    def holds(case: Case[Any]) -> None:
        response = case.call_and_validate(checks=CHECKS)
        assert response.status_code not in (500, 503), response.text
        assert refused or response.status_code == 200, response.text

    holds()


@pytest.mark.property
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_whatever_is_sent_the_document_describes_the_answer(api: Any, route: Route) -> None:
    operation = api[route.path][route.method]
    positive = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    by_query_alone = bool(route.parameters) and "{" not in route.path
    fuzz(positive, tenth(30 if route.body else 10), refused=not by_query_alone)
    if route.body or by_query_alone:
        fuzz(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE), tenth(40))


def test_no_route_can_be_left_out_of_the_document() -> None:
    with pytest.raises(TypeError, match="answer"):
        Route("GET", "/new", "a route that does not say what it answers")  # type: ignore[call-arg]
    for has_page in (False, True):
        paths = document(False, has_page)["paths"]
        described = {f"{method.upper()} {path}" for path in paths for method in paths[path]}
        assert described == {route.name for route in offered(has_page)}


def test_a_route_is_the_same_one_in_another_process() -> None:
    assert [pickle.loads(pickle.dumps(route)) for route in ROUTES] == [*ROUTES]


EMPTY: list[tuple[str, dict[str, Any]]] = [
    *(("/inference", {"prompt": each}) for each in ([], ["a", ""])),
    *(("/inference", {"prompt_ids": each}) for each in ([], [[1], []], [-1])),
    *(("/v1/completions", {"prompt": each}) for each in ([], [""], [[1], []])),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [-1]}),
]


def test_the_document_refuses_empty_prompts_as_the_server_does(quick: FlaskClient) -> None:
    document, schemas = quick.get("/openapi.json").get_json(), {}
    for path in ("/inference", "/v1/completions"):
        content = document["paths"][path]["post"]["requestBody"]["content"]
        schema = content["application/json"]["schema"] | document
        schemas[path] = jsonschema_rs.Draft202012Validator(schema)
    for path, body in EMPTY:
        body = body | ({"num_tokens": 1} if path == "/inference" else {})
        assert quick.post(path, json=body).status_code == 400 and not schemas[path].is_valid(body)
        right = {"prompt": ["a", "b"], "prompt_ids": [[1], [2]], "stop_token_ids": [1]}
        right = body | {name: right[name] for name in body if name in right}
        assert quick.post(path, json=right).status_code == 200 and schemas[path].is_valid(right)


ASK = {"prompt": "hi", "max_tokens": 3}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CONTINUOUS = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
ANSWERS: list[tuple[str, Any, int]] = [
    ("POST /inference", {"prompt": "hi", "num_tokens": 3}, 200),
    ("POST /inference", {"prompt": ["hi", "there"], "num_tokens": 3, "seed": 1, "echo": True}, 200),
    ("POST /inference", {"prompt_ids": [[1], [2]], "num_tokens": 3, "stream": True}, 200),
    ("POST /inference", {"prompt": "hi", "num_tokens": 3, "user": "ann", "priority": 2}, 200),
    ("POST /inference", {"prompt": "hi", "num_tokens": 3, "queue_timeout_s": 0}, 400),
    ("POST /inference", {"prompt": "hi", "num_tokens": 0}, 400),
    ("POST /inference", {"prompt": "hi", "num_tokens": 100, "timeout_s": 1e-9}, 504),
    ("POST /inference", {"prompt": "x" * 1_000_001, "num_tokens": 1}, 413),
    ("POST /v1/completions", ASK, 200),
    ("POST /v1/completions", ASK | {"prompt": ["hi", [104, 105]][:1], "stop": ["B"]}, 200),
    ("POST /v1/completions", ASK | USAGE, 200),
    ("POST /v1/completions", ASK | CONTINUOUS | {"n": 2}, 200),
    ("POST /v1/chat/completions", CHAT | CONTINUOUS, 200),
    ("POST /v1/completions", ASK | {"model": "gpt-4"}, 404),
    ("POST /v1/completions", ASK | {"n": 2, "best_of": 2}, 200),
    ("POST /v1/completions", ASK | {"priority": -1}, 200),
    ("POST /v1/completions", ASK | {"best_of": 2}, 400),
    ("POST /inference", {"prompt": "hi", "num_tokens": 3, "n": 2}, 200),
    ("POST /v1/chat/completions", CHAT, 200),
    ("POST /v1/chat/completions", CHAT | USAGE, 200),
    ("POST /v1/chat/completions", CHAT | {"messages": []}, 400),
    ("POST /stats/reset", {}, 200),
    ("POST /reset_prefix_cache", {}, 200),
]


def test_every_kind_of_answer_is_as_the_document_says(api: Any) -> None:
    api.validate()
    for route, body, status in ANSWERS:
        response = checked(api, route.removeprefix("POST "), body)
        assert response.status_code == status, (route, body, response.text)
        stream = response.headers["content-type"][0].startswith("text/event-stream")
        assert stream == bool(isinstance(body, dict) and body.get("stream"))
    for query in ({}, {"iterations": "1"}, {"iterations": "1", "since": 2}, {"since": 2}):
        stats = api["/stats"]["GET"].Case(query=query).call_and_validate(checks=CHECKS).json()
        assert ("next_iteration" in stats) == bool(query)


class Failing(Spelling):
    """An engine that breaks at a request's third token."""

    def generate(self, iteration: Iteration) -> list[int]:
        self.fails = any(len(row.inference.tokens) == 2 for row in iteration.rows)
        return super().generate(iteration)


LONG: list[tuple[str, dict[str, Any]]] = [
    ("/inference", {"prompt": "hi", "num_tokens": 900}),
    ("/v1/completions", ASK | {"max_tokens": 900}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 900}),
]


def document_of(client: FlaskClient) -> Any:
    return schemathesis.openapi.from_wsgi("/openapi.json", client.application)


def checked(api: Any, path: str, body: Any) -> Any:
    """The answer to a POST, which is as the document says."""
    case = api[path]["POST"].Case(body=body, media_type="application/json")
    return case.call_and_validate(checks=CHECKS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "ask"), LONG)
def test_answers_that_fail_are_as_the_document_says(
    client_of: ClientOf, path: str, ask: dict[str, Any], stream: bool
) -> None:
    response = checked(document_of(client_of(engine=Failing)), path, ask | {"stream": stream})
    assert "generation_failed" in response.text
    assert response.status_code == (200 if stream else 500)


def test_refusals_are_as_the_document_says(client_of: ClientOf) -> None:
    client = client_of(max_batch_size=1, max_waiting=0)
    api, manager = document_of(client), client.application.extensions["engine"].manager
    manager.enqueue(group := [Inference([0], 1000)])
    assert [checked(api, path, ask).status_code for path, ask in LONG] == [429] * 3
    manager.cancel(group)
    assert group[0].done.wait(60)
    manager.drain()
    assert [checked(api, path, ask).status_code for path, ask in LONG] == [503] * 3
    assert api["/ready"]["GET"].Case().call_and_validate(checks=CHECKS).status_code == 503


def test_a_server_with_a_key_says_in_its_document_where_it_is_needed(client_of: ClientOf) -> None:
    client = client_of(api_key="sesame")
    headers = {"Authorization": "Bearer sesame"}
    api = schemathesis.openapi.from_wsgi("/openapi.json", client.application, headers=headers)
    document = client.get("/openapi.json", headers=headers).get_json()
    assert document["security"] == [{"key": []}]
    assert document["paths"]["/health"]["get"]["security"] == []
    assert "security" not in document["paths"]["/stats"]["get"], "it needs the key, as all others"
    without = {path for path, methods in document["paths"].items()
               if not all("401" in each["responses"] for each in methods.values())}  # fmt: skip
    assert without == {"/health", "/ready", "/live", "/live/{name}"}
    for path in ("/v1/models", "/health", "/stats", "/metrics"):
        operation = api[path]["GET"]
        operation.Case(headers=headers).call_and_validate(checks=[*CHECKS, checks.ignored_auth])
        refused = operation.Case().call_and_validate(checks=CHECKS)
        assert refused.status_code == (200 if path == "/health" else 401)
