"""Servers that are none of ours, as they are: chats, headers, fields of their own, ids, https."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from client import calls, client
from client.addresses import server_url
from client.arguments import asked_of
from client.calls import ServerError
from client.machine import command_line
from compare.options import parse, parse_runs
from config.settings import ConfigError
from tests.programs import output, ran
from tests.servers import ROOT
from tests.stub import Handler, Stub, stub

SECRET = "sesame-of-the-gateway"
HEADER = f"X-Api-Key: {SECRET}"
ALSO = "--modes dynamic --model fake --skip-calibration --numsamples 3 --arrival burst"


@pytest.mark.usefixtures("undrawn")
def test_chats_are_compared_and_a_header_is_neither_saved_nor_shown(tmp_path: Path) -> None:
    extra = '{"min_p": 0.1, "ignore_eos": null}'
    words = f"{ALSO} --prompt-lengths fixed:9 --lengths fixed:4 --api chat --out {tmp_path}"
    with stub(secret=SECRET) as other:
        more = ("--also", f"gate={other.url}", "--header", HEADER, "--extra-body", extra)
        shown = output("compare", words, *more)
    body = other.bodies[-1]
    [message] = body["messages"]
    assert message["role"] == "user" and len(message["content"].split()) == 9
    assert body["min_p"] == 0.1 and "ignore_eos" not in body and "prompt" not in body
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["asked_as"]["gate"] == {
        "path": "/v1/chat/completions", "in_words": True, "extra_body": json.loads(extra),
    }  # fmt: skip
    counted = json.loads((tmp_path / "gate.json").read_text())["total_input_tokens"]
    assert counted == 9, "three a prompt: its own count, not ours of words"
    report = (tmp_path / "report.md").read_text()
    assert "/v1/chat/completions as a stream with `" in report and "a word for each" in report
    assert "a word for each" in " ".join(shown.split()) and SECRET not in shown
    for path in tmp_path.rglob("*"):
        assert SECRET not in path.read_text(errors="replace"), path


class Silent(Stub):
    """Says nothing of every second answer: it has a role, an end, and a usage."""

    def __init__(self) -> None:
        super().__init__()
        self.RequestHandlerClass = OfSilent


class OfSilent(Handler):
    def _event(self, event: dict[str, Any]) -> None:
        for choice in event["choices"]:
            if len(self.server.bodies) % 2:
                choice["delta"] = {"role": "assistant", "content": ""}
        super()._event(event)


@pytest.mark.usefixtures("undrawn")
def test_a_first_token_that_is_not_seen_has_no_time_anywhere(tmp_path: Path) -> None:
    limits = "--goodput ttft:60000 tpot:60000"
    load = f"--api chat --numsamples 6 --arrival closed:1 --lengths fixed:4 --quiet {limits}"
    with stub(Silent) as other:
        files = f"--out {tmp_path} --figure {tmp_path}/f.png"
        shown = output("client.client", f"--url {other.url} {load} {files}")
    assert "6 answered, 0 failed" in shown and "50% of all, within" in shown
    result = json.loads((tmp_path / "stub.json").read_text())
    firsts = [request["first_token_at"] for request in result["requests"]]
    assert [first is None for first in firsts] == [True, False] * 3
    assert result["p50_ttft_ms"] > 0 and result["mean_e2el_ms"] > 0 and result["attainment"] == 0.5
    with (tmp_path / "requests.csv").open() as file:
        rows = [*csv.DictReader(file)]
    for name in ("first_token_at_s", "ttft_ms", "tpot_ms"):
        assert [row[name] == "" for row in rows] == [True, False] * 3, name
    assert all(row["e2el_ms"] for row in rows)
    assert "| stub |" in (tmp_path / "report.md").read_text()
    assert output("compare", f"--slowest 6 {tmp_path}").count(": answer ") == 3


def test_a_secret_that_a_server_repeats_is_hidden(tmp_path: Path) -> None:
    wrong = "wrong-" + SECRET
    load = f"--numsamples 1 --quiet --arrival burst --figure {tmp_path}/f.png"
    with stub(secret=SECRET) as other:
        url = ("--url", other.url, "--api", "chat", f"--header=x-api-key: {wrong}")
        listed = ran("client.client", *load.split(), *url)
        asked = ran("client.client", *load.split(), *url, "--model", "stub")
    assert "401 … is wrong" in listed.stderr and "401 … is wrong" in asked.stdout
    assert wrong not in listed.stderr + asked.stdout
    line = command_line("x", ["--header", HEADER, f"--header={HEADER}", "--api", "chat"])
    assert SECRET not in line and line.count("--header") == 2 and line.endswith("--api chat")


class Repeating(Handler):
    """Repeats the API key in the error of every second request."""

    def do_POST(self) -> None:
        if len(self.server.bodies) % 2:
            super().do_POST()
            return
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append({})
        self._whole(401, {"error": {"message": f"{self.headers['Authorization']} is wrong"}})


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("given", [True, False])
def test_a_key_that_a_server_repeats_is_neither_saved_nor_shown(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in NAME.json, summary.json, requests.csv and both reports."""
    monkeypatch.setenv("EB_API_KEY", SECRET)
    load = f"--api openai --numsamples 4 --arrival closed:1 --out {tmp_path}/run".split()
    more = ["--api-key", SECRET] if given else []
    with stub() as other:
        other.RequestHandlerClass = Repeating
        url = ("--url", other.url, "--figure", f"{tmp_path}/f.png")
        asked = ran("client.client", *load, *url, *more)
        with pytest.raises(ServerError, match="401 Bearer … is wrong"):
            calls.post(f"{other.url}/v1/completions", {"model": "a"}, key=SECRET)
    assert "2 answered, 2 failed" in asked.stdout and "401 Bearer … is wrong" in asked.stdout
    assert SECRET not in asked.stdout + asked.stderr
    for path in (tmp_path / "run").iterdir():
        assert SECRET not in path.read_text(errors="replace"), path


@pytest.mark.parametrize(("words", "sentence"), [
    *((["--also", f"a=http://{address}"], "--also: an address is saved and shown")
      for address in (f"me:{SECRET}@h", f"me:{SECRET}@h:99999", f"h?key={SECRET}", f"h#{SECRET}")),
    (["--also", f"http://me:{SECRET}@h"], "--also: an address is saved and shown"),
    (["--variant", f"x=dynamic --api-key {SECRET}"], "--variant has a key, .*EB_API_KEY"),
    (["--variant", f"x=dynamic '--api-key={SECRET}"], "--variant has a key, .*EB_API_KEY"),
    (["--runs", "a", "b", f"--api-key={SECRET}"], "leave out --api-key$"),
])  # fmt: skip
def test_a_secret_where_it_would_be_saved_or_shown_is_refused(
    words: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        (parse_runs if "--runs" in words else parse)(words)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("address", [f"http://me:{SECRET}@h", f"h?key={SECRET}"])
def test_an_address_with_a_secret_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IP", address)
    for given, name in (address, "--url"), (None, "IP"):
        with pytest.raises(ConfigError, match=f"{name}: an address is saved and") as refused:
            server_url(given)
        assert SECRET not in str(refused.value)


def test_a_secret_header_is_not_sent_to_where_a_server_leads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lead(self: Handler) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(307)
        self.send_header("Location", elsewhere.url + self.path)
        self.send_header("Content-Length", "0")
        self.end_headers()

    with stub(secret=SECRET) as elsewhere, stub(secret=SECRET) as first:
        heard = []

        def parse_request(self: Handler) -> bool:
            heard.append(self.server)
            return BaseHTTPRequestHandler.parse_request(self)

        monkeypatch.setattr(Handler, "parse_request", parse_request)
        monkeypatch.setattr(Handler, "do_POST", lead)
        argv = ["--url", first.url, "--api", "openai", "--header", HEADER, "--numsamples", "1"]
        assert "307" in ran("client.client", *argv, "--quiet").stdout
        monkeypatch.setattr(Handler, "do_GET", lead)
        assert "answered 307" in ran("client.client", *argv).stderr
    assert elsewhere not in heard and len(heard) == 3


@pytest.mark.parametrize(("status", "more"), [(301, ()), (308, ("--header", HEADER))])
def test_a_redirect_that_a_request_does_not_follow_says_where_to(
    status: int, more: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library made a POST a GET, and "405 Method Not Allowed" was all that one read."""

    def lead(self: Handler) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(status)
        self.send_header("Location", f"{other.url}/there{self.path}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    monkeypatch.setattr(Handler, "do_POST", lead)
    monkeypatch.setattr(Handler, "do_GET", lambda self: self._whole(405, {}))
    with stub(secret=SECRET if more else None) as other:
        argv = f"--url {other.url} --api chat --model stub --numsamples 1 --quiet".split()
        said = " ".join(ran("client.client", *argv, *more).stdout.split())
    assert f"{status} The server is at {other.url}/there; give that address" in said


def test_where_ids_are_refused_words_are_sent(tmp_path: Path) -> None:
    load = "--api openai --numsamples 2 --arrival burst --prefixes 1:5:0 --prompt-lengths fixed:3 "
    load += f"--lengths fixed:2 --quiet --overwrite --figure {tmp_path}/f.png"
    with stub(ids=False) as other:
        shown = output("client.client", f"--url {other.url} {load}")
    assert "a word for each" in " ".join(shown.split()) and "2 answered, 0 failed" in shown
    one, two = (body["prompt"].split() for body in other.bodies[-2:])
    assert len(one) == len(two) == 8 and one[:5] == two[:5] and one != two
    with stub() as other:
        assert "a word for each" not in output("client.client", f"--url {other.url} {load}")
    assert all(isinstance(body["prompt"], list) for body in other.bodies)


@pytest.mark.skipif(not shutil.which("openssl"), reason="it makes the certificate")
def test_https_is_checked_and_an_authority_of_ones_own_is_named(tmp_path: Path) -> None:
    pem = tmp_path / "server.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=x"
    make += f" -addext subjectAltName=IP:127.0.0.1 -keyout {pem} -out {tmp_path}/one.pem"
    subprocess.run(make.split(), check=True, capture_output=True)
    pem.write_text(pem.read_text() + (tmp_path / "one.pem").read_text())

    load = f"--numsamples 1 --arrival burst --quiet --figure {tmp_path}/f.png --api openai --url"
    with stub(certificate=pem) as other:
        refused = ran("client.client", *load.split(), other.url)
        assert refused.returncode == 1 and "SSL_CERT_FILE names the certificate" in refused.stderr
        trusted = subprocess.run(  # which one is read when a program begins
            [sys.executable, "client/client.py", *load.split(), other.url], cwd=ROOT,
            env=os.environ | {"SSL_CERT_FILE": str(pem)}, capture_output=True, text=True,
        )  # fmt: skip
    assert "1 answered, 0 failed" in trusted.stdout, trusted.stderr


@pytest.mark.parametrize(("words", "sentence"), [
    (["--header", f"X-Api-Key {SECRET}"], "--header: give 'NAME: VALUE' in ASCII"),
    (["--header", f"X-Api-Key: {SECRET}é"], "--header: give 'NAME: VALUE' in ASCII"),
    (["--header", f"A: {SECRET}\r\nB: c"], "--header: give 'NAME: VALUE' in ASCII"),
    *((["--extra-body", text], "give a JSON object") for text in ("min_p=1", "[1]", '{"a": NaN}')),
])  # fmt: skip
def test_what_cannot_be_sent_is_refused_without_a_secret(words: list[str], sentence: str) -> None:
    for program, known in (
        (client.parse, ["--numsamples", "1"]),
        (parse, ["--also", "a=http://h"]),
    ):
        with pytest.raises(ConfigError, match=sentence) as refused:
            program([*known, *words, "--api", "chat"])
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize(("program", "argv", "sentence"), [
    (client.parse, "--numsamples 1 --header A:b", "go with --api openai or --api chat"),
    (client.parse, '--numsamples 1 --extra-body {"a":1}', "go with --api openai or --api chat"),
    *((parse, words, "say how servers of --also are asked")
      for words in ("--api chat", "--header A:b", '--extra-body {"a":1}')),
])  # fmt: skip
def test_flags_of_other_servers_need_one(program: Any, argv: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        program(argv.split())


def test_the_last_of_two_headers_of_one_name_counts() -> None:
    known = client.parse(
        ["--numsamples", "1", "--api", "openai", "--header", "x-a: 1", "--header", "X-A:2"]
    )
    assert asked_of(known).headers == {"X-A": "2"} and "1" not in repr(asked_of(known))
