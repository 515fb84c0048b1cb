"""Workloads, traces, and the client's command line against a real server."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from client import client as program
from client.data import PromptData, WorkloadError, arrivals, count, describe, load_trace, save_trace
from client.load import ServerError, get
from tests.servers import client_command, server


def tokens(lengths: str, n: int = 4000) -> np.ndarray:
    return np.array([request.num_tokens for request in PromptData(lengths, seed=2).requests(n)])


def test_lengths_follow_their_distributions() -> None:
    normal = tokens("normal")
    # clip(|⌈N(100, 100)⌉|, 1, 200): mean 106.9 by quadrature; one in six is at the cap
    assert normal.min() >= 1 and normal.max() == 200
    assert normal.mean() == pytest.approx(107, abs=4) and (normal == 200).mean() == pytest.approx(0.16, abs=0.02)
    assert set(tokens("choice")) == {1, 25, 100} and set(tokens("choice:7,9")) == {7, 9}
    uniform = tokens("uniform:10:20")
    assert (uniform.min(), uniform.max()) == (10, 20) and uniform.mean() == pytest.approx(15, abs=0.3)
    assert set(tokens("fixed:64")) == {64}


@pytest.mark.parametrize(
    "spec", ["", "normal:1", "choice:", "choice:0", "uniform:5", "uniform:9:1", "fixed:-1", "fixed:x", "zipf"]
)
def test_unknown_lengths_are_refused_with_the_valid_ones(spec: str) -> None:
    with pytest.raises(WorkloadError, match=r"valid ones are normal, choice.*fixed:N"):
        PromptData(spec)


def test_arrivals_follow_their_distributions_and_begin_at_0() -> None:
    poisson = np.diff(arrivals("poisson:50", 5001, seed=1))
    assert poisson.mean() == pytest.approx(1 / 50, rel=0.05) and poisson.std() == pytest.approx(1 / 50, rel=0.1)
    waits = np.diff(arrivals("wait:2", 5001, seed=1))
    assert waits.min() >= 0 and waits.max() <= 2 and waits.mean() == pytest.approx(1, rel=0.05)
    assert arrivals("burst", 3, seed=1) == [0, 0, 0] and arrivals("poisson:5", 2, seed=1)[0] == 0


@pytest.mark.parametrize(
    "spec", ["auto", "poisson", "poisson:0", "poisson:-1", "poisson:nan", "poisson:inf", "wait:x", "burst:3"]
)
def test_unknown_arrivals_are_refused_with_the_valid_ones(spec: str) -> None:
    with pytest.raises(WorkloadError, match="valid ones are wait:SECONDS, poisson:RATE, burst"):
        arrivals(spec, 3, seed=0)


def test_prompts_are_counting_words() -> None:
    assert count(3) == "one two three" and count(21).endswith("nineteen twenty twenty-one")
    words = [len(request.prompt.split()) for request in PromptData(seed=0).requests(2000) if request.prompt]
    assert min(words) >= 1 and max(words) <= 64 and np.mean(words) == pytest.approx(11.6, abs=0.6)


def test_a_workload_is_the_same_for_the_same_seed_and_longest_first_when_asked() -> None:
    one, same, other = (PromptData(seed=seed).requests(50, "poisson:3") for seed in (1, 1, 2))
    assert one == same != other
    descending = PromptData(order="descend", seed=1).requests(50, "poisson:3")
    lengths = [request.num_tokens for request in descending]
    assert lengths == sorted(lengths, reverse=True) and sorted(lengths) == sorted(request.num_tokens for request in one)
    assert [request.at for request in descending] == [request.at for request in one]
    with pytest.raises(WorkloadError, match="random, descend"):
        PromptData(order="ascend")


def test_a_trace_survives_the_way_to_a_file_and_back(tmp_path: Path) -> None:
    requests = PromptData(seed=1).requests(20, "poisson:3")
    save_trace(tmp_path / "trace.jsonl", requests)
    assert load_trace(tmp_path / "trace.jsonl") == requests
    realised = describe(requests)
    assert realised["requests"] == 20 and realised["requested_rate"] == pytest.approx(19 / requests[-1].at)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"id": 0, "at": 0, "prompt": "a", "num_tokens": 1}\n{"id": 1, "at": 0, "prompt": "a"}', "line 2: num_tokens: "),
        ("nonsense", "line 1: Invalid JSON"),
        ('{"id": 0, "at": -1, "prompt": "a", "num_tokens": 1}', "line 1: at: "),
        ('{"id": 0, "at": 0, "num_tokens": 1}', "line 1: give either prompt or prompt_ids"),
        ('{"id": 0, "at": 0, "prompt": "a", "num_tokens": 1}\n' * 2, "holds an id twice"),
        ("", "holds no requests"),
    ],
)  # fmt: skip
def test_a_bad_trace_is_refused_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(WorkloadError, match=said):
        load_trace(tmp_path / "trace.jsonl")
    with pytest.raises(WorkloadError, match="cannot read"):
        load_trace(tmp_path / "absent.jsonl")


def test_the_server_comes_from_the_flag_the_environment_or_dotenv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.delenv("IP", raising=False)
    assert program.server_url(None) == "http://127.0.0.1:8500"
    (tmp_path / ".env").write_text("IP=10.0.0.1\n")
    assert program.server_url(None) == "http://10.0.0.1:8500"
    (tmp_path / "client").mkdir()
    (tmp_path / "client" / ".env").write_text("IP=10.0.0.2:9000\n")
    assert program.server_url(None) == "http://10.0.0.2:9000"
    monkeypatch.setenv("IP", "host.example")
    assert program.server_url(None) == "http://host.example:8500"
    assert program.server_url("http://localhost:1234/") == "http://localhost:1234"
    assert program.server_url("10.0.0.3") == "http://10.0.0.3:8500"


def test_no_server_is_a_sentence_that_names_the_fix() -> None:
    with pytest.raises(ServerError, match=r"start one with \./server\.sh MODE"):
        get("http://127.0.0.1:9/health")
    ended = subprocess.run(client_command("--url", "http://127.0.0.1:9", "--prompt", "hi"), capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.startswith("error: no answer") and "Traceback" not in ended.stderr


def test_the_client_sends_one_prompt_or_a_load_from_the_root_or_from_its_folder(tmp_path: Path) -> None:
    with server("dynamic", {"model": "fake"}) as url:
        for folder in (Path(__file__).resolve().parents[1], Path(__file__).resolve().parents[1] / "client"):
            done = subprocess.run(
                [sys.executable, "client.py" if folder.name == "client" else "client/client.py",
                 "--url", url, "--prompt", "hi", "--numtokens", "10"],
                cwd=folder, capture_output=True, text=True, check=True,
            )  # fmt: skip
            assert len(done.stdout.rstrip("\n")) == 10
        figure, trace = tmp_path / "figure.png", tmp_path / "trace.jsonl"
        load = client_command("--url", url, "--numsamples", "12", "--wait", "0.01", "--numtokens_range", "2", "4",
                              "--selection", "descend", "--figure", str(figure), "--save-trace", str(trace))  # fmt: skip
        shown = subprocess.run(load, capture_output=True, text=True, check=True).stdout
        assert shown.count("[") >= 12 and "total-tokens-handled" in shown and "end-to-end latency" in shown
        assert "12 answered, 0 failed" in shown and figure.stat().st_size > 10_000
        assert {request.num_tokens for request in load_trace(trace)} == {2, 4}
        again = client_command("--url", url, "--trace", str(trace), "--quiet", "--figure", str(figure))
        quiet = subprocess.run(again, capture_output=True, text=True, check=True).stdout
        assert "[0]" not in quiet and "12 answered" in quiet


def test_errors_are_counted_shown_and_never_timed(tmp_path: Path) -> None:
    with server("dynamic", {"model": "fake", "max_model_len": 100}) as url:
        load = client_command("--url", url, "--numsamples", "10", "--arrival", "burst", "--numtokens_range", "1", "99",
                              "--quiet", "--figure", str(tmp_path / "figure.png"))  # fmt: skip
        ended = subprocess.run(load, capture_output=True, text=True)
        assert ended.returncode == 1 and "failed: 400 " in ended.stdout and "beyond the context" in ended.stdout
        assert " answered, " in ended.stdout and "10 answered" not in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give --prompt TEXT, --numsamples N or --trace FILE"),
        (["--numsamples", "0"], "must be at least 1"),
        (["--numsamples", "3", "--arrival", "auto"], "valid ones are wait"),
        (["--numsamples", "3", "--selection", "ascend"], "invalid choice"),
        (["--numsamples", "3", "--wait", "1", "--arrival", "burst"], "contradict each other"),
    ],
)
def test_a_bad_command_line_exits_with_2(arguments: list[str], said: str) -> None:
    ended = subprocess.run(client_command(*arguments), capture_output=True, text=True)
    assert ended.returncode == 2 and said in ended.stderr and "Traceback" not in ended.stderr


def test_a_reader_of_the_text_that_has_enough_ends_the_client_quietly() -> None:
    with server("dynamic", {"model": "fake"}) as url:
        command = shlex.join(client_command("--url", url, "--prompt", "hi", "--numtokens", "500"))
        done = subprocess.run(["bash", "-c", f"set -o pipefail; {command} | head -c 5"], capture_output=True, text=True)
    assert (done.returncode, len(done.stdout), done.stderr) == (0, 5, "")
