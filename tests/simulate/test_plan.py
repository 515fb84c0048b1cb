"""How many replicas: an answer that can be worked out, and questions without one."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from client import machine
from client.traces import save_trace
from client.workloads import Workload
from generate.auto import build
from simulate import plan, program
from simulate.costs import FAKE, save
from simulate.trial import SEEDS
from tests.programs import ran

# nobatch by the fake line, 40 times slower: 2 tokens take 42 ms each, and a prompt of 1 to 64 words
# besides; so a replica serves about 9 a second
ENGINE = "--modes nobatch --model fake --fake-slowdown 40"
ASKED = f"{ENGINE} --lengths fixed:2 --arrival poisson:15"
ENOUGH = 200  # requests that tell whether the queue grows


@pytest.fixture(autouse=True)
def cheap(undrawn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drawn, no process is started, and how busy this machine is takes no look."""
    monkeypatch.setattr(program, "physical_cores", lambda: 1)
    monkeypatch.setattr(machine, "hardware", dict)


def asked(out: Path, words: str) -> subprocess.CompletedProcess[str]:
    return ran("simulate", "--plan", *f"{words} --out {out} --overwrite".split())


def planned(out: Path, words: str, traffic: str = f"{ASKED} --numsamples {ENOUGH}") -> Any:
    """Return the answer of one variant."""
    done = asked(out, f"{traffic} --router round_robin {words}")
    assert done.returncode == 0, done.stderr
    [answer] = json.loads((out / "plan.json").read_text())["answers"]
    return answer


def test_the_fewest_that_keep_up_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # a figure is drawn
    answer = planned(tmp_path, "--slo e2el:1000 --attainment 0.95 --repeats 4")
    assert answer["fewest"] in (2, 3)
    judged = {each["replicas"]: each for each in answer["judged"]}
    fewest, fewer = judged[answer["fewest"]], judged[answer["fewest"] - 1]
    assert fewest["suffices"] == 1 and fewer["suffices"] < 0.95
    low, high = fewest["suffices_between"]
    assert low == pytest.approx(0.51, abs=0.01) and high == 1, "of four traces little is known"
    page = (tmp_path / "plan.md").read_text()
    assert "(simulated)" in page and f"| {answer['fewest']} ← |" in page
    assert (tmp_path / "plan.png").stat().st_size > 20_000


LAX = "--slo e2el:100000 --repeats 1"


def test_a_number_whose_queue_grows_does_not_suffice(tmp_path: Path) -> None:
    """One replica serves 9 of 15 a second; the trace ends before that breaks the limit. Two keep
    up, as one does at 5 a second: there the answer is what it is without the growth.
    """
    answer = planned(tmp_path, LAX)
    one, two, *_ = answer["judged"]
    assert one["attainments"] == two["attainments"] == [1.0]
    assert (one["growing"], two["growing"], answer["fewest"]) == (1, 0, 2)
    assert "queue grows in 1 of 1" in (tmp_path / "plan.md").read_text()
    calm = planned(tmp_path, f"{LAX} --arrival poisson:5")
    assert (calm["fewest"], calm["judged"][0]["growing"]) == (1, 0)


def test_of_too_few_requests_it_is_said_that_growth_is_not_known(tmp_path: Path) -> None:
    answer = planned(tmp_path, f"{LAX} --numsamples 40")
    assert (answer["fewest"], answer["growth_needs"]) == (1, ENOUGH)
    assert "| not known |" in (tmp_path / "plan.md").read_text()


def test_a_trace_is_as_long_as_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MOST_REQUESTS", 50)
    answer = planned(tmp_path, LAX, f"{ENGINE} --lengths fixed:2 --arrival poisson:30")
    assert answer["requests"] == answer["growth_needs"] == 300, "30 a second, 10 s"
    assert answer["fewest"] in (4, 5)


TRAFFIC = {
    "users": "--users a,10,fixed:2 b,10,fixed:1",
    "their seconds": "--users a,10,fixed:2,0-14 b,10,fixed:1,0-14",
    # 2 conversations per second; while they last, at first and at the end, fewer requests come
    "conversations": "--lengths fixed:2 --arrival poisson:2 --sessions 5:2",
}


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_users_and_conversations_are_planned_for(
    traffic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "FEWEST", ENOUGH)
    monkeypatch.setattr(plan, "LONG_S", 10.0)
    answer = planned(tmp_path, LAX, f"{ENGINE} {TRAFFIC[traffic]}")
    assert answer["fewest"] == 2 and answer["judged"][0]["growing"] > 0


def test_a_trace_is_the_same_for_each_seed(tmp_path: Path) -> None:
    requests = Workload(lengths="fixed:2").requests(60, "poisson:15")
    save_trace(file := tmp_path / "trace.jsonl", requests)
    traffic, more = f"{ENGINE} --trace {file}", "--slo e2el:500 --repeats 2"
    found = planned(tmp_path, more, traffic)
    assert all(len(set(judged["attainments"])) == 1 for judged in found["judged"])
    assert "same in each" in (tmp_path / "plan.md").read_text()
    again = planned(tmp_path, more, f"{traffic} --arrival poisson:20")
    assert any(len(set(judged["attainments"])) > 1 for judged in again["judged"])
    assert found["requests"] == again["requests"] == 60


def test_what_no_number_of_replicas_meets_is_said(tmp_path: Path) -> None:
    done = asked(tmp_path, f"{ASKED} --numsamples 40 --slo tpot:10 e2el:9000")
    assert done.returncode == 2
    assert "no number of replicas meets tpot ≤ 10 ms: alone on an idle" in done.stderr


def test_a_delay_that_a_second_request_ends_is_no_bound(tmp_path: Path) -> None:
    """Alone each would wait for 0.9 s."""
    windowed = "--modes windowed --batch-size-target 2 --max-batch-delay-ms 900"
    more = "--numsamples 40 --slo e2el:500 --attainment 0.8 --repeats 1 --arrival poisson:60"
    done = asked(tmp_path, f"{ASKED} {windowed} {more}")
    assert "each request alone on an idle replica: 100.0%" in done.stdout
    assert "windowed: 3 replicas, which suffice" in done.stdout


def test_limits_within_the_uncertainty_of_the_costs_have_no_answer(tmp_path: Path) -> None:
    """A token takes 1.06 ms, give or take 10%: two of eight traces never meet 1.16 ms."""
    held_out = {"of_runs_percent": [-16.45, 0.0, 16.45]}
    config = build("nobatch", {"model": "fake"}, {}).model_dump(mode="json")
    source = {"config": config, "residuals": {"held_out": held_out}}
    save(replace(FAKE, source=source), costs := tmp_path / "unsure.json")
    traffic = "--modes nobatch --lengths fixed:10 --arrival poisson:50 --slo tpot:1.16"
    done = asked(tmp_path, f"{traffic} --numsamples 30 --repeats 8 --costs {costs}")
    assert done.returncode == 2
    assert "enough in 6 of 8 traces; relax them" in done.stderr, done.stderr


def test_intervals() -> None:
    assert plan.wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-3)
    assert plan.wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-3)
    assert plan.coverage(3) == 0.5 and plan.coverage(SEEDS) > 0.95
