"""docs/deploy as far as it can be tested without Docker: its files are linted and agree, and the
image's programs run here, on the files that the image would hold.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from threading import Thread
from typing import Any

import pytest
import yaml
from werkzeug.serving import make_server

from client.calls import get_text, post
from compare.servers import wait_until_ready
from config.flags import from_environment
from generate.auto import build
from server.api.door import check_host
from server.api.routes import ROUTES
from server.observers.metrics import OF_SERVER
from tests.servers import ROOT, ClientOf, free_port

DEPLOY = ROOT / "docs" / "deploy"
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions: (name, the rest)."""
    lines = (DEPLOY / "Dockerfile").read_text().splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("#")).replace("\\\n", "")
    words = [line.split(maxsplit=1) for line in text.splitlines() if line]
    return [(name, rest) for name, rest in words]


def only(name: str) -> str:
    """Return the one instruction of that name."""
    (rest,) = [rest for each, rest in instructions() if each == name]
    return rest


def image_environment(folder: Path) -> dict[str, str]:
    """Return this process's environment with the image's variables; `folder` is its /cache."""
    pairs = [pair.split("=", 1) for pair in shlex.split(only("ENV"))]
    return os.environ | {name: value.replace("/cache", str(folder)) for name, value in pairs}


def goes_in(path: str) -> bool:
    """Return whether Docker sees a path: the last line of .dockerignore that matches counts."""
    places = [str(place) for place in (PurePosixPath(path), *PurePosixPath(path).parents)]
    inside = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("#") or not line:
            continue
        pattern = re.escape(line.removeprefix("!"))
        pattern = pattern.replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(pattern, place) for place in places if place != "."):
            inside = line.startswith("!")
    return inside


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `COPY . .` puts into the image."""

    def ignored(folder: str, names: list[str]) -> set[str]:
        paths = {name: (Path(folder) / name).relative_to(ROOT).as_posix() for name in names}
        # of client/ one file goes in
        return {name for name, path in paths.items() if not goes_in(path) and path != "client"}

    app = tmp_path_factory.mktemp("image") / "app"
    shutil.copytree(ROOT, app, ignore=ignored)
    return app


@pytest.mark.skipif(HADOLINT is None, reason="there is no hadolint")
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([str(HADOLINT), DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_no_key_no_result_and_no_tests_go_into_the_image(image: Path) -> None:
    outside = """.env client/.env config/.env .git/config .venv/bin/python runs/a/b tests/stub.py
        config/__pycache__/a.pyc results/README.md client/client.py"""
    assert [path for path in outside.split() if goes_in(path)] == []
    assert (image / "generate" / "demo" / "model.safetensors").is_file() and not (
        image / "results"
    ).exists()


def healthy(port: str) -> bool:
    """Return whether the image's health check passes for the server at a port of this machine."""
    program, *arguments = json.loads(only("HEALTHCHECK").split(" CMD ")[1])
    assert program == "python"
    environment = os.environ | {"EB_PORT": port, "HTTP_PROXY": "http://127.0.0.1:1"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True)
    assert done.returncode in (0, 1), "Docker knows no other"
    return done.returncode == 0


@pytest.mark.nightly
def test_the_image_serves_other_machines_and_ends_as_it_should(image: Path, tmp_path: Path) -> None:
    """Without any settings: the image has the files of the shipped model."""
    port = str(free_port())
    program, *arguments = json.loads(only("ENTRYPOINT")) + json.loads(only("CMD"))
    assert program == "python" and not healthy(port)
    own = os.environ.get("XDG_CACHE_HOME", "")  # where the kernels are built already
    environment = image_environment(tmp_path) | {"EB_PORT": port, "XDG_CACHE_HOME": own}
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=image, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(process, url)
        assert healthy(port)
        assert post(f"{url}/inference", {"prompt": "If the file", "num_tokens": 5})["completion"]
        assert "<html" in get_text(f"{url}/live")
        process.terminate()
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, output
    assert f"dynamic mode on http://0.0.0.0:{port}" in output


def test_a_server_that_wants_no_requests_is_not_healthy(client_of: ClientOf) -> None:
    """A server that loads, drains or has a broken engine answers, but not with 200."""
    app = client_of().application
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        assert healthy(str(server.port))
        app.extensions["engine"].manager.drain()
        assert not healthy(str(server.port))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


FIND_CACHES = """
from generate import kernels
import tiktoken.load, huggingface_hub.constants
print(huggingface_hub.constants.HF_HUB_CACHE)
tiktoken.load.read_file = lambda name: b"of the network"
tiktoken.load.read_file_cached("https://example.com/vocabulary")
try:
    kernels.build()
except kernels.KernelUnavailable:
    pass
"""


def test_downloads_and_builds_go_to_the_volume(image: Path, tmp_path: Path) -> None:
    environment = image_environment(tmp_path) | {"CXX": "false"}
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        environment.pop(name, None)
    command = [sys.executable, "-c", FIND_CACHES]
    done = subprocess.run(command, cwd=image, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == tmp_path / "huggingface" / "hub"
    assert {path.name for path in tmp_path.iterdir()} == {"effective-batching", "tiktoken"}
    assert [*(tmp_path / "tiktoken").iterdir()] != []
    assert only("VOLUME") == "/cache" and only("USER") not in ("0", "root")


def composed(*names: str) -> dict[str, Any]:
    """Merge files that share no service, as `docker compose -f ... -f ...` does."""
    files = [yaml.safe_load((DEPLOY / name).read_text()) for name in names]
    return {
        key: {name: each for file in files for name, each in (file.get(key) or {}).items()}
        for key in ("services", "volumes")
    }


def test_the_example_of_kubernetes_agrees_with_the_server() -> None:
    """It was never applied to a cluster, and says so."""
    texts = [(DEPLOY / name).read_text() for name in ("kubernetes.yaml", "keda.yaml")]
    assert all("UNTESTED" in text for text in texts)
    deployment, service, scaled = (each for text in texts for each in yaml.safe_load_all(text))
    pod = deployment["spec"]["template"]
    (box,) = pod["spec"]["containers"]
    labels = pod["metadata"]["labels"]
    assert labels == deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert scaled["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    (port,) = box["ports"]
    assert str(port["containerPort"]) == only("EXPOSE")
    probes = {name: probe["httpGet"] for name, probe in box.items() if name.endswith("Probe")}
    assert {each["port"] for each in (*probes.values(),)} == {port["name"]}
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert {f"GET {each['path']}" for each in probes.values()} <= {route.name for route in ROUTES}
    assert {name: each["path"] for name, each in probes.items()} == {
        "startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health",
    }  # fmt: skip
    given = {each["name"]: each.get("value", "a-key-of-the-secret") for each in box["env"]}
    config = from_environment(given, None)
    assert len(config) == len(given), "it names a setting that there is not"
    built = build(box["args"][0], {"model": "fake"}, config)
    assert built.drain_timeout_s < pod["spec"]["terminationGracePeriodSeconds"]
    assert box["volumeMounts"][0]["mountPath"] == only("VOLUME")
    (trigger,) = scaled["spec"]["triggers"]
    named = re.findall(r"[a-z_]+:[a-z_]+", trigger["metadata"]["query"])
    assert named and {*named} <= {each.name for each in OF_SERVER}


def test_the_files_of_compose_agree() -> None:
    """Docker makes an empty folder of a file that is missing, and the program in the box fails."""
    boxes = composed("compose.yaml", "monitoring.yaml")
    ports = [port for box in boxes["services"].values() for port in box.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in ports), "of this machine alone"
    assert sorted(port.split(":")[1] for port in ports) == ["3000", "8500", "9090"]
    for name, service in boxes["services"].items():
        for mount in service["volumes"]:
            source, target, *_ = mount.split(":")
            if source.startswith("."):
                assert (DEPLOY / source).is_file(), f"{name} mounts {source}"
            else:
                assert source in boxes["volumes"] and target.startswith("/")
        assert "build" in service or re.fullmatch(r"[a-z/]+:v?\d+\.\d+[\w.-]*", service["image"])
    assert [name for name, box in boxes["services"].items() if "build" in box] == ["server"]
    build = boxes["services"]["server"]["build"]  # a path from the file, and one from there
    assert (DEPLOY / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).is_file()
    port = only("EXPOSE")
    assert boxes["services"]["server"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"server:{port}"], "Prometheus knows it"


def test_a_composed_server_without_a_key_answers_to_the_name_that_prometheus_uses() -> None:
    given = composed("compose.yaml")["services"]["server"]["environment"]
    given = {name: re.sub(r"\$\{\w+:-(\w+)\}", r"\1", str(value)) for name, value in given.items()}
    config = build("dynamic", {}, from_environment(given, None))
    assert not config.users_of_keys and config.hosts is not None
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    check_host(target, config.hosts)
