"""The client's command line, against a real server."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from shlex import quote, split

import pytest
from rich.console import Console

from client import addresses, arguments, client, machine, runs
from client.measure import Target, judged
from client.outcomes import Outcome
from client.traces import Request, load_trace
from client.wire import wire
from compare.variants import parse_also
from config.settings import ConfigError
from tests.programs import output, ran
from tests.servers import ROOT, Serve, server


def test_where_the_server_is_stated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(addresses, "ROOT", tmp_path)
    monkeypatch.delenv("IP", raising=False)
    (tmp_path / "client").mkdir()
    assert addresses.server_url(None) == "http://127.0.0.1:8500"
    for file, ip, url in (
        (".env", "10.0.0.1", "http://10.0.0.1:8500"),
        ("client/.env", "10.0.0.2:9000", "http://10.0.0.2:9000"),
    ):
        (tmp_path / file).write_text(f"IP={ip}\n")
        assert addresses.server_url(None) == url
    for ip in ("::1", "http://::1:8500", "fe80::8500"):
        with pytest.raises(ConfigError, match=r"--url .*; write http://HOST.* in brackets"):
            addresses.server_url(ip)
        with pytest.raises(ConfigError, match=r"--also .*; write http://HOST.* in brackets"):
            parse_also([f"a=http://{ip.removeprefix('http://')}"])
    monkeypatch.setenv("IP", "host.example")
    for given, url in (
        (None, "http://host.example:8500"),
        ("http://localhost:1234/", "http://localhost:1234"),
        ("10.0.0.3", "http://10.0.0.3:8500"),
        ("https://host/v1", "https://host"),
        ("http://h:80/v1/", "http://h:80"),
        ("http://host/llm", "http://host/llm"),
        ("[::1]", "http://[::1]:8500"),
        ("http://[::1]:9000/v1", "http://[::1]:9000"),
    ):
        assert addresses.server_url(given) == url


def test_what_is_written_may_be_at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """--out=~/run, which a shell leaves so, made a folder named ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert arguments.folder("~/run") == tmp_path / "run"
    assert arguments.file("~/figure.png") == tmp_path / "figure.png"


def test_a_commit_is_that_of_our_own_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was that of a hook's GIT_DIR, and of a repository in which ours was unpacked."""
    commit = "-c user.name=x -c user.email=x commit -q --allow-empty -m"
    for folder in ("theirs", "ours"):
        for words in (f"init -q {tmp_path / folder}", f"-C {tmp_path / folder} {commit} {folder}"):
            subprocess.run(["git", *words.split()], check=True, env=machine.git_environ())
    (unpacked := tmp_path / "theirs" / "unpacked").mkdir()
    monkeypatch.setattr(machine, "SOURCES", {})
    monkeypatch.setattr(machine, "ROOT", tmp_path / "ours")
    own = machine.commit()
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "theirs" / ".git"))
    assert machine.commit() == own != "unknown"
    monkeypatch.delenv("GIT_DIR")
    monkeypatch.setattr(machine, "ROOT", unpacked)
    assert machine.commit() == "unknown"


def test_no_server_and_an_unknown_workload_are_sentences_that_name_the_fix() -> None:
    ended = ran("client.client", "--url", "http://127.0.0.1:9", "--prompt", "hi")
    assert ended.returncode == 1 and ended.stderr.startswith("error: no answer from http://127.")
    assert "(Connection refused); is it running? ./server.sh MODE starts one" in ended.stderr
    for words, sentence in (
        ("--numsamples 3 --arrival auto", "unknown arrival 'auto'; "),
        ("--prompt hi --url host:x", "--url http://host:x: Port could not be cast to integer"),
    ):
        ended = ran("client.client", *split(words))
        assert ended.returncode == 2 and ended.stderr.startswith(f"error: {sentence}")


def test_the_client_prints_one_completion_wherever_it_runs(shared_server: Serve) -> None:
    with shared_server("dynamic", {"model": "fake"}) as url:
        ask = f"--url {url} --prompt hi --numtokens"
        for folder, program, shown in (
            (ROOT, f"client/client.py {ask} 10", 11),
            (ROOT / "client", f"client.py {ask} 500 | head -c 5", 5),
        ):
            command = ["bash", "-c", f"set -o pipefail; {quote(sys.executable)} {program}"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            assert (done.returncode, len(done.stdout), done.stderr) == (0, shown, "")


@pytest.mark.usefixtures("undrawn")
def test_the_client_sends_a_load(tmp_path: Path, shared_server: Serve) -> None:
    with shared_server("dynamic", {"model": "fake"}) as url:
        figure, trace = tmp_path / "figure.png", tmp_path / "run" / "trace.jsonl"
        words = f"--url {url} --numsamples 12 --arrival wait:0.01 --lengths choice:2,4"
        shown = output("client.client", f"{words} --figure {figure} --out {trace.parent}")
        assert shown.count("[") >= 12 and "total-tokens-handled" in shown
        assert "end-to-end latency" in shown and "12 answered, 0 failed" in shown
        assert figure.exists()
        assert {request.num_tokens for request in load_trace(trace)} == {2, 4}
        words = f"--url {url} --trace {trace} --quiet --figure {figure} --overwrite"
        quiet = output("client.client", words)
        assert "[0]" not in quiet and "12 answered" in quiet


def test_limits_and_an_overload_are_shown_of_any_server() -> None:
    requests = [Request(id=i, at=i / 10, prompt="a", num_tokens=1) for i in range(40)]
    outcomes = []
    for request in requests:
        at, end = request.at, 2 * request.at + 0.1
        outcomes.append(Outcome(request, at, at, end, end, end, 1, 1))
    target = Target("vllm", "http://h", wire("openai", "m"), ours=False)
    known = client.parse(split("--numsamples 40 --goodput e2el:1050"))
    console = Console(file=(shown := io.StringIO()), width=80)
    client._show(judged(requests, outcomes, {"e2el": 1050.0}), target, known, console)
    words = " ".join(shown.getvalue().split())
    assert "vllm as this client saw it (overloaded)" in words and " p95 " in words
    assert "1.27 requests per second, 25% of all, within e2el:1050" in words
    assert "vllm was overloaded: its queue grew by 1.00 s per second; its latencies are" in words


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("api", ["inference", "openai"])
def test_recorded_lengths_are_sent_up_to_the_context_of_the_server(
    api: str, tmp_path: Path, shared_server: Serve
) -> None:
    """Also the later turn of a conversation, whose ids are its whole prompt."""
    (tmp_path / "trace.csv").write_text(
        "Timestamp,Session ID,Request tokens,Response tokens\n0,a,9,2\n0.01,a,90,4\n0,,999,40\n"
    )
    with shared_server("dynamic", {"model": "fake"}) as url:
        words = f"--url {url} --api {api} --trace {tmp_path}/trace.csv --out {tmp_path / 'run'}"
        shown = " ".join(output("client.client", f"{words} --figure {tmp_path / 'f.png'}").split())
    assert "left out: 1 of 3 requests (1 beyond the context of 1,024)" in shown
    [run] = runs.load(tmp_path / "run").results
    [result] = run.values()
    sizes = [(each["prompt_tokens"], each["completion_tokens"]) for each in result.requests]
    assert sizes == [(9, 2), (90, 4)]


def test_the_context_is_that_of_the_model_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was that of the first one listed, whatever --model named."""
    listed = [{"id": "A", "max_model_len": 100}, {"id": "B", "max_model_len": 200}]
    monkeypatch.setattr(addresses, "get", lambda *_, **__: {"data": listed})
    for words, tokens in (
        ("", 100), ("--model B", 200), ("""--extra-body '{"model": "B"}'""", 200), ("--model C", 0),
    ):  # fmt: skip
        known = client.parse(split(f"--api openai --numsamples 3 {words}"))
        found = addresses.context_of("http://h", known)
        assert (found.tokens if found else 0) == tokens


@pytest.mark.usefixtures("undrawn")
def test_errors_are_counted_shown_and_never_timed(tmp_path: Path) -> None:
    """Requests beyond the context, and conversations that outgrow it."""
    beyond, outgrown = "10 --lengths choice:1,129", "3 --sessions 3:0 --lengths fixed:60"
    shared = f"--arrival burst --quiet --figure {tmp_path}/figure.png --overwrite --numsamples"
    with server("dynamic", {"model": "fake", "max_model_len": 130}) as url:
        loads = (split(f"--url {url} {shared} {each}") for each in (beyond, outgrown))
        ended = [ran("client.client", *load) for load in loads]
    assert [each.returncode for each in ended] == [1, 1]
    long, conversation = (" ".join(each.stdout.split()) for each in ended)
    assert "failed: 400 " in long and "beyond the context" in long
    assert " answered, " in long and "10 answered" not in long
    assert "3 requests in 1 conversation," in conversation
    assert "1 answered, 2 failed" in conversation and "not sent, as an earlier turn" in conversation


@pytest.mark.parametrize(("arguments", "sentence"), [
    ("", "give --prompt TEXT, --numsamples N or --trace FILE"),
    ("--numsamples 0", "must be at least 1"),
    ("--numsamples 3 --seed -1", "--seed must be 0 or more"),
    ("--prompt hi --timeout inf", "--timeout must be a number of seconds above 0"),
    ("--numsamples 3 --out tests/client/test_client.py",
     f"{__file__} is no folder with write access"),
    ("--numsamples 3 --figure .", "'.' must be a file in a folder with write access"),
    ("--numsamples 3 --figure x.foo", "'x.foo' must end in .png, .svg or .pdf"),
    ("--numsamples 3 --figure x", "'x' must end in .png, .svg or .pdf"),
    ("--prompt hi --goodput e2el:9", "--goodput belongs to a load; leave it out"),
    ("--prompt hi --seed 4", "--seed belongs to a load; leave it out"),
    ("--numsamples 3 --numtokens 7", "--numtokens belongs to --prompt; leave it out"),
    ("--numsamples 3 --model x", "--model is for --api openai and chat; leave it out"),
    ("--numsamples 3 --svg", "add --out FOLDER"),
    ("--numsamples 3 --arival burst", "unknown flag --arival (did you mean --arrival?)"),
    ("--numsamples 3 --scale-tokens 0.1", "add --trace FILE"),
    ("--users a,2,normal b,2,normal", "give --prompt TEXT, --numsamples N or"),
    ("--users a,2,normal b,2,normal,0-3 --prompt hi", "contradict each other"),
])  # fmt: skip
def test_a_bad_command_line_exits_with_2(arguments: str, sentence: str) -> None:
    done = ran("client.client", *split(arguments))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and sentence in done.stderr
