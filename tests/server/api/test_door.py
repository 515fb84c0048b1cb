"""Requests that are let in: with a key where there is one, and never a web page's unasked."""

from __future__ import annotations

import gzip
import io
import json
import os
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from client import client as client_py
from client.calls import ServerError, get
from client.machine import command_line
from compare.options import parse as compared
from config.config import HANDOFF, Config
from config.settings import ConfigError
from generate.auto import build
from server.api.routes import ROUTES
from tests.programs import ran
from tests.servers import ClientOf, server
from tests.stub import Handler, stub

KEY = "sk-Sesame~42"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
OF_MODELS: dict[str, dict[str, Any]] = {
    "/inference": {"prompt": "hi", "num_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/tokenize": {"prompt": "hi"},
}
BODIES = OF_MODELS | {
    "/live/load": {"rate": 0}, "/stats/reset": {}, "/reset_prefix_cache": {},
    LOAD: {"lora_name": "a", "lora_path": "/"}, UNLOAD: {"lora_name": "a"},
}  # fmt: skip
POSTS = [route.path for route in ROUTES if route.method == "POST"]
NAMES = [route.name for route in ROUTES]


CODINGS = ["gzip", "GZip", "deflate", "br", "zstd", "compress", "identity, gzip", "x" * 999]


@pytest.mark.parametrize("path", POSTS)
def test_a_post_is_of_no_web_page_and_not_compressed(client_of: ClientOf, path: str) -> None:
    """A page may send text or a form anywhere; a body in gzip was a 400: invalid JSON."""
    client, body = client_of(), json.dumps(BODIES[path]).encode()
    client.post("/inference", json=BODIES["/inference"])

    def post(kind: str | None, coding: str = "", sent: bytes = body) -> Any:
        headers = {"Origin": "http://evil.example", "Content-Encoding": coding}
        response = client.post(path, data=sent, content_type=kind, headers=headers)
        assert allows_no_other_origin(response)
        if response.status_code == 415:
            assert response.get_json()["error"]["code"] == "unsupported_media_type"
        return response

    simple = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
    for kind in (None, "json", *simple):
        assert post(kind).status_code == 415 and b"--json" in post(kind).data
    for coding in CODINGS:
        for sent in (gzip.compress(body), body):
            response = post("application/json", coding, sent)
            assert response.status_code == 415 and response.headers["Accept-Encoding"] == "identity"
            message = response.get_json()["error"]["message"]
            assert coding[:100] in message and len(message) < 200
    assert client.get("/stats").get_json()["completed"] == 1, "neither reset nor asked"
    right = ["application/json", "application/json; charset=utf-8", "Application/JSON"]
    for kind, coding in zip(right, ("", "identity", "Identity, identity")):
        assert post(kind, coding).status_code == (403 if "lora" in path else 200)
    asks = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    assert allows_no_other_origin(client.options(path, headers=asks))
    assert client.get("/health", headers={"Content-Encoding": "gzip"}).status_code == 200


def allows_no_other_origin(response: Any) -> bool:
    return not [name for name in dict(response.headers) if name.startswith("Access-Control")]


WRONG = (None, KEY, "Bearer", "Bearer ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}",
         "Bearer \xff")  # fmt: skip


@pytest.mark.parametrize("route", [*NAMES, "GET /nope", "OPTIONS /inference"])
def test_a_server_with_a_key_answers_those_who_have_it(client_of: ClientOf, route: str) -> None:
    client = client_of(api_key=KEY)
    method, path = route.replace("live/{name}", "live/page.js").replace("{name}", "fake").split()

    def asked(authorization: str | None) -> Any:
        headers = {"Authorization": authorization} if authorization is not None else {}
        response = client.open(path, method=method, json=BODIES.get(path), headers=headers)
        assert KEY not in response.get_data(as_text=True)
        return response

    for response in map(asked, WRONG):
        if path in ("/health", "/ready", "/live", "/live/page.js"):
            assert response.status_code == 200
            continue
        assert response.status_code == 401 and response.headers["WWW-Authenticate"] == "Bearer"
        assert response.get_json()["error"]["code"] == "invalid_api_key"
    for right in (f"Bearer {KEY}", f"bearer  {KEY}"):
        missing = {"/nope": 404, "/requests/fake": 404, LOAD: 400, UNLOAD: 400}
        assert asked(right).status_code == missing.get(path, 200)


def test_without_a_page_a_browser_needs_the_key_for_the_settings(client_of: ClientOf) -> None:
    """The ingress of replicas let a browser read the settings without one."""
    browser = {"Accept": "text/html"}
    assert client_of(api_key=KEY).get("/", headers=browser).headers["Location"] == "/live"
    assert client_of(api_key=KEY, live="off").get("/", headers=browser).status_code == 401


def test_the_key_is_handed_to_the_worker_and_shown_to_nobody() -> None:
    config = build("dynamic", {"model": "fake", "api_key": KEY}, {})
    worker = Config.model_validate_json(config.handoff())
    assert worker == config and worker.api_key and worker.api_key.get_secret_value() == KEY
    shown = f"{config} {config!r} {config.api_key!r} {config.model_dump()}"
    assert KEY not in shown + config.model_dump_json()
    without = build("dynamic", {"model": "fake"}, {}).handoff()
    assert Config.model_validate_json(without).api_key is None
    for wrong in ({"api_key": f"{KEY} x"}, {"api_key": f"{KEY}é"}, {"max_model_len": 2**21}):
        with pytest.raises(ConfigError) as refused:
            build("dynamic", {"model": "fake", "api_key": KEY} | wrong, {})
        assert KEY not in str(refused.value)
    with pytest.raises(ValueError) as invalid:
        Config(mode="dynamic", model="fake", api_key=KEY, max_model_len=1)  # type: ignore[arg-type]
    assert KEY not in f"{invalid.value} {invalid.value!r}"


ANN, SECOND, BOB = "sk-of-ann-0123456", "sk-of-ann-too-789", "sk-of-bob-0123456"
KEYS = f"# who may ask\n\nann {ANN}\nann\t{SECOND}\n  bob {BOB}\n"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.txt"
    path.write_text(KEYS)
    return path


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_key_names_its_user_not_a_body(client_of: ClientOf, keys: Path, stream: bool) -> None:
    client = client_of(api_keys=str(keys), user_requests_per_minute=2)

    def status(key: str, **said: str) -> int:
        body = BODIES["/inference"] | {"stream": stream} | said
        response = client.post("/inference", json=body, headers=bearer(key))
        assert key not in response.get_data(as_text=True)
        return response.status_code

    assert [status(ANN), status(SECOND, user="eve"), status(ANN, user="bob")] == [200, 200, 429]
    assert [status(BOB), status(f"{BOB}x"), status(BOB[:-1]), status("ann")] == [200, 401, 401, 401]
    assert client.get("/stats").status_code == 401
    users = client.get("/stats", headers=bearer(BOB)).get_json()["users"]
    counts = {name: (of["completed"], of["refused"]) for name, of in users.items()}
    assert counts == {"ann": (2, 1), "bob": (1, 0)}


def test_of_a_file_of_keys_only_digests_are_handed_on(keys: Path) -> None:
    config = build("dynamic", {"model": "fake", "api_keys": str(keys), "host": "0.0.0.0"}, {})
    assert [*config.users_of_keys.values()] == ["ann", "ann", "bob"]
    assert Config.model_validate_json(config.handoff()) == config
    assert not [warning for warning in config.warnings() if "--api-key" in warning]
    assert not [key for key in (ANN, SECOND, BOB) if key in config.handoff()]
    shown = f"{config} {config!r} {config.model_dump()}"
    assert not [digest for digest in config.users_of_keys if digest in shown]


@pytest.mark.parametrize(("text", "said"), [
    (f"ann {ANN}\nann\n", "line 2 is no NAME KEY"),
    (f"ann {ANN}\n\nbob of {BOB}\n", "line 3 is no NAME KEY"),
    (f"ann: {ANN}\n", "line 1 is no NAME KEY"),
    (f"{'x' * 65} {ANN}\n", "line 1 is no NAME KEY"),
    ("ann sk-short\n", "line 1: a key is 16 or more"),
    (f"ann {ANN}é\n", "line 1: a key is 16 or more"),
    (f"{ANN} ann\n", "line 1: a key is 16 or more"),
    (f"ann {ANN}\nbob {ANN}\n", "line 2 repeats the key"),
    ("# nobody\n", "has 0 keys"),
    ("".join(f"ann {ANN}{i}\n" for i in range(501)), "has 501 keys"),
    (b"\xff\xfe", "cannot be read (it is no UTF-8)"),
    (None, "cannot be read (No such file or directory)"),
])  # fmt: skip
def test_a_wrong_key_file_is_refused(tmp_path: Path, text: str | bytes | None, said: str) -> None:
    path = tmp_path / "keys.txt"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as refused:
        build("dynamic", {"model": "fake", "api_keys": str(path)}, {})
    assert str(refused.value).startswith(f"--api-keys {str(path)!r}: ")
    assert said in str(refused.value) and "sk-" not in str(refused.value)


def test_one_key_and_several_are_not_both_taken(keys: Path) -> None:
    both = {"model": "fake", "api_keys": str(keys)}
    with pytest.raises(ConfigError, match="--api-key and --api-keys both"):
        build("dynamic", both, {"api_key": KEY})
    assert build("dynamic", both | {"api_key": "none"}, {"api_key": KEY}).api_key is None
    for name in ("api_key", "api_keys"):
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is empty"):
            build("dynamic", {"model": "fake"}, {name: ""})
    with pytest.raises(ConfigError, match="use --api-key"):
        compared(["--modes", "dynamic", "--model", "fake", "--api-keys", str(keys)])
    # as many as a file may have are handed on in one variable
    keys.write_text("".join(f"{i:064} {ANN}{i}\n" for i in range(500)))
    config = build("dynamic", both, {})
    assert len(config.handoff()) + len(HANDOFF) + 2 <= 128 * 1024, "Linux's MAX_ARG_STRLEN"


def test_a_server_that_others_reach_without_a_key_says_so() -> None:
    def warned(**settings: str) -> bool:
        warnings = build("dynamic", {"model": "fake", **settings}, {}).warnings()
        return any("--api-key" in warning for warning in warnings)

    assert all(warned(host=host) for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"))
    assert not any(warned(host=host) for host in ("127.0.0.1", "127.0.0.5", "::1", "localhost"))
    assert not warned(host="0.0.0.0", api_key=KEY)
    assert "reaches [::]:8500 may" in "".join(build("dynamic", {"host": "::"}, {}).warnings())


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The Authorization of every request to a stub."""
    found: list[str | None] = []

    def parse_request(self: Handler) -> bool:
        parsed = BaseHTTPRequestHandler.parse_request(self)
        found.append(self.headers.get("Authorization"))
        return parsed

    monkeypatch.setattr(Handler, "parse_request", parse_request)
    return found


@pytest.mark.usefixtures("undrawn")
def test_a_comparison_gives_its_key_to_its_servers(tmp_path: Path, heard: list[str | None]) -> None:
    argv = "--modes static --model fake --numsamples 3 --arrival burst --lengths fixed:2 "
    argv += f"--skip-calibration --out {tmp_path} --api-key={KEY}"
    with stub() as other:
        done = ran("compare", *argv.split(), "--also", f"other={other.url}")
    assert done.returncode == 0, done.stderr
    assert heard and set(heard) == {None}
    for path in tmp_path.rglob("*"):
        assert KEY.encode() not in path.read_bytes(), path
    assert KEY not in done.stdout + done.stderr
    saved = command_line("x", ["--api-key", KEY, f"--api-key={KEY}", "--url", "u"])
    assert KEY not in saved and saved.endswith("--url u") and saved.count("--api-key") == 2


@pytest.mark.usefixtures("undrawn")
def test_the_client_sends_its_key_to_the_server_that_is_named(
    tmp_path: Path, heard: list[str | None], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    argv = "--numsamples 2 --arrival burst --lengths fixed:2 --quiet --overwrite "
    argv += f"--figure {tmp_path}/f.png"

    def load(url: str, *more: str) -> Any:
        arguments = client_py.parse([*argv.split(), *more])
        return client_py.load(url, arguments, Console(file=io.StringIO()))

    with server("dynamic", {"model": "fake"}, key=KEY) as url:
        children = psutil.Process().children(recursive=True)
        words = [word for process in children for word in process.cmdline()]
        assert "gunicorn" in words and not [word for word in words if KEY in word]
        with pytest.raises(ServerError, match="401 This server has an API key"):
            get(url)
        with pytest.raises(ServerError, match="401 The API key is wrong"):
            load(url, "--api-key", "another")
        monkeypatch.setitem(os.environ, "EB_API_KEY", KEY)
        assert load(url).completed == 2
        client_py.one_prompt(url, client_py.parse(["--prompt", "hi", "--numtokens", "5"]))
        assert len(capsys.readouterr().out.strip()) == 5
    with stub() as other:
        assert load(other.url, "--api", "openai", "--api-key", "theirs").completed == 2
    assert set(heard) == {"Bearer theirs"}


HOSTS = {
    "localhost:8500": True, "127.0.0.1:8500": True, "[::1]:8500": True, "10.1.2.3": True,
    "LLM.example:8500": True, "evil.example:8500": False, "127.0.0.1.evil.example": False,
}  # fmt: skip


@pytest.mark.parametrize(("host", "known"), HOSTS.items())
def test_a_name_that_nobody_allowed_is_a_403(client_of: ClientOf, host: str, known: bool) -> None:
    """A site whose name leads to this machine could have a browser load and reset the server."""
    client = client_of(allowed_hosts="llm.example, other")
    for path in ("/stats", "/live", "/"):
        response = client.get(path, headers={"Host": host})
        assert (response.status_code == 403) == (not known), path
    asked = client.post("/stats/reset", json={}, headers={"Host": host})
    assert asked.status_code == (200 if known else 403)
    assert known or "--allowed-hosts" in asked.get_json()["error"]["message"]
    assert client.get("/ready", headers={"Host": host}).status_code == 200, "of probes"
    with_key = {"Authorization": f"Bearer {KEY}"}
    for open_ in ({"api_key": KEY}, {"allowed_hosts": "*"}):
        response = client_of(**open_).get("/openapi.json", headers=with_key | {"Host": host})
        assert response.status_code == 200
