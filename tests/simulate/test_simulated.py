"""Traces in virtual time: numbers that a hand confirms, the same ones each time, and errors in a
sentence.

The fake engine takes 1 ms an iteration, 0.06 ms a row and 0.01 ms a prompt token. So a request
that is alone, of p prompt tokens and n completion tokens, takes n · 1.06 + 0.01 p milliseconds.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.patches import StepPatch
from rich.console import Console

from client import outcomes, results, runs, traces
from client.draws import WorkloadError
from client.load import Watch
from client.machine import cpu
from client.measure import measure, with_requests
from client.outcomes import Outcome
from client.progress import Progress, Replayed
from client.traces import Request
from client.workloads import Workload
from compare.report import replicas, report, side_by_side, tables
from config import NOT_SIMULATED, Config, ConfigError, build
from scheduling.policies import MODES, ORDERS
from simulate import PS, jobs
from simulate.costs import FAKE, Costs, load, save
from simulate.run import SimulatedServer
from simulate.simulation import ENGINE, Simulating, parse
from tests.conftest import undraw
from tests.programs import output, ran

MS = PS // 1000
ms = 1e-3


def served(
    requests: Sequence[Request], mode: str = "nobatch", costs: Costs = FAKE, stream: bool = False,
    jump: bool = True, **settings: Any,
) -> tuple[dict[str, Any], list[Outcome]]:  # fmt: skip
    config = build(mode, {"model": "fake", "device": "cpu", **settings}, {})
    target = SimulatedServer(mode, config, costs, stream=stream, jump=jump)
    return measure(target, requests, {}, 3600.0, Watch())


def ask(i: int, at: float = 0.0, tokens: int = 10, **fields: Any) -> Request:
    """A prompt of ten ids: alone it takes 10.7 ms for ten tokens."""
    return Request(id=i, at=at, prompt_ids=[1 + i] * 10, num_tokens=tokens, **fields)


def latencies(outcomes: Sequence[Outcome]) -> list[float]:
    return [round(outcome.ended_at - outcome.sent_at, 9) for outcome in outcomes]


def test_a_request_alone_takes_what_its_iterations_take() -> None:
    result, outcomes = served(Workload("fixed:10", prompts="ids").requests(30, "constant:50"))
    for outcome in outcomes:
        answer = outcome.answer
        assert answer
        first = (1.06 + answer.prompt_tokens * 0.01) * ms
        assert [answer.ttft_s, answer.e2e_s] == pytest.approx([first, first + 9 * 1.06 * ms])
        assert list(answer.itl_s) == pytest.approx([1.06 * ms] * 9)
        assert (
            answer.sent_at == answer.scheduled_at
            and answer.timings
            and answer.timings["queue_s"] == 0
        )
    assert result["mean_tpot_ms"] == pytest.approx(1.06)
    assert result["largest_batch"] == 1 and result["occupancy"] == pytest.approx(1 / 32)
    assert result["live_rows"] == 300
    assert result["server"]["busy_s"] == pytest.approx(sum(latencies(outcomes)))


@pytest.mark.parametrize(("rate", "useful"), [("1", 1.0), ("0", 400 / (1 + 397 * 3 + 2 + 1))])
def test_draft_tokens_are_useful_as_often_as_they_are_accepted(rate: str, useful: float) -> None:
    """Before the last two tokens there are fewer: one, and none."""
    draft = f"acceptance:{rate}"
    result, _ = served([ask(0, tokens=400)], "dynamic", speculate=2, draft=draft)
    assert result["acceptance"] == float(rate) and result["live_rows"] == 400
    assert result["useful_fraction"] == pytest.approx(useful)
    assert result["occupancy"] == pytest.approx(1 / 32)
    shown, without = results.keys("acceptance"), served([ask(0)])[0]
    assert tables.present(shown, [{"dynamic": [result]}]) == shown
    assert tables.present(shown, [{"dynamic": [without]}]) == []


def test_a_queue_of_requests_one_at_a_time_is_lindleys() -> None:
    """Each waits for what is left of all before it."""
    result, outcomes = served(Workload("normal", prompts="ids").requests(200, "poisson:10"))
    free_at = 0.0
    for outcome in outcomes:
        answer, begins = outcome.answer, max(free_at, outcome.sent_at)
        assert answer and answer.timings
        assert answer.timings["queue_s"] == pytest.approx(begins - outcome.sent_at, abs=1e-6)
        free_at = begins + (1.06 * answer.completion_tokens + 0.01 * answer.prompt_tokens) * ms
        assert outcome.ended_at == pytest.approx(free_at)
    assert result["wall_clock_s"] == pytest.approx(free_at) and result["p99_queue_time_ms"] > 100
    law = result["littles_law"]
    assert law["in_flight"] == pytest.approx(law["rate_x_latency"], rel=0.05)


def test_costs_around_iterations_are_seen_where_they_arise() -> None:
    """5 ms to the server, 7 back, 2 before each iteration: the server sees these last alone."""
    around = Costs("around", FAKE.line, gap=2 * MS, request=5 * MS, answer=7 * MS)
    result, [outcome, late] = served([ask(0), ask(1, at=1.0)], costs=around)
    assert latencies([outcome, late]) == [pytest.approx((10.7 + 10 * 2 + 5 + 7) * ms)] * 2
    answer = late.answer
    assert answer and answer.timings and answer.timings["arrived_at"] == pytest.approx(1.005)
    assert answer.timings["queue_s"] == pytest.approx(2 * ms)
    assert answer.timings["e2e_s"] == pytest.approx((10.7 + 20) * ms)
    assert answer.ttft_s == pytest.approx((5 + 2 + 1.16 + 7) * ms)
    assert list(answer.itl_s) == pytest.approx([3.06 * ms] * 9)
    assert result["mean_e2el_ms"] == pytest.approx(result["server"]["mean_e2el_ms"] + 12)
    slept, _ = served([ask(0)], loop_interval_ms=2)
    assert slept["mean_e2el_ms"] == pytest.approx(10.7 + 20), "as the server's own sleep does"


def test_a_stream_ends_with_its_own_last_token_and_a_plain_answer_with_its_batch() -> None:
    together = [ask(0, tokens=2), ask(1, tokens=10)]
    first, each = 1 + 2 * 0.06 + 20 * 0.01, 1 + 2 * 0.06
    plain, outcomes = served(together, "static")
    assert latencies(outcomes) == [pytest.approx((first + 9 * each) * ms)] * 2
    assert plain["useful_fraction"] == pytest.approx(12 / 20)
    live = 2 * (first + each) + 8 * each
    assert plain["occupancy"] == pytest.approx(live / (32 * (first + 9 * each)))
    assert outcomes[0].answer and outcomes[0].answer.timings
    assert outcomes[0].answer.timings["held_s"] == pytest.approx(8 * each * ms, abs=1e-6)
    _, outcomes = served(together, "static", stream=True)
    assert latencies(outcomes)[0] == pytest.approx((first + each) * ms)
    assert latencies(outcomes)[1] == pytest.approx((first + 9 * each) * ms)


def test_users_of_a_closed_loop_send_when_they_are_answered() -> None:
    result, outcomes = served([ask(i, users=2) for i in range(6)])
    each = 10.7 * ms
    sent_at = [outcome.sent_at for outcome in outcomes]
    assert sent_at == pytest.approx([0, 0, each, 2 * each, 3 * each, 4 * each])
    assert latencies(outcomes) == pytest.approx([each] + [2 * each] * 5)
    assert result["wall_clock_s"] == pytest.approx(6 * 10.7 * ms) and result["completed"] == 6
    away = Costs("away", FAKE.line, request=1 * MS, answer=4 * MS)
    _, outcomes = served([ask(i, users=1) for i in range(3)], costs=away)
    assert [outcome.sent_at for outcome in outcomes] == pytest.approx([0, 15.7 * ms, 31.4 * ms])


def test_a_turn_repeats_the_conversation_a_thinking_time_after_the_answer() -> None:
    """Twenty bytes at first; then these, the three tokens of the answer, and ten more."""
    first = Request(id=0, at=1.0, prompt="x" * 20, num_tokens=3)
    second = Request(id=1, at=1.0, prompt="y" * 10, num_tokens=4, after=0, think_s=0.5)
    away = Costs("away", FAKE.line, request=1 * MS, answer=4 * MS)
    _, outcomes = served([first, second], costs=away)
    ended = 1 + (3 * 1.06 + 20 * 0.01 + 5) * ms
    assert outcomes[0].ended_at == pytest.approx(ended)
    assert outcomes[1].sent_at == outcomes[1].scheduled_at == pytest.approx(ended + 0.5)
    assert outcomes[1].answer and outcomes[1].answer.prompt_tokens == 20 + 3 + 10
    assert latencies(outcomes)[1] == pytest.approx((4 * 1.06 + 33 * 0.01 + 5) * ms)
    result, outcomes = served([first, second], request_timeout_s=0.002)
    assert outcomes[0].error.startswith("504 ") and not outcomes[1].sent
    assert (result["completed"], result["failed"]) == (0, 2), "what was never sent failed too"
    cached, _ = served([first, second], "dynamic", prefix_caching=True, block_size=4)
    assert cached["cached_tokens"] == 20, "the last token of an answer was never computed"


def test_a_turn_that_outgrows_the_context_is_refused_as_a_server_does() -> None:
    first = Request(id=0, at=0.0, prompt="x" * 20, num_tokens=3)
    second = Request(id=1, at=0.0, prompt="y" * 20, num_tokens=3, after=0, think_s=0.25)
    third = second.model_copy(update={"id": 2, "after": 1})
    result, outcomes = served([first, second, third], max_model_len=40, block_size=8)
    beyond = "400 43 prompt tokens + 3 completion tokens is beyond the context of 40."
    assert outcomes[1].error == beyond
    assert outcomes[1].sent_at == pytest.approx(outcomes[0].ended_at + 0.25)
    assert [outcome.sent for outcome in outcomes] == [True, True, False]
    assert result["littles_law"] is None and result["failed"] == 2


def test_a_deadline_ends_a_waiting_request_and_a_full_queue_refuses_a_new_one() -> None:
    three = [ask(0), ask(1), ask(2)]
    away = Costs("away", FAKE.line, request=1 * MS, answer=2 * MS)
    result, outcomes = served(three, costs=away, request_timeout_s=0.0145)
    assert outcomes[0].answer and [o.error[:4] for o in outcomes[1:]] == ["504 ", "504 "]
    # at the end of the iteration that runs 14.5 ms after they arrived: the second's own fourth
    assert latencies(outcomes)[1] == pytest.approx((1 + 10.7 + 1.16 + 3 * 1.06 + 2) * ms)
    assert (result["completed"], result["failed"], result["server"]["expired"]) == (1, 2, 2)
    result, outcomes = served(three, costs=away, max_batch_size=1, max_waiting=1)
    assert [bool(outcome.error) for outcome in outcomes] == [False, False, True]
    assert outcomes[2].error.startswith("429 ") and latencies(outcomes)[2] == pytest.approx(3 * ms)
    assert result["server"]["refused"] == 1
    loop = [ask(i, users=3) for i in range(6)]  # the third user comes back at once, and again
    _, outcomes = served(loop, costs=away, max_batch_size=1, max_waiting=1)
    assert [o.sent_at for o in outcomes[3:]] == pytest.approx([3 * ms, 6 * ms, 9 * ms])


def test_a_trace_names_adapters_which_are_loaded_and_computed_at_a_cost() -> None:
    costs = replace(FAKE, load=20 * MS, adapter_token=MS)
    lora: dict[str, Any] = {"lora_random": "2:8", "max_loras": 1}
    asks = [ask(i, model=name) for i, name in enumerate(("lora-0", "fake", "lora-0", "lora-1"))]
    _, outcomes = served(asks, costs=costs, **lora)
    alone = [20 + 19 + 10.7, 10.7, 19 + 10.7, 20 + 19 + 10.7]
    assert latencies(outcomes) == pytest.approx([ms * sum(alone[: i + 1]) for i in range(4)])
    with pytest.raises(WorkloadError, match="names the model 'c', and there are fake, lora-0, "):
        served([ask(0, model="c")], **lora)


def test_what_is_in_flight_is_counted_once_in_50_ms_from_first_to_last() -> None:
    class Ticks(Watch):
        n = 0

        def tick(self) -> None:
            self.n += 1

    config = build("nobatch", {"model": "fake", "device": "cpu"}, {})
    target = SimulatedServer("nobatch", config, FAKE, stream=False, jump=True)
    result, _ = measure(target, [ask(0, at=3.0, tokens=900)], {}, 1.0, ticks := Ticks())
    assert result["wall_clock_s"] == pytest.approx(0.9541) and 18 <= ticks.n <= 20
    assert result["mean_in_flight"] == 1.0


def test_step_computes_each_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "facts", dict)
    with Progress(Console(quiet=True)) as progress:
        for argv, jump in (([], True), (["--step"], False)):
            with Simulating(parse(argv), progress).target("dynamic") as target:
                assert isinstance(target, SimulatedServer) and target.jump is jump


def test_requests_that_bring_no_seed_are_mispredicted_each_in_its_own_way() -> None:
    """As by a server, which counts seeds; once all had the same error, which orders nothing."""

    def ends(asks: Sequence[Request]) -> list[float]:
        _, outcomes = served(asks, order="sjf", length_predictor="noisy:1")
        return [outcome.ended_at for outcome in outcomes]

    without = ends([ask(i) for i in range(8)])
    assert without == ends([ask(i, seed=i) for i in range(8)]) != sorted(without)


@pytest.mark.parametrize(("mode", "settings", "arrival", "drawn"), [
    ("nobatch", {}, "poisson:20", {"sessions": "3:0.05"}),
    ("static", {"preserve_ordering": True}, "closed:6", {}),
    ("windowed", {"request_timeout_s": 0.3}, "poisson:60", {"priorities": ["0.5:1", "0.5:0"]}),
    ("dynamic", {"prefix_caching": True, "token_budget": 16}, "burst", {"prefixes": "3:40:1"}),
    ("dynamic", {"order": "srpt", "max_waiting": 3}, "poisson:60", {}),
    ("dynamic", {"kv_reservation": "demand", "kv_cache": "32blocks"}, "burst", {}),
    ("multibin", {}, "gamma:60:3", {"sessions": "2:0"}),
    ("dynamic", {"shed": True}, "poisson:90", {"slo_mix": ["1:a=ttft:100"]}),
])  # fmt: skip
def test_jumping_gives_what_stepping_does_to_the_byte(
    mode: str, settings: dict[str, Any], arrival: str, drawn: dict[str, Any]
) -> None:
    settings = {"max_batch_size": 4, "max_model_len": 480, **settings}
    requests = Workload("uniform:1:60", seed=3, **drawn).requests(30, arrival)
    around = Costs("around", FAKE.line, gap=MS // 3, request=MS, answer=MS)

    def written(jump: bool) -> str:
        found = served(requests, mode, around, mode == "static", jump, **settings)
        return json.dumps(with_requests(*found))

    assert written(True) == written(False) == written(True)


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
            SimulatedServer("", config, FAKE, stream=False, jump=True).replay([ask(0)], 1, Watch())
            honoured |= read & Config.model_fields.keys()
    assert honoured & NOT_SIMULATED == set()
    undecided = Config.model_fields.keys() - honoured - {*ENGINE} - NOT_SIMULATED
    assert {*ENGINE, *NOT_SIMULATED} <= Config.model_fields.keys()
    assert undecided == set(), "read it, or name it in ENGINE or NOT_SIMULATED"


SMALL = "--numsamples 40 --lengths uniform:1:40 --modes static,dynamic"


def simulate(out: Path, words: str) -> subprocess.CompletedProcess[str]:
    return ran("simulate", *shlex.split(words), "--out", str(out))


def saved(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "summary.json").read_text()))


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Costs that were fitted on a processor that does not exist."""
    path = tmp_path_factory.mktemp("costs") / "abacus.json"
    config = build("dynamic", {"model": "demo", "device": "cpu"}, {}).model_dump(mode="json")
    source = {"hardware": {"cpu": "Abacus 3000"}, "commit": "0123456789", "date": "2026-01-02T03"}
    save(Costs("abacus", FAKE.line, gap=MS, source={**source, "config": config}), path)
    return path


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory, elsewhere: Path) -> Path:
    """A run by these costs, with a sweep, as ./simulate.sh leaves it."""
    out = tmp_path_factory.mktemp("runs") / "simulated"
    with pytest.MonkeyPatch.context() as patch:
        undraw(patch)
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


@pytest.mark.usefixtures("undrawn")
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


@pytest.mark.usefixtures("undrawn")
def test_a_report_tells_how_many_replicas_there_were(tmp_path: Path) -> None:
    """One fewer until the failed one is replaced; and of a failure that ended no request."""
    words = "--modes nobatch,dynamic --numsamples 600 --arrival poisson:150 --replicas 4 "
    words += f"--fail 1:0.001 3:1000 --start-s 1 --out {tmp_path}"  # the first when it is idle
    output("simulate", words)
    [part] = re.findall("## Replicas\n(.*?)\n## ", (tmp_path / "report.md").read_text(), re.S)
    assert re.search(r"\| nobatch \| 3 to 4 \| [1-9]\d* \| [1-9]\d* to [1-9]\d* \|", part)
    assert "In dynamic the failure of replica 3 at 1000 s ended no request: it was not up" in part
    assert "replicas.png" in part
    run = runs.load(tmp_path)
    panels = report.drawings(run)["replicas"]().axes
    assert [axes.get_title(loc="left") for axes in panels] == ["nobatch", "dynamic"]
    rows = report.drawings(run)["occupancy"]().axes[0].get_ylim()[1]
    assert rows == 4 * run.first["config"]["max_batch_size"], "those of all replicas"
    for axes, replica in zip(panels, replicas.simulated(run).values()):
        every, up = (patch for patch in axes.patches if isinstance(patch, StepPatch))
        most = max(up for _, up, _ in replica["changes"])
        assert max(up.get_data()[0]) == most <= max(every.get_data()[0])


@pytest.mark.usefixtures("undrawn")
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
    monkeypatch.setattr(report, "write", lambda run: print("the figures"))
    shown = output("simulate", f"{SMALL} --arrival poisson:50 --out {tmp_path}")
    assert shown.index("p50 ms") < shown.index("One seed:") < shown.index("the figures")


@pytest.mark.usefixtures("undrawn")
def test_ctrl_c_keeps_what_is_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C when the second mode has answered five."""
    ended = Replayed.ended

    def interrupt(self: Replayed, outcome: Outcome) -> None:
        ended(self, outcome)
        if str(self).startswith("dynamic 5/"):
            raise KeyboardInterrupt

    monkeypatch.setattr(Replayed, "ended", interrupt)
    done = simulate(tmp_path, f"{SMALL} --arrival poisson:50")
    assert done.returncode == 130 and done.stderr == "interrupted; what was simulated is kept\n"
    summary, kept = saved(tmp_path), json.loads((tmp_path / "dynamic.json").read_text())
    assert summary["partial"] and not summary["variants"]["static"]["partial"]
    assert kept["partial"] and (kept["completed"], len(kept["requests"])) == (5, 5)
    assert kept["littles_law"] is None and kept["server"]["completed"] == 5


@pytest.mark.usefixtures("undrawn")
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
    assert done.returncode == 130 and done.stderr == "interrupted; what was simulated is kept\n"
    for name, result in saved(tmp_path)["variants"].items():
        assert result["partial"] and result["completed"] < 50_000, name


@pytest.mark.usefixtures("undrawn")
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


@pytest.mark.usefixtures("undrawn")
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


APART = "--prefill-replicas 2 --decode-replicas 2 --kv-gbps"
PLAN = "--plan --slo ttft:9"
WITH_RATE = f"{PLAN} --modes nobatch --model fake --arrival poisson:15"


@pytest.mark.parametrize(("argv", "reason"), [
    ("--costs abacus", "no costs 'abacus'; name one of fake,"),
    ("--costs roofline:b300,gpt2,bfloat16", "of h100, h200, .* or cpu:GBPS:GFLOPS"),
    ("--costs roofline:cpu:0:1,gpt2,bfloat16", "names no estimate; write roofline:DEVICE"),
    ("--costs roofline:h100,fake,bfloat16", "a model of demo, .*gpt2-xl, and float32 or bf"),
    ("--dtype float32", "--dtype float32: the costs fake do not depend on --dtype"),
    ("--fake-slowdown 4 --costs fake-server", "fake-server do not depend on --fake-slowdown"),
    ("--model demo", "--model demo: the costs fake hold for --model fake; leave"),
    ("--variant 'a=dynamic --threads 2'", "--threads 2: the costs fake do not depend"),
    ("--port 8501", "--port applies to running servers, and none is started here; leave it"),
    ("--also=a=http://h", "--also applies to running servers.*measure with ./compare.sh"),
    ("--request-log f", "--request-log has no effect in virtual time; leave it out"),
    ("--modes dynamo", r"unknown mode 'dynamo' \(did you mean dynamic\?\)"),
    ("--stepp", r"unknown flag --stepp \(did you mean --step\?\)"),
    ("--slow 1:x --replicas 2", "--slow '1:x': give a replica and a number above 0"),
    ("--slow 2:2 --replicas 2", "no replica 2"),
    ("--replicas 0", "at least 1"),
    ("--replicas 2 --router best", "best"),
    ("--start-s -1", "--start-s must be a number of seconds from 0 on"),
    ("--counts-own", "add --stale-s"),
    ("--router prefix --replicas 2", "prefix.*add --prefix-caching"),
    ("--router random", "add --replicas"),
    ("--prefill-replicas 2 --kv-gbps 25", "belong together, and are above 0, as in --prefill"),
    (f"{APART} 0", "belong together"),
    (f"{APART} 25 --start-s 4", "leave out --replicas, --fail"),
    (f"{APART} 25 --prefix-caching", "--prefix-caching is not simulated with disaggregated"),
    ("--replay=calls.jsonl --step", "leave out all other flags"),
    ("--slo ttft:9", "belong to --plan; add it"),
    ("--plan --arrival poisson:15", "--slo ttft:200"),
    (PLAN, "--arrival poisson:200"),
    (f"{PLAN} --arrival poisson:x", "unknown arrival 'poisson:x'"),
    (f"{PLAN} --trace nowhere --arrival burst", "needs the rate"),
    (f"{PLAN} --trace nowhere", "cannot read the trace nowhere"),
    (f"{WITH_RATE} --replicas 3", "leave out --replicas"),
    (f"{WITH_RATE} --attainment 99", "1 at most"),
    (f"{WITH_RATE} --slo tokens:9", "--slo 'tokens:9': give ttft:MS"),
    (f"{WITH_RATE} --step", "leave out --step"),
    ("--jobs 0", "--jobs must be at least 1"),
])  # fmt: skip
def test_a_bad_command_line_ends_with_a_sentence(argv: str, reason: str, tmp_path: Path) -> None:
    done = simulate(tmp_path / "out", argv)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stdout == ""
    assert re.search(reason, done.stderr) and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_trace_beyond_the_context_ends_with_a_sentence(tmp_path: Path) -> None:
    done = simulate(tmp_path, f"{SMALL} --max-model-len 64 --arrival burst")
    assert done.returncode == 2 and re.fullmatch(
        r"error: request \d+ of the trace can never be served: \d+ prompt tokens \+ \d+ completion "
        r"tokens is beyond the context of 64\. Give shorter --lengths, or a smaller --scale\n",
        done.stderr,
    )
    assert not list(tmp_path.glob("*.json"))


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
    SimulatedServer("", config, FAKE, stream=False, jump=True).replay([ask(0)], 1, Watch())
    assert not (tmp_path / "log").exists()
    monkeypatch.setenv("EB_MAX_BATCHSIZE", "2")
    with pytest.raises(ConfigError, match="unknown variable EB_MAX_BATCHSIZE"):
        parse([])
