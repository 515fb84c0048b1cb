"""The comparison from end to end on the fake model leaves results behind, and no server."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from client.arguments import parse_goodput
from client.calls import ServerError, get
from client.progress import Progress
from client.results import Distribution, Result
from client.runs import SavedRun, clear
from compare.options import Options, parse
from compare.report.sentences import client_limited, littles_law
from compare.variants import Variant, parse_also
from config.settings import ConfigError
from tests.counts import nightly_but
from tests.programs import output, ran
from tests.servers import launched, server, wait_until
from tests.stub import Stub, stub

MODES = ["nobatch", "static", "windowed", "dynamic"]
SAME_TEXT = "got the same text"
FAKE = "--skip-calibration --model fake"


def compare(words: str, out: Path) -> subprocess.CompletedProcess[str]:
    return ran("compare", *shlex.split(f"{FAKE} --out {out} {words}"))


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_servers_are_ours_whatever_the_current_folder_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server.py there was imported in place of ours, and a stats.py of PYTHONPATH may not be."""
    for name in ("server.py", "stats.py"):
        (tmp_path / name).write_text("raise SystemExit('theirs')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with server("dynamic", {"model": "fake"}) as url:
        assert get(url)["mode"] == "dynamic"


def test_a_variant_has_a_model_of_its_own() -> None:
    """One model was named for all."""
    one, other = "a=dynamic --model fake --max-model-len 131072", "b=dynamic"
    options = parse(["--variant", one, "--variant", other])
    assert options.model == "fake, demo" and options.context.tokens == 1024


@pytest.mark.usefixtures("undrawn")
def test_a_comparison_writes_all_it_promises(tmp_path: Path) -> None:
    """And it shows what it waits for: it was silent for minutes in all."""
    words = f"{FAKE} --numsamples 40 --lengths choice:2,20 --max-batch-size 8 --goodput e2el:500"
    with mock.patch.object(Progress, "step", autospec=True, side_effect=Progress.step) as step:
        shown = output("compare", f"{words} --batch-size-target 2 --out {tmp_path}")
    assert SAME_TEXT not in " ".join(shown.split()), "a fake model's letters show nothing"
    steps = [call.args[1] for call in step.call_args_list]
    assert [steps.pop(0), steps.pop(0)] == ["starting dynamic", "stopping dynamic"]
    for mode in MODES:  # each is saved as it ends
        assert steps[:3] == [f"starting {mode}", f"stopping {mode}", "saving the results"]
        del steps[:3]
    assert steps == ["reading the results", "drawing figures"]
    figures = ["latency_vs_tokens", "by_group", "occupancy", "rows", "distributions"]
    wanted = {"trace.jsonl", "requests.csv", "summary.json", "report.md", "report.html"}
    wanted |= {*(f"{mode}.json" for mode in MODES), *(f"{name}.png" for name in figures)}
    assert {path.name for path in tmp_path.iterdir()} == wanted
    summary = read(tmp_path / "summary.json")
    assert list(summary["variants"]) == MODES
    assert summary["identical_outputs"] == {"requests": 40, "identical": 40, "parted_after": []}
    assert {"hardware", "commit", "date", "seed", "command", "definitions"} <= summary.keys()
    assert summary["config"]["model"] == "fake" and summary["capacity"]["output_throughput"] > 0
    rate = summary["capacity"]["output_throughput"] * 0.85 / summary["workload"]["mean_num_tokens"]
    assert summary["workload"]["arrival"] == f"poisson:{rate:.4g}"
    for mode, result in summary["variants"].items():
        assert result["completed"] == 40 and result["failed"] == 0 < result["output_throughput"]
        whole = read(tmp_path / f"{mode}.json")
        assert whole["variant"] == whole["config"]["mode"] == mode and len(whole["requests"]) == 40
        server = whole["server"]  # client and server agree on what was done
        assert whole["total_output_tokens"] == server["total_output_tokens"]
        queued = server["mean_queue_time_ms"]
        assert whole["mean_queue_time_ms"] == pytest.approx(queued, abs=0.01)
        assert whole["mean_e2el_ms"] >= server["mean_e2el_ms"]
    useful = {mode: result["useful_fraction"] for mode, result in summary["variants"].items()}
    assert useful["dynamic"] == 1.0 > useful["static"]
    expected = {mode for mode, r in summary["variants"].items() if r["expected_useful_fraction"]}
    assert expected == {"static", "windowed"}
    for name in figures:
        assert f"({name}.png)" in (tmp_path / "report.md").read_text()

    again, trace = tmp_path / "again", tmp_path / "trace.jsonl"
    words = f"{FAKE} --modes windowed --batch-size-target 2 --compact-batches"
    output("compare", f"{words} --trace {trace} --out {again}")
    assert (again / "trace.jsonl").read_text() == trace.read_text()
    replayed = read(again / "summary.json")
    assert list(replayed["variants"]) == ["windowed"] and replayed["capacity"] is None
    assert replayed["config"]["compact_batches"] is True
    assert replayed["workload"]["arrival"].startswith("as in ")
    assert replayed["variants"]["windowed"]["useful_fraction"] == 1.0
    assert replayed["variants"]["windowed"]["expected_useful_fraction"] is None
    assert texts_of(tmp_path, "windowed") == texts_of(again, "windowed")


def texts_of(folder: Path, name: str) -> list[str]:
    return [request["text"] for request in read(folder / f"{name}.json")["requests"]]


@pytest.mark.parametrize("how", nightly_but([signal.SIGINT], [signal.SIGINT, signal.SIGTERM]))
def test_an_interrupted_comparison_leaves_no_server(how: signal.Signals, tmp_path: Path) -> None:
    words = f"{FAKE} --modes nobatch,dynamic --arrival burst --lengths fixed:200 --numsamples 200"
    words += f" --out {tmp_path}"
    with launched(sys.executable, "-m", "tests.programs", "compare", *words.split()) as process:
        # in the middle of the replay
        wait_until(lambda: completed_by_a_server_of(process.pid) > 10, every_s=0.2)
        servers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(how)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in output
    assert "what was measured is kept" in output
    assert servers and are_gone(servers)
    kept = read(tmp_path / "nobatch.json")
    assert kept["partial"] and 0 < kept["completed"] < 200
    assert kept["failed"] == 0, "what is in flight has not failed"
    report = (tmp_path / "report.md").read_text()
    assert "| nobatch (partial) |" in report and "**Partial**" in report


def are_gone(processes: list[psutil.Process]) -> bool:
    """None runs; a zombie waits for who started the one that was killed."""
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.status() != psutil.STATUS_ZOMBIE:
                return False
    return True


def completed_by_a_server_of(pid: int) -> int:
    """Requests that the first server started by `pid` has completed so far."""
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(ServerError, psutil.NoSuchProcess):  # it may end meanwhile
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    url = f"http://127.0.0.1:{connection.laddr.port}"
                    return int(get(f"{url}/stats")["completed"])
    return 0


def test_a_server_that_does_not_come_up_is_shown_with_what_it_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 300}))
    words = f"--model {tmp_path} --tokenizer bytes --modes dynamic --arrival burst"
    done = compare(words, tmp_path / "out")
    assert done.returncode == 1 and "exit code 2" in done.stderr
    assert "model.safetensors does not exist" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists(), "a folder was left with nothing in it"


@pytest.mark.parametrize(("words", "sentence"), [
    ("--modes static,dynamo", r"unknown mode 'dynamo' \(did you mean dynamic"),
    ("--modes static,static", "names a mode twice"),
    ("--numsample 3", r"unknown flag --numsample \(did you mean --numsamples\?\)"),
    ("--numsamples 0", "at least 1"),
    ("--modes nobatch,dynamic --batch-size-target 4",
     "no meaning in any of the modes nobatch, dynamic"),
    ("--port 8500", "every variant gets a free port"),
    ("--max-batch-size none", "--max-batch-size 'none'"),
    ("--goodput ttft:100 tpot:9 ttft:200", "--goodput names ttft twice; leave one of them out"),
    *((f"--goodput {limit}", "give ttft:MS, tpot:MS or e2el:MS")
      for limit in ("ttft", "e2el:-1", "e2el:inf")),
    *((f"--trace t.jsonl {own}", "draw traces of their own")
      for own in ("--sweep", "--repeats 2")),
    ("--trace t.jsonl --sessions 2:1", "leave out --sessions"),
    ("--time-unit ms", "add --trace FILE"),
    ("--trace t.jsonl --scale-tokens 0", "must be a number from 0.0001"),
    ("--sessions 2:1", "--sessions needs an --arrival"),
    ("--sessions 2:1 --sweep", "as turns of --sessions do; leave out"),
    *((f"--users a,2,normal b,2,normal,0-9 {own}", sentence) for own, sentence in (
        ("--arrival auto", "leave out --arrival"),
        ("--lengths normal --sessions 2:1", "leave out --lengths, --sessions"),
        ("--numsamples 9", "leave out these seconds or --numsamples"),
        ("--sweep", "--sweep sends at rates of its own, and --users have theirs"),
        ("--trace t.jsonl", "--trace holds the requests; leave out --users"),
    )),
    ("--seconds 3", "add --sweep"),
    ("--sweep --max-seconds 9", "apply to one replay of each variant; leave them out"),
    ("--max-seconds 0", "--max-seconds must be a number of seconds above 0"),
    *((f"--{bound} 0", f"--{bound} must be at least 1") for bound in ("max-failures", "warm-up")),
    ("--sweep --seconds 0", "--seconds must be a number of seconds above 0"),
    *((f"--price {price}", "--price must be what a machine costs an hour")
      for price in ("0", "nan")),
    ("--repeats 0", "--repeats must be at least 1"),
    ("--seed -1", "--seed must be 0 or more"),
    ("--api-keys a:b", "--api-keys names several users, and this client"),
    *((f"--also {other}", "give NAME=URL")
      for other in ("vllm", "vllm=localhost:8000", "../x=http://h")),
    *((f"--also {name}=http://h", "choose another name") for name in ("static", "summary")),
    ("--variant base=dynamic --modes static", "--modes and --variant both say"),
    *((f"--variant {wrong}", "give NAME='MODE --setting …'")
      for wrong in ("dynamic", "a=", "'a b=dynamic'")),
    ("--variant a=dynamo", r"variant a: unknown mode 'dynamo' \(did you mean dynamic"),
    ("--variant a='dynamic --batch-size-target 4'", "target has no meaning in mode dynamic"),
    ("--variant a='dynamic --nope 4'", "unknown flag --nope"),
    ("""--variant "a=dynamic 'x" """, "No closing quotation"),
    ("--variant a='dynamic --port 1'", "every variant gets a free port"),
    ("--variant a='dynamic --seed 1'", "unknown flag --seed"),
    ("--variant a='dynamic --shed'", "no request has one; add --slo-mix"),
    ("--adapters 4:uniform", "a server lacks; add --lora-random N:RANK"),
    ("--variant static=dynamic", "static is taken"),
    ("--variant base=dynamic --variant base=dynamic", "base is taken"),
    ("--variant base=dynamic --also base=http://h", "base is taken"),
    # on macOS and Windows NAME.json of names that differ by case alone is one file
    *((words, "is taken") for words in (
        "--variant a=dynamic --variant A=static", "--variant Summary=dynamic",
        "--variant a=dynamic --also A=http://h", "--also Static=http://h",
        "--modes static,mine.py:Static", "--modes a.py:Gate,b.py:Gate",
    )),
    *((words, "is a missing value to pandas.read_csv") for words in (  # of requests.csv
        "--variant NA=dynamic", "--also null=http://h", "--modes dynamic,mine.py:None",
    )),
    ("--variant base=dynamic --baseline other", "'other' is not compared; name one of base"),
    (" ".join(f"--variant v{i}=dynamic" for i in range(13)), "a figure shows at most 12"),
])  # fmt: skip
def test_a_bad_command_line_is_answered_before_any_server_starts(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse(shlex.split(words))


@pytest.mark.parametrize("words", ["--lengths zipf", "--arrival soon", "--trace absent.jsonl"])
def test_a_bad_workload_is_refused_before_any_server_starts(words: str, tmp_path: Path) -> None:
    done = compare(words, tmp_path / "out")
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_other_servers_are_named_with_their_url() -> None:
    urls = {"vllm-0.9": "http://h:8000", "b": "https://h"}
    assert parse_also(["vllm-0.9=http://h:8000/v1/", "b=https://h"]) == urls
    assert parse(["--sweep"]).goodput == {"e2el": 2000.0} and parse([]).goodput == {}
    twice = parse(shlex.split("--goodput ttft:9 --goodput tpot:8"))
    assert twice.goodput == {"ttft": 9.0, "tpot": 8.0}, "the second list once replaced the first"
    assert parse_goodput(["ttft:200", "e2el:1e3"]) == {"ttft": 200.0, "e2el": 1000.0}


@pytest.mark.usefixtures("undrawn")
def test_a_server_that_is_none_of_ours_stands_beside_a_mode(tmp_path: Path) -> None:
    with stub(gap_s=0.001) as other:
        words = f"{FAKE} --modes dynamic --also stub={other.url} --numsamples 20 --lengths fixed:4"
        output("compare", f"{words} --arrival closed:3 --prompts ids --stream --out {tmp_path}")
    assert all(isinstance(body["prompt"], list) for body in other.bodies), "it may read ids alone"
    assert other.most_in_flight <= 3 and {body["max_tokens"] for body in other.bodies[2:]} == {4}
    variants = read(tmp_path / "summary.json")["variants"]
    ours, others = variants["dynamic"], variants["stub"]
    assert ours["completed"] == others["completed"] == 20
    assert ours["occupancy"] > 0 and others["occupancy"] is None
    report = (tmp_path / "report.md").read_text()
    assert "| stub | " in report and "measured on streamed answers" in report
    assert "its engine and hardware are not known" in report
    assert "got the same text" not in report, "another server may run another model"


@pytest.mark.usefixtures("undrawn")
def test_a_server_that_fails_later_leaves_what_was_measured_before(tmp_path: Path) -> None:
    words = "--modes dynamic --numsamples 5 --lengths fixed:2000 --arrival burst --overwrite"
    for folder in (tmp_path / "new", tmp_path):  # found before anything was measured
        (tmp_path / "trace.jsonl").write_text("of an earlier run")
        done = compare(f"{words} --also gone=http://127.0.0.1:9", folder)
        assert done.returncode == 1 and "error: no answer from http://127.0.0.1:9" in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]

    class Dying(Stub):
        """Lists its model once, and is gone when its turn comes."""

        def shutdown_request(self, request: Any) -> None:
            super().shutdown_request(request)
            self.models = ()

    with stub(Dying) as other:
        done = compare(f"{words} --also dying={other.url}", tmp_path)
    assert done.returncode == 1 and "lists no model" in done.stderr
    report = (tmp_path / "report.md").read_text()
    assert "**Partial**" in report and "lists no model" in report and "dying is missing" in report
    for text in (done.stderr, report):
        assert "Failed in dynamic" in text and " × 400: " in text
        assert "beyond the context of 1024" in text


def test_an_earlier_run_makes_room_and_nothing_else_is_touched(tmp_path: Path) -> None:
    (tmp_path / "seed-3").mkdir()
    kept = ["notes.txt", "seed-3/mine.txt"]
    for path in (*kept, "report.html", "seed-3/summary.json", "seed-3/old.json.gz"):
        (tmp_path / path).write_text('{"variants": {"old": {}}}')
    clear(tmp_path)
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")]
    assert sorted(left) == kept


def test_servers_whose_requests_were_late_are_named() -> None:
    late = Result(client_limited=True, e2el_from_schedule=Distribution(p99=1234.0))
    variants = {"a": late, "b": replace(late, client_limited=False)}
    said = client_limited(SavedRun(Path(), [{"variants": variants, "also": {}}], [], []))
    assert said and said.endswith("by p99 latency from the schedule: a (1.23 s).")


@pytest.mark.parametrize(("mean_s", "factor", "completed", "said"), [
    (0.5, 1.11, 19, "None"),
    (0.5, 1.11, 300, r"\*\*Little's law failed\*\* in a-b: .* off by \+11\.0% at most \(a-b\)"),
    (0.5, 0.91, 300, r"Little's law: passed\. .* off by −9\.0% at most \(a-b\)"),
    (0.02, 1.3, 300, r"Little's law: passed\."),  # 6 ms: of HTTP, and by chance
])  # fmt: skip
def test_littles_law_passes_or_fails(
    mean_s: float, factor: float, completed: int, said: str
) -> None:
    """Of 11% a report said nothing but the number."""
    law = {"in_flight": factor * 10 * mean_s, "rate_x_latency": 10 * mean_s}
    result = Result(littles_law=law, completed=completed, request_throughput=10.0)
    run = SavedRun(Path(), [{"variants": {"a-b": result}, "also": {}}], [], [])
    assert re.match(said, str(littles_law(run)))


# ---- variants: modes with settings of their own, under names, against a baseline


def parsed(words: str) -> Options:
    return parse(shlex.split(words))


def test_a_variants_own_settings_win_over_those_of_all() -> None:
    words = "--variant base=dynamic --variant small='dynamic --token-budget 32' --variant slow="
    words += "'windowed --max-batch-delay-ms 50' --model fake --token-budget 64 --compact-batches"
    options = parsed(words)
    assert options.names == ["base", "small", "slow"]
    assert options.baseline == "base" == options.reference
    assert [options.config(name).token_budget for name in options.names] == [64, 32, 64]
    slow = options.config("slow")
    assert slow.max_batch_delay_ms == 50 and slow.compact_batches
    assert options.variants["small"] == Variant("dynamic", {"token_budget": "32"})


def test_a_variants_setting_may_need_one_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of lab/proposals/README.md was refused: a variant was judged by itself."""
    words = "--variant other='dynamic --victim most_computed'"
    assert parsed(f"--kv-reservation demand {words}").config("other").victim == "most_computed"
    monkeypatch.setenv("EB_KV_RESERVATION", "demand")
    assert parsed(words).config("other").victim == "most_computed"


@pytest.mark.parametrize(("words", "reference"), [
    ("", "dynamic"),
    ("--modes static,dynamic", "dynamic"),
    ("--modes static,windowed --baseline windowed", "windowed"),
    ("--variant a='dynamic --token-budget 32' --variant b=dynamic", "b"),
    ("--variant a='dynamic --token-budget 32'", "a"),
    ("--modes static --also vllm=http://h --baseline vllm", "static"),
])  # fmt: skip
def test_auto_arrivals_go_by_plain_dynamic_or_the_baseline(words: str, reference: str) -> None:
    assert parsed(words).reference == reference


@pytest.mark.usefixtures("undrawn")
def test_variants_of_a_mode_stand_side_by_side(tmp_path: Path) -> None:
    words = "--model fake --numsamples 30 --lengths choice:3,9 --repeats 2 --arrival burst "
    words += "--variant wide='dynamic --max-batch-size 8' --variant static=static "
    words += f"--variant narrow='dynamic --max-batch-size 2' --baseline narrow --out {tmp_path}"
    output("simulate", words)
    first, names = tmp_path / "seed-0", ["wide", "static", "narrow"]
    assert {path.stem for path in first.glob("*.json")} == {*names, "summary"}
    wide, _, narrow = (read(first / f"{name}.json") for name in names)
    assert narrow["variant"] == "narrow" and narrow["config"]["mode"] == "dynamic"
    assert narrow["config"]["max_batch_size"] == narrow["largest_batch"] == 2
    assert wide["largest_batch"] > 2
    assert list(read(first / "summary.json")["variants"]) == names
    report = (tmp_path / "report.md").read_text()
    assert "| wide − narrow |" in report and "| static − narrow |" in report
    assert "| static − wide |" not in report
    assert "- narrow: dynamic, max_batch_size 2" in report
    assert "max_batch_size" not in report.split("settings: ")[1].split("\n")[0]
