"""./simulate.sh: what it writes and prints, and errors in a sentence."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_rgba
from matplotlib.patches import StepPatch

from client import outcomes, runs, traces
from client.drawing import STYLES
from client.machine import cpu
from client.outcomes import Outcome
from client.progress import Replayed
from client.traces import Request
from compare.report import report, side_by_side
from config.config import Config
from config.settings import NOT_SIMULATED, ConfigError
from generate.auto import build
from scheduling.policies import MODES, ORDERS
from simulate import jobs
from simulate.costs import FAKE, load, save
from simulate.program import parse
from simulate.server import SimulatedServer
from simulate.simulation import ENGINE
from tests.programs import empty_figures, output, ran

SMALL = "--numsamples 40 --lengths uniform:1:40 --modes static,dynamic"
ONE = Request(id=0, at=0.0, prompt_ids=[1] * 10, num_tokens=10)
pytestmark = pytest.mark.usefixtures("undrawn")


def simulate(out: Path, words: str) -> subprocess.CompletedProcess[str]:
    return ran("simulate", *shlex.split(words), "--out", str(out))


def saved(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "summary.json").read_text()))


def test_every_setting_is_honoured_or_refused() -> None:
    """One that is added is named in one of these: read here, the engine's, or refused."""
    read: set[str] = set()

    class Read(Config):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    honoured: set[str] = set()
    for mode in MODES:
        given: dict[str, Any] = {"model": "demo", "kv_cache": "1GB", "request_timeout_s": 9}
        given |= {"mode": mode, "lora_random": "1:1"}
        if mode == "dynamic":
            given |= {"kv_reservation": "demand"}
        for order in ORDERS:
            config = Read(order=order, **given)
            read.clear()  # all that was validated
            SimulatedServer("", config, FAKE).replay([ONE])
            honoured |= read & Config.model_fields.keys()
    assert honoured & NOT_SIMULATED == set()
    undecided = Config.model_fields.keys() - honoured - {*ENGINE} - NOT_SIMULATED
    assert {*ENGINE, *NOT_SIMULATED} <= Config.model_fields.keys()
    assert undecided == set(), "read it, or name it in ENGINE or NOT_SIMULATED"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Costs that were fitted on a processor that does not exist."""
    path = tmp_path_factory.mktemp("costs") / "abacus.json"
    config = build("dynamic", {"model": "demo", "device": "cpu"}, {}).model_dump(mode="json")
    source = {"hardware": {"cpu": "Abacus 3000"}, "commit": "0123456789", "date": "2026-01-02T03"}
    save(replace(FAKE, name="abacus", gap=10**9, source={**source, "config": config}), path)
    return path


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory, elsewhere: Path) -> Path:
    """A run by these costs, with a sweep, as ./simulate.sh leaves it."""
    out = tmp_path_factory.mktemp("runs") / "simulated"
    with empty_figures():
        words = f"{SMALL} --max-batch-size 4 --arrival poisson:50 --sweep --seconds 0.5"
        shown = output("simulate", f"{words} --costs {elsewhere} --out {out}")
    assert "variant" in shown and "(simulated)" in shown and "Little's law: " in shown
    return out


def test_all_that_is_written_says_that_nothing_was_measured(simulated: Path) -> None:
    """Sentences, tables, captions; and whose costs they were."""
    simulated_by = saved(simulated)["simulated"]
    assert simulated_by["costs"] == "abacus" and simulated_by["hardware"] == {"cpu": "Abacus 3000"}
    assert simulated_by["commit"] == "0123456789" and simulated_by["engine"]["model"] == "demo"
    text = (simulated / "report.md").read_text()
    assert text.startswith("# static, dynamic on demo (simulated)\n\n| variant (simulated) |")
    assert "what the costs `abacus` say, fitted on Abacus 3000, 1 thread (commit 0123456789" in text
    assert "- simulated on: " in text and "Servers ran one after another" not in text
    [settings] = re.findall("- settings: (.*)", text)
    assert NOT_SIMULATED.isdisjoint(settings.replace(",", "").split())
    page = (simulated / "report.html").read_text()
    assert "<title>static, dynamic on demo (simulated)</title>" in page and "no server ran" in page
    drawn = report.drawings(runs.load(simulated))
    assert drawn.keys() == runs.FIGURES.keys() - {"replicas"}, "there was one, all the time"
    for name, draw in drawn.items():
        assert "simulated, costs abacus" in (caption := draw().get_suptitle()), name
        assert cpu() not in caption, "nothing was measured there"


def test_all_that_is_written_says_that_costs_are_an_estimate(tmp_path: Path) -> None:
    named = "roofline:h100,gpt2,bfloat16"
    output("simulate", f"{SMALL} --arrival poisson:50 --costs {named} --out {tmp_path}")
    facts, text = saved(tmp_path)["simulated"], (tmp_path / "report.md").read_text()
    assert facts["costs"] == f"{named} (an estimate: times 0.78 to 1.40)"
    assert load(facts["costs"]) == load(named)
    assert load(named).uncertainty == pytest.approx(0.19, abs=0.01)
    assert "| variant (simulated, estimated) |" in text
    assert "no machine was measured, and these are 70% (from 50% to 90%) of 3,350 GB/s" in text
    drawn = report.drawings(runs.load(tmp_path)).values()
    captions = [" ".join(draw().get_suptitle().split()) for draw in drawn]  # which wrap
    assert all(facts["costs"] in caption for caption in captions)


def test_a_figure_shows_how_many_replicas_there_were(tmp_path: Path) -> None:
    """One fewer until the failed one is replaced; and of a failure that ended no request."""
    words = "--modes nobatch,dynamic --numsamples 600 --arrival poisson:150 --replicas 4 "
    words += f"--fail 1:0.001 3:1000 --start-s 1 --out {tmp_path}"  # the first when it is idle
    output("simulate", words)
    said = "In dynamic the failure of replica 3 at 1000 s ended no request: it was not up"
    assert said in (tmp_path / "report.md").read_text()
    drawn = report.drawings(run := runs.load(tmp_path))
    panels = drawn["replicas"]().axes
    assert [axes.get_title(loc="left") for axes in panels] == ["nobatch (overloaded)", "dynamic"]
    assert panels[0].patches[0].get_facecolor() == to_rgba(STYLES[0].colour), "as in all figures"
    rows = drawn["occupancy"]().axes[0].get_ylim()[1]
    assert rows == 4 * run.first["config"]["max_batch_size"], "those of all replicas"
    for axes in panels:
        every, up = (patch for patch in axes.patches if isinstance(patch, StepPatch))
        assert max(up.get_data()[0]) == 4 <= max(every.get_data()[0]), axes.get_title()


def test_measured_beside_simulated_runs(simulated: Path, elsewhere: Path, tmp_path: Path) -> None:
    measured, again, others = (tmp_path / name for name in ("measured", "again", "others"))
    alike = f"--trace {simulated}/trace.jsonl --modes dynamic --max-batch-size 4 --out"
    output("compare", f"{alike} {measured} --model fake --skip-calibration")
    output("simulate", f"{alike} {again}")
    output("simulate", f"{alike} {others} --costs {elsewhere}")
    side_by_side.compare_runs([runs.load(measured), runs.load(again)], out := tmp_path / "both")
    text = (out / "report.md").read_text()
    assert "All replayed the same traces" in text and "another machine's costs" not in text
    assert text.count("not streamed.") == 2, "no batch is answered as a whole"
    assert "| dynamic | measured |" in text and "| dynamic | again (simulated) |" in text
    side_by_side.compare_runs([runs.load(measured), runs.load(others)], out)
    assert "**others (simulated) has another machine's costs**" in (out / "report.md").read_text()
    first, second = (json.loads((run / "dynamic.json").read_text()) for run in (measured, again))
    for key in ("completed", "failed", "total_input_tokens", "total_output_tokens"):
        assert first[key] == second[key], key


def test_the_table_comes_before_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came after the figures were drawn, which takes up to 18 seconds."""
    monkeypatch.setattr(report, "write", lambda run, svg: print("the figures"))
    shown = output("simulate", f"{SMALL} --arrival poisson:50 --out {tmp_path}")
    assert shown.index("p50") < shown.index("One seed:") < shown.index("the figures")


def test_ctrl_c_keeps_what_is_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C when the second mode has answered five."""
    ended = Replayed.ended

    def interrupt(self: Replayed, outcome: Outcome) -> None:
        ended(self, outcome)
        if str(self).startswith("dynamic 5/"):
            raise KeyboardInterrupt

    monkeypatch.setattr(Replayed, "ended", interrupt)
    done = simulate(tmp_path, f"{SMALL} --arrival poisson:50")
    kept = f"interrupted; what was simulated is kept; --resume {tmp_path} goes on\n"
    assert (done.returncode, done.stderr) == (130, kept)
    summary, kept = saved(tmp_path), json.loads((tmp_path / "dynamic.json").read_text())
    assert summary["partial"] and not summary["variants"]["static"]["partial"]
    assert kept["partial"] and (kept["completed"], len(kept["requests"])) == (5, 5)
    assert kept["littles_law"] is None and kept["server"]["completed"] == 5


def test_ctrl_c_keeps_what_processes_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, interrupted = jobs.Jobs._show, False

    def interrupt(self: jobs.Jobs) -> None:
        nonlocal interrupted
        shown(self)
        assert self._progress is not None
        if not interrupted and any(" in flight" in str(x) for x in self._progress.lines.values()):
            interrupted = True
            raise KeyboardInterrupt

    monkeypatch.setattr(jobs.Jobs, "_show", interrupt)
    done = simulate(tmp_path, f"{SMALL} --arrival poisson:50 --numsamples 50000 --jobs 2")
    kept = f"interrupted; what was simulated is kept; --resume {tmp_path} goes on\n"
    assert (done.returncode, done.stderr) == (130, kept)
    for name, result in saved(tmp_path)["variants"].items():
        assert result["partial"] and result["completed"] < 50_000, name


def test_any_number_of_processes_writes_the_same(tmp_path: Path) -> None:
    written = []
    for n in "12":
        out = tmp_path / n
        words = f"{SMALL} --max-batch-size 4 --arrival poisson:50 --sweep --seconds 0.1 --repeats 2"
        shown = output("simulate", f"{words} --jobs {n} --out {out}")
        facts = re.compile(
            rf"{re.escape(str(out))}|--jobs {n}|busy_before_percent.*|20\d\d-\d\d-\d\d[T ][\d:+]+"
        )
        files = {str(file.relative_to(out)): file for file in out.rglob("*") if file.is_file()}
        texts = {name: facts.sub("", file.read_text()) for name, file in files.items()}
        written.append(texts | {"": facts.sub("", shown)})
    assert written[0] == written[1] and "seed-1/dynamic.json" in written[0]


def test_of_a_large_run_a_sample_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"{SMALL} --arrival poisson:60 --max-batch-size 1 --out {tmp_path}"
    output("simulate", f"{words}/whole")
    monkeypatch.setattr(traces, "MOST_SAVED", 39)
    monkeypatch.setattr(outcomes, "SAMPLE", 10)
    shown = " ".join(output("simulate", f"{words}/sampled").split())
    assert "a sample of 10 requests, the same in each variant" in shown
    whole, sampled, static = (
        json.loads((tmp_path / name).read_text())
        for name in ("whole/dynamic.json", "sampled/dynamic.json", "sampled/static.json")
    )
    ids = [request["id"] for request in sampled["requests"]]
    assert sampled["sample"] == len(ids) == 10 and ids == sorted(ids)
    assert all(request in whole["requests"] for request in sampled["requests"])
    assert [request["id"] for request in static["requests"]] == ids
    apart = {name for name in whole if whole[name] != sampled[name] and name[-7:] != "_itl_ms"}
    assert apart <= {"sample", "requests", "busy_throughput"}
    assert sampled["busy_throughput"] == pytest.approx(whole["busy_throughput"], rel=0.05)
    assert not (tmp_path / "sampled/trace.jsonl").exists()
    done = simulate(tmp_path / "again", f"--trace {tmp_path}/sampled/trace.jsonl")
    assert done.returncode == 2 and "is not saved: give the workload's own options" in done.stderr


SPLIT = "--prefill-replicas 2 --decode-replicas 2 --kv-gbps"
FIND = "--find replicas --slo ttft:9"
WITH_RATE = f"{FIND} --modes nobatch --model fake --arrival poisson:15"


REFUSED = [
    ("--costs abacus", "no costs 'abacus'; name one of results/costs"),
    ("--costs roofline:b300,gpt2,bfloat16", "of h100, h200, .* or cpu:GBPS:GFLOPS"),
    ("--costs roofline:cpu:0:1,gpt2,bfloat16", "names no estimate; write roofline:DEVICE"),
    ("--costs roofline:h100,fake,bfloat16", "a model of demo, .*gpt2-xl, and float32 or bf"),
    ("--dtype float32", "--dtype float32: the costs fake do not depend on --dtype"),
    ("--fake-slowdown 4 --costs fake-server", "fake-server do not depend on --fake-slowdown"),
    ("--model demo", "--model demo: the costs fake hold for --model fake; leave"),
    ("--variant 'a=dynamic --threads 2'", "--threads 2: the costs fake do not depend"),
    ("--port 8501", "--port applies to running servers, and none is started here; leave it"),
    ("--also=a=http://h", "--also applies to running servers.*measure with ./compare.sh"),
    ("--kv-cache 4GB", "--kv-cache 4GB: the model fake does not say how large keys and values are"),
    ("--costs roofline:h100,gpt2,bfloat16 --kv-cache 50%", "50% is a share of a GPU's memory, and"),
    ("--request-log f", "--request-log has no effect in virtual time; leave it out"),
    ("--modes dynamo", r"unknown mode 'dynamo' \(did you mean dynamic\?\)"),
    ("--streamm", r"unknown flag --streamm \(did you mean --stream\?\)"),
    ("--slow 1:x --replicas 2", "--slow '1:x': give a replica and a number above 0"),
    ("--slow 2:2 --replicas 2", "no replica 2"),
    ("--replicas 0", "at least 1"),
    ("--replicas 2 --router best", "best"),
    ("--start-s -1", "--start-s must be a number of seconds from 0 on"),
    ("--start-s 5 --replicas 2", "--start-s has no meaning without a failure; add --fail K:AT"),
    ("--counts-own", "add --stale-s"),
    ("--router prefix --replicas 2", "prefix.*add --prefix-caching"),
    ("--router random", "add --replicas"),
    ("--prefill-replicas 2 --kv-gbps 25", "belong together, and are above 0, as in --prefill"),
    (f"{SPLIT} 0", "belong together"),
    (f"{SPLIT} 25 --start-s 4", "leave out --replicas, --fail"),
    (f"{SPLIT} 25 --prefix-caching", "--prefix-caching is not simulated with disaggregated"),
    ("--replay=calls.jsonl --stream", "leave out all other flags"),
    ("--slo ttft:9", "--slo belongs to --find; add it"),
    ("--verify 2", "--verify belongs to --find; add it"),
    ("--find --arrival poisson:15", "--slo ttft:200"),
    (FIND, "--arrival poisson:200"),
    (f"{FIND} --arrival poisson:x", "unknown arrival 'poisson:x'"),
    (f"{FIND} --trace nowhere --arrival burst", "needs the rate"),
    (f"{FIND} --trace nowhere", "cannot read the trace nowhere.*check the path"),
    (f"{WITH_RATE} --replicas 3", "leave out --replicas, or write --find replicas=N"),
    (f"{WITH_RATE} --attainment 99", "1 at most"),
    (f"{WITH_RATE} --slo tokens:9", "--slo 'tokens:9': give ttft:MS"),
    (f"{WITH_RATE} --slo e2el:p98:9", "e2el:p99:MS for a statistic of all"),
    (f"{WITH_RATE} --for speed", "--for speed: name one of goodput, "),
    (f"{WITH_RATE} --verify 0", "--verify must be at least 1"),
    (f"{WITH_RATE} --verify 1 --costs second", "--verify needs costs of an engine that is here"),
    (f"{WITH_RATE} --find replicas=0", "replicas are numbers from 1 on"),
    (f"{WITH_RATE} --find rows=4,8", "--find rows=4,8: there is no setting rows; docs/settings"),
    (f"{WITH_RATE} --find order=fcfs,best", "--find: --order 'best'"),
    (f"{WITH_RATE} --find prefill", "say which values to try, as in --find prefill=A,B"),
    ("--step", "unknown flag --step"),
    ("--jobs 0", "--jobs must be at least 1"),
    ("--vllm tests/simulate/own_vllm.jsonl.gz --warm-up 1000000", "--warm-up 1000000 leaves none"),
]


@pytest.mark.parametrize(("argv", "reason"), REFUSED)
def test_a_bad_command_line_ends_with_a_sentence(argv: str, reason: str, tmp_path: Path) -> None:
    done = simulate(tmp_path / "out", argv)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stdout == ""
    assert re.search(reason, done.stderr) and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_trace_beyond_the_context_ends_with_a_sentence(tmp_path: Path) -> None:
    """Drawn lengths are cut, but what all prompts share is not."""
    words = f"{SMALL} --max-model-len 64 --arrival burst"
    assert "cut: 25 of 40 completions at the context of 64" in simulate(tmp_path, words).stdout
    runs.clear(tmp_path)
    done = simulate(tmp_path, f"{words} --prefixes 1:64:0")
    said = (
        "served: 65 prompt tokens + 1 completion tokens is beyond the context of 64. Give shorter"
    )
    assert done.returncode == 2 and said in done.stderr and not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize(("costs", "model", "longest"), [
    ("fake", "fake", 131_072),
    ("second", "fake", 131_072),
    ("FILE", "fake", 131_072),
    ("roofline:h100,gpt2,bfloat16", "gpt2", 1_024),
])  # fmt: skip
def test_a_variant_is_as_long_as_the_model_of_its_costs(
    costs: str, model: str, longest: int, tmp_path: Path
) -> None:
    """It was checked as demo, whose context is shorter; a file may name no model."""
    save(FAKE, tmp_path / "mine.json")
    words = ["--costs", costs.replace("FILE", str(tmp_path / "mine.json")), "--variant"]
    config = parse([*words, f"x=dynamic --max-model-len {longest}"]).config("x")
    assert (config.model, config.max_model_len) == (model, longest)
    with pytest.raises(ConfigError, match=f"variant x: max_model_len .* positions of {model};"):
        parse([*words, f"x=dynamic --max-model-len {2**20 + 1 if longest > 1024 else 1025}"])


def test_the_environment_changes_no_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, settings may be of real servers; those of the scheduler are of both."""
    plain = parse([]).config("dynamic")
    others = {"model": "demo", "dtype": "bfloat16", "threads": "7", "generator": "naive",
              "kv_dtype": "int8", "device": "cuda", "attention": "plain"}  # fmt: skip
    for name, value in others.items():
        monkeypatch.setenv(f"EB_{name.upper()}", value)
    assert parse([]).config("dynamic") == plain
    monkeypatch.setenv("EB_REQUEST_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("EB_HEADER_TIMEOUT_S", "0.001")
    monkeypatch.setenv("EB_MAX_BATCH_SIZE", "2")
    config = parse([]).config("dynamic")
    assert config.max_batch_size == 2
    SimulatedServer("", config, FAKE).replay([ONE])
    assert not (tmp_path / "log").exists()
    monkeypatch.setenv("EB_MAX_BATCHSIZE", "2")
    with pytest.raises(ConfigError, match="unknown variable EB_MAX_BATCHSIZE"):
        parse([])
