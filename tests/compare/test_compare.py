"""The comparison from end to end on the fake model, and what it must leave behind: results, and no
server.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from client.calls import ServerError, get
from client.draws import WorkloadError
from client.traces import load_trace, save_trace
from client.workloads import Workload
from compare.analysis import identical_outputs
from compare.options import parse, parse_goodput
from compare.report.sentences import identity
from compare.runs import Run, clear
from compare.variants import parse_also
from config import ConfigError
from tests.programs import ran
from tests.servers import launched, wait_until
from tests.stub import Stub, stub
from tests.traces import save_mooncake


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    return ran("compare", "--skip-calibration", *arguments)


@pytest.mark.usefixtures("undrawn")
def test_a_comparison_writes_all_it_promises(tmp_path: Path) -> None:
    done = compare(
        "--model",
        "fake",
        "--numsamples",
        "40",
        "--lengths",
        "choice:2,20",
        "--max-batch-size",
        "8",
        "--batch-size-target",
        "2",
        "--goodput",
        "e2el:500",
        "--out",
        str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert "All 40 requests that every variant answered got the same text in each." in " ".join(
        done.stdout.split()
    )
    modes = ["nobatch", "static", "windowed", "dynamic"]
    figures = [
        "latency_vs_tokens.png",
        "who_waits.png",
        "occupancy.png",
        "rows.png",
        "distributions.png",
    ]
    wanted = {
        "trace.jsonl",
        "summary.json",
        "report.md",
        "report.html",
        *figures,
        *(f"{mode}.json" for mode in modes),
    }
    assert {path.name for path in tmp_path.iterdir()} == wanted
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["variants"]) == modes and summary["identical_outputs"] == {
        "requests": 40, "identical": 40, "parted_after": []
    }  # fmt: skip
    assert {"config", "hardware", "commit", "date", "seed", "command", "definitions"} <= set(
        summary
    )
    assert summary["config"]["model"] == "fake" and summary["capacity"]["output_throughput"] > 0
    rate = summary["capacity"]["output_throughput"] * 0.85 / summary["workload"]["mean_num_tokens"]
    assert summary["workload"]["arrival"] == f"poisson:{rate:.4g}"
    for mode in modes:
        told = summary["variants"][mode]
        assert told["completed"] == 40 and told["failed"] == 0 and told["output_throughput"] > 0
        assert set(told["latency_line"]) == {"intercept_s", "slope_s_per_token", "r"}
        whole = json.loads((tmp_path / f"{mode}.json").read_text())
        assert whole["variant"] == whole["config"]["mode"] == mode and len(whole["requests"]) == 40
        assert {
            "p99_tpot_ms",
            "mean_itl_ms",
            "mean_ttft_from_schedule_ms",
            "goodput",
            "definitions",
        } <= set(whole)
        # client and server agree on what was done
        assert whole["total_output_tokens"] == whole["server"]["total_output_tokens"]
        assert whole["mean_queue_time_ms"] == pytest.approx(
            whole["server"]["mean_queue_time_ms"], abs=0.01
        )
        assert whole["mean_e2el_ms"] >= whole["server"]["mean_e2el_ms"]
    assert (
        summary["variants"]["nobatch"]["largest_batch"] == 1
        and summary["variants"]["dynamic"]["useful_fraction"] == 1.0
    )
    assert summary["variants"]["static"]["useful_fraction"] < 1
    assert json.loads((tmp_path / "windowed.json").read_text())["config"]["batch_size_target"] == 2
    for figure in figures:
        assert f"({figure})" in (tmp_path / "report.md").read_text()

    again = tmp_path / "again"
    done = compare(
        "--model",
        "fake",
        "--modes",
        "windowed",
        "--trace",
        str(tmp_path / "trace.jsonl"),
        "--out",
        str(again),
        "--batch-size-target",
        "2",
        "--compact-batches",
    )
    assert done.returncode == 0, done.stderr
    assert (again / "trace.jsonl").read_text() == (tmp_path / "trace.jsonl").read_text()
    replayed = json.loads((again / "summary.json").read_text())
    assert list(replayed["variants"]) == ["windowed"] and replayed["capacity"] is None
    assert (
        replayed["config"]["batch_size_target"] == 2
        and replayed["config"]["compact_batches"] is True
    )
    assert (
        replayed["workload"]["arrival"].startswith("as in ")
        and replayed["variants"]["windowed"]["useful_fraction"] == 1.0
    )
    texts = [
        [
            request["text"]
            for request in json.loads((folder / "windowed.json").read_text())["requests"]
        ]
        for folder in (tmp_path, again)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)]
)
def test_an_interrupted_comparison_leaves_no_server_behind(
    how: signal.Signals, tmp_path: Path
) -> None:
    marker = str(tmp_path)
    with launched(
        sys.executable,
        "-m",
        "compare",
        "--skip-calibration",
        "--model",
        "fake",
        "--modes",
        "nobatch,dynamic",
        "--arrival",
        "burst",
        "--lengths",
        "fixed:200",
        "--numsamples",
        "200",
        "--out",
        marker,
    ) as process:
        # in the middle of the replay
        wait_until(lambda: completed_by_a_server_of(process.pid) > 10, every_s=0.2)
        servers = servers_of(process.pid)
        assert servers
        process.send_signal(how)
        output, _ = process.communicate(timeout=60)
        assert (
            process.returncode == 130
            and "what was measured is kept" in output
            and "Traceback" not in output
        )
    for pid in servers:
        assert (
            not os.path.exists(f"/proc/{pid}")
            or "Z" in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]
        )
    kept = json.loads((tmp_path / "nobatch.json").read_text())
    assert kept["partial"] and 0 < kept["completed"] < 200 and kept["failed"] == 0, (
        "what is in flight has not failed"
    )
    assert (
        "| nobatch (partial) |" in (report := (tmp_path / "report.md").read_text())
        and "**Partial**" in report
    )


def servers_of(pid: int) -> list[int]:
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True
    ).stdout.split()
    return [int(word) for word in found] + [
        grandchild for word in found for grandchild in servers_of(int(word))
    ]


def completed_by_a_server_of(pid: int) -> int:
    """What the first server that `pid` has started has completed in its run, so far."""
    for process in psutil.Process(pid).children(recursive=True):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                with contextlib.suppress(ServerError):
                    return int(get(f"http://127.0.0.1:{connection.laddr.port}/stats")["completed"])
    return 0


def test_a_server_that_does_not_come_up_is_shown_with_what_it_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 300}))
    settings = [
        "--model",
        str(tmp_path),
        "--tokenizer",
        "bytes",
        "--modes",
        "dynamic",
        "--arrival",
        "burst",
    ]
    done = compare(*settings, "--out", str(tmp_path / "out"))
    assert (
        done.returncode == 1
        and "exit code 2" in done.stderr
        and "model.safetensors does not exist" in done.stderr
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--modes", "static,dynamo"], "unknown mode 'dynamo'"),
        (["--modes", "static,static"], "names a mode twice"),
        (["--numsample", "3"], r"unknown flag --numsample \(did you mean --numsamples\?\)"),
        (["--numsamples", "0"], "at least 1"),
        (["--modes", "nobatch,dynamic", "--batch-size-target", "4"], "no meaning in any of the "
                                                                     "modes nobatch, dynamic"),
        (["--port", "8500"], "every variant gets a free port"),
        (["--max-batch-size", "none"], "--max-batch-size 'none'"),
        (["--goodput", "ttft"], "give ttft:MS, tpot:MS or e2el:MS"),
        (["--goodput", "e2el:-1"], "give ttft:MS, tpot:MS or e2el:MS"),
        (["--trace", "t.jsonl", "--numsamples", "3"], "--trace holds the requests"),
        (["--trace", "t.jsonl", "--sweep"], "draw traces of their own"),
        (["--trace", "t.jsonl", "--sessions", "2:1"], "leave out --sessions"),
        (["--scale", "16"], "add --trace FILE"),
        (["--trace", "t.jsonl", "--scale", "5"], "invalid choice"),
        (["--sessions", "2:1"], "--sessions needs an --arrival"),
        (["--sessions", "2:1", "--sweep"], "leave out --sweep or --sessions"),
        (["--seconds", "3"], "add --sweep"),
        (["--sweep", "--seconds", "0"], "--seconds must be a number of seconds above 0"),
        (["--timeout", "nan"], "--timeout must be a number of seconds above 0"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--also", "vllm"], "give NAME=URL"),
        (["--also", "vllm=localhost:8000"], "give NAME=URL"),
        (["--also", "../x=http://h"], "give NAME=URL"),
        (["--also", "static=http://h"], "choose another name"),
        (["--also", "summary=http://h"], "choose another name"),
        (["--goodput", "e2el:inf"], "give ttft:MS, tpot:MS or e2el:MS"),
    ],
)  # fmt: skip
def test_a_bad_command_line_is_answered_before_any_server_starts(
    argv: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(argv)


def test_a_bad_workload_is_refused_before_any_server_starts(tmp_path: Path) -> None:
    for argv in (
        ["--lengths", "zipf"],
        ["--arrival", "soon"],
        ["--prefixes", "4"],
        ["--users", "a,2,normal", "b,2"],
        ["--priorities", "0.5:1"],
        ["--sessions", "2:1", "--arrival", "closed:2"],
        ["--trace", str(tmp_path / "absent")],
    ):
        started = time.monotonic()
        done = compare("--model", "fake", *argv, "--out", str(tmp_path / "out"))
        assert (
            done.returncode == 2
            and done.stderr.startswith("error: ")
            and "Traceback" not in done.stderr
        )
        assert not (tmp_path / "out").exists() and time.monotonic() - started < 60
    assert issubclass(WorkloadError, ValueError)


def test_other_servers_are_named_with_their_url() -> None:
    assert parse_also(["vllm-0.9=http://h:8000/v1/", "b=https://h"]) == {
        "vllm-0.9": "http://h:8000",
        "b": "https://h",
    }
    assert parse(["--sweep"]).goodput == {"e2el": 2000.0} and parse([]).goodput == {}


@pytest.mark.usefixtures("undrawn")
def test_a_server_that_is_none_of_ours_stands_beside_a_mode(tmp_path: Path) -> None:
    with stub(gap_s=0.001) as other:
        done = compare(
            "--model",
            "fake",
            "--modes",
            "dynamic",
            "--also",
            f"stub={other.url}",
            "--numsamples",
            "20",
            "--lengths",
            "fixed:4",
            "--arrival",
            "closed:3",
            "--prompts",
            "ids",
            "--stream",
            "--out",
            str(tmp_path),
        )
    assert done.returncode == 0, done.stderr
    assert all(isinstance(body["prompt"], list) for body in other.bodies), "it may read ids alone"
    assert other.most_in_flight <= 3 and {body["max_tokens"] for body in other.bodies[2:]} == {4}
    summary = json.loads((tmp_path / "summary.json").read_text())
    ours, others = summary["variants"]["dynamic"], summary["variants"]["stub"]
    assert (
        ours["completed"] == others["completed"] == 20
        and ours["occupancy"] > 0
        and others["occupancy"] is None
    )
    report = (tmp_path / "report.md").read_text()
    assert (
        "| stub | " in report
        and "Latencies are of streams" in report
        and "its engine and hardware are not known" in report
    )
    assert "got the same text" not in report, "another server may run another model"


@pytest.mark.usefixtures("undrawn")
def test_a_server_that_fails_later_leaves_what_was_measured_before(tmp_path: Path) -> None:
    done = compare(
        "--model",
        "fake",
        "--modes",
        "dynamic",
        "--also",
        "gone=http://127.0.0.1:9",
        "--numsamples",
        "5",
        "--arrival",
        "burst",
        "--out",
        str(tmp_path),
    )
    assert done.returncode == 1 and "error: no answer from http://127.0.0.1:9" in done.stderr
    assert not (tmp_path / "dynamic.json").exists(), "found before anything was measured"

    class Dying(Stub):
        """Lists its model once, and is gone when its turn comes."""

        def shutdown_request(self, request: Any) -> None:
            super().shutdown_request(request)
            self.models = ()

    with stub(Dying) as other:
        done = compare(
            "--model",
            "fake",
            "--modes",
            "dynamic",
            "--also",
            f"dying={other.url}",
            "--numsamples",
            "5",
            "--lengths",
            "fixed:2000",
            "--arrival",
            "burst",
            "--out",
            str(tmp_path),
        )
    assert (
        done.returncode == 1 and "lists no model" in done.stderr and "Traceback" not in done.stderr
    )
    report = (tmp_path / "report.md").read_text()
    assert "**Partial**" in report and "lists no model" in report and "dying is missing" in report
    for said in (done.stderr, report):
        assert (
            "**Failed in dynamic**: " in said
            and " × 400 " in said
            and "beyond the context of 1024" in said
        )


def test_an_earlier_run_makes_room_and_nothing_else_is_touched(tmp_path: Path) -> None:
    (tmp_path / "seed-3").mkdir()
    for path in (
        "notes.txt",
        "seed-3/mine.txt",
        "report.html",
        "seed-3/summary.json",
        "seed-3/old.json",
    ):
        (tmp_path / path).write_text('{"variants": {"old": {}}}')
    clear(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "notes.txt",
        "seed-3",
        "seed-3/mine.txt",
    ]


def test_goodput_limits_are_parsed() -> None:
    assert parse_goodput(["ttft:200", "e2el:1e3"]) == {"ttft": 200.0, "e2el": 1000.0}


def test_texts_are_compared_over_the_requests_that_every_mode_answered() -> None:
    def result(*texts: str | None) -> dict[str, object]:
        return {
            "requests": [
                {"id": i} | ({} if text is None else {"text": text}) for i, text in enumerate(texts)
            ]
        }

    found = identical_outputs({"a": result("x", "yes, it is", None), "b": result("x", "yes", "w")})
    assert found == {"requests": 2, "identical": 1, "parted_after": [0.3]}
    summary = {
        "variants": {"a": {}, "b": {}},
        "also": {},
        "identical_outputs": found,
        "config": {"dtype": "bfloat16"},
    }
    said = identity(Run(Path(), [summary], [], []))
    assert said and said.startswith("1 of 2 requests (50%)") and "bfloat16" in said
    assert "part after 30 to 30% of their length" in said
    twice = identity(Run(Path(), [summary, summary], [], []))
    assert twice and twice.startswith("2 of 4 requests (50%)"), "of all seeds"
    nothing = summary | {
        "identical_outputs": identical_outputs({"a": result(None), "b": result("x")})
    }
    assert identity(Run(Path(), [nothing], [], [])) is None, "nobody answered the same request"


@pytest.mark.nightly
@pytest.mark.usefixtures("undrawn")
def test_a_traces_requests_can_arrive_in_another_way(tmp_path: Path) -> None:
    old, out = tmp_path / "old.jsonl", tmp_path / "out"
    save_trace(old, Workload().requests(4, "poisson:50"))
    done = compare(
        "--model",
        "fake",
        "--modes",
        "dynamic",
        "--arrival",
        "burst",
        "--trace",
        str(old),
        "--out",
        str(out),
    )
    assert done.returncode == 0, done.stderr
    before, after = load_trace(old), load_trace(out / "trace.jsonl")
    assert [r.at for r in after] == [0.0] * 4 != [r.at for r in before]
    assert [r.body() for r in after] == [r.body() for r in before]


@pytest.mark.usefixtures("undrawn")
def test_conversations_give_the_same_texts_in_every_mode_and_are_replayed(tmp_path: Path) -> None:
    asked = ["--model", "fake", "--modes", "static,dynamic", "--seed", "3"]
    drawn = ["--numsamples", "8", "--lengths", "uniform:5:20", "--sessions", "3:0.05"]
    first, again = tmp_path / "first", tmp_path / "again"
    done = compare(*asked, *drawn, "--arrival", "poisson:20", "--out", str(first))
    assert done.returncode == 0, done.stderr
    said = "All 8 requests that every variant answered got the same text in each."
    assert said in " ".join(done.stdout.split())
    report = (first / "report.md").read_text()
    assert "8 requests in 3 conversations" in report and "sessions `3:0.05`" in report
    whole = json.loads((first / "dynamic.json").read_text())
    turns = whole["requests"][:3]
    trace = load_trace(first / "trace.jsonl")
    for before, later, request in zip(turns, turns[1:], trace[1:]):
        assert later["prompt_tokens"] == sum(
            (before["prompt_tokens"], before["completion_tokens"], len(str(request.prompt)))
        ), "a byte is a token: nothing of the conversation is lost, and nothing comes twice"
        assert later["scheduled_at"] == pytest.approx(before["answered_at"] + request.think_s)
    asked[asked.index("static,dynamic")] = "dynamic"
    replayed = compare(*asked, "--trace", str(first / "trace.jsonl"), "--out", str(again))
    assert replayed.returncode == 0, replayed.stderr
    texts = [
        [r["text"] for r in json.loads((out / "dynamic.json").read_text())["requests"]]
        for out in (first, again)
    ]
    assert texts[0] == texts[1]


@pytest.mark.nightly
@pytest.mark.usefixtures("undrawn")
def test_mooncakes_trace_is_replayed_and_what_is_too_long_names_the_scale(tmp_path: Path) -> None:
    trace, out = tmp_path / "mooncake.jsonl", tmp_path / "out"
    save_mooncake(trace, (0, 600, 90, [0, 1]), (90, 40_000, 9, [0, *range(2, 80)]))
    asked = ["--model", "fake", "--modes", "dynamic"]
    done = compare(*asked, "--trace", str(trace), "--scale", "16", "--out", str(out))
    assert done.returncode == 1 and "1 × 400 1250 prompt tokens" in done.stderr
    assert "a smaller --scale makes them fit" in " ".join(done.stdout.split())
    assert "scale `16`" in (out / "report.md").read_text()
    assert [len(r.prompt_ids or []) for r in load_trace(out / "trace.jsonl")] == [19, 1250]
    done = compare(*asked, "--trace", str(trace), "--scale", "8", "--out", str(out))
    assert done.returncode == 0 and "--scale makes them fit" not in done.stdout, done.stderr
