"""Workloads, traces, and the client's command line against a real server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from shlex import quote, split
from typing import Any

import numpy as np
import pytest
from scipy import stats

from client import addresses
from client.draws import WorkloadError, arrivals, at_rate, count
from client.traces import Trace, load_trace, save_trace
from client.workloads import Workload
from compare.variants import parse_also
from config import ConfigError
from tests.programs import output, ran
from tests.servers import ROOT, Serve, server


def tokens(lengths: str, n: int = 4000) -> np.ndarray:
    return np.array([request.num_tokens for request in Workload(lengths, seed=2).requests(n)])


def test_lengths_follow_their_distributions() -> None:
    normal = tokens("normal")
    # clip(|⌈N(100, 100)⌉|, 1, 200): mean 106.9 by quadrature; one in six is at the cap
    assert (normal.min(), normal.max()) == (1, 200) and normal.mean() == pytest.approx(107, abs=4)
    assert (normal == 200).mean() == pytest.approx(0.16, abs=0.02)
    assert set(tokens("choice")) == {1, 25, 100} and set(tokens("choice:7,9")) == {7, 9}
    uniform = tokens("uniform:10:20")
    assert (uniform.min(), uniform.max()) == (10, 20)
    assert uniform.mean() == pytest.approx(15, abs=0.3) and set(tokens("fixed:64")) == {64}
    for spec, distribution, cap in (
        ("exponential:50:100", stats.expon(scale=50), 100),
        ("lognormal:50:1.2:900", stats.lognorm(1.2, scale=50), 900),
    ):
        drawn = tokens(spec)  # rounded up: P(⌈x⌉ <= k) = P(x <= k), until the cap takes the rest
        assert drawn.min() == 1 and drawn.max() == cap
        for k in (1, 20, 50, 99):
            assert (drawn <= k).mean() == pytest.approx(distribution.cdf(k), abs=0.03)


def gaps(arrival: str, n: int = 5001) -> np.ndarray:
    return np.diff(arrivals(arrival, n, seed=1).at)


def follows(gaps: np.ndarray, distribution: Any) -> bool:
    """Kolmogorov and Smirnov's test, which 1 in 1,000 samples of the distribution fail."""
    return bool(stats.kstest(gaps, distribution.cdf).pvalue > 1e-3)


def test_arrivals_follow_their_distributions_and_begin_at_0() -> None:
    poisson = stats.expon(scale=1 / 50)
    assert follows(gaps("poisson:50"), poisson)
    assert follows(gaps("wait:2"), stats.uniform(0, 2))
    for cv in (0.5, 1.0, 2.0):  # a gamma of this coefficient of variation: shape 1 / CV²
        # slow, so that a trace's microseconds are fine enough for the shortest gaps
        assert follows(gaps(f"gamma:0.01:{cv}"), stats.gamma(cv**-2, scale=cv**2 / 0.01))
    assert not follows(gaps("gamma:50:1.2"), poisson), "the test tells them apart"
    assert gaps("constant:50") == pytest.approx(1 / 50, abs=2e-6)
    for spec, users in (("burst", None), ("closed:5", 5)):
        instants, n = arrivals(spec, 3, seed=1)
        assert (instants.tolist(), n) == ([0, 0, 0], users)
    assert arrivals("poisson:5", 2, seed=1).at[0] == 0


def test_the_same_pattern_arrives_at_another_rate() -> None:
    pairs = ("poisson:5", "poisson:10"), ("gamma:5:2", "gamma:10:2"), ("constant:5", "constant:10")
    for slow, fast in pairs:
        assert gaps(slow, 50) == pytest.approx(2 * gaps(fast, 50), abs=4e-6)
        assert at_rate(slow, 10) == fast
    assert at_rate("burst", 3) == at_rate("auto", 3) == "poisson:3"


UNKNOWN_LENGTHS = (
    "normal:1 choice: choice:0 uniform:5 uniform:9:1 fixed:-1 fixed:x zipf exponential:0:9 "
    "exponential:5 exponential:5:1.5 lognormal:50:1 lognormal:50:-1:9 lognormal:nan:1:9 "
    "fixed:9999999999"
)
UNKNOWN_ARRIVALS = (
    "auto poisson poisson:0 poisson:-1 poisson:nan poisson:inf wait:x wait:-1 wait:inf burst:3 "
    "gamma:5 gamma:5:0 gamma:5:1e-200 gamma:5:1e200 constant:0 closed:0 closed:1.5 closed "
    "closed:9999999999"
)


def test_unknown_lengths_and_arrivals_are_refused_with_the_valid_ones() -> None:
    for spec in ("", *split(UNKNOWN_LENGTHS)):
        with pytest.raises(WorkloadError, match=r"are normal, choice.*lognormal:MEDIAN:SIGMA:CAP"):
            Workload(spec)
    for spec in split(UNKNOWN_ARRIVALS):
        with pytest.raises(WorkloadError, match=r"are wait:SECONDS, poisson:RATE.*closed:USERS"):
            arrivals(spec, 3, seed=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_request_is_sent_after_the_end_of_time() -> None:
    """A simulation of such a trace never ended."""
    for arrival in ("wait:1e15", "poisson:1e-12", "constant:1e-320", "gamma:1e-300:1"):
        with pytest.raises(WorkloadError, match=r"would be sent after 1e.09 s; give a higher rate"):
            Workload().requests(30, arrival)
    for options in ({"sessions": "2:1e12"}, {"users": ["a,1e-12,normal", "b,1e-12,normal"]}):
        with pytest.raises(WorkloadError, match="a shorter time of thinking or fewer requests"):
            Workload(**options).requests(30)


def test_prompts_are_counting_words() -> None:
    assert count(3) == "one two three" and count(21).endswith("nineteen twenty twenty-one")
    prompts = [request.prompt or "" for request in Workload(seed=0).requests(2000)]
    words = [len(prompt.split()) for prompt in prompts]
    assert min(words) >= 1 and max(words) <= 64 and np.mean(words) == pytest.approx(11.6, abs=0.6)


def test_a_workload_is_the_same_for_the_same_seed_and_longest_first_when_asked() -> None:
    one, same, other = (Workload(seed=seed).requests(50, "poisson:3") for seed in (1, 1, 2))
    assert one == same != other
    descending = Workload(selection="descend", seed=1).requests(50, "poisson:3")
    lengths = [request.num_tokens for request in descending]
    assert lengths == sorted((request.num_tokens for request in one), reverse=True)
    assert [request.at for request in descending] == [request.at for request in one]


def test_a_closed_loop_is_saved_and_can_be_sent_at_other_instants(tmp_path: Path) -> None:
    closed = Workload(seed=1).requests(20, "closed:3")
    save_trace(tmp_path / "closed.jsonl", closed)
    assert load_trace(tmp_path / "closed.jsonl") == closed and closed[0].users == 3
    opened = Trace.of(closed).sent_as("poisson:3", seed=1)
    assert opened == Workload(seed=1).requests(20, "poisson:3"), "only the instants are others"
    assert "users" not in opened[0].body()


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
        words = f"--url {url} --numsamples 12 --wait 0.01 --numtokens_range 2 4 --selection descend"
        shown = output("client.client", f"{words} --figure {figure} --out {trace.parent}")
        assert shown.count("[") >= 12 and "total-tokens-handled" in shown
        assert "end-to-end latency" in shown and "12 answered, 0 failed" in shown
        assert figure.exists()
        assert {request.num_tokens for request in load_trace(trace)} == {2, 4}
        words = f"--url {url} --trace {trace} --quiet --figure {figure} --overwrite"
        quiet = output("client.client", words)
        assert "[0]" not in quiet and "12 answered" in quiet


@pytest.mark.usefixtures("undrawn")
def test_errors_are_counted_shown_and_never_timed(tmp_path: Path) -> None:
    """Requests beyond the context, and conversations that outgrow it."""
    beyond, outgrown = "10 --numtokens_range 1 129", "3 --sessions 3:0 --lengths fixed:60"
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
    (f"--numsamples 3 --out {__file__}", f"{__file__} is no folder with write access"),
    ("--numsamples 3 --figure .", "'.' must be a file in a folder with write access"),
    ("--numsamples 3 --save-trace t.jsonl", "--save-trace is no longer a flag: "),
    ("--numsamples 3 --selection ascend", "invalid choice"),
    ("--numsamples 3 --wait 1 --arrival burst", "contradict each other"),
    ("--numsamples 3 --scale 4", "add --trace FILE"),
    ("--users a,2,normal b,2,normal", "give --prompt TEXT, --numsamples N or"),
    ("--users a,2,normal b,2,normal,0-3 --prompt hi", "contradict each other"),
])  # fmt: skip
def test_a_bad_command_line_exits_with_2(arguments: str, sentence: str) -> None:
    done = ran("client.client", *split(arguments))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and sentence in done.stderr
