"""Which setting, and how many replicas: answers that can be worked out, and questions without."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from client import machine, runs
from client.progress import Progress, ProgressStep
from client.results import Result
from client.traces import save_trace
from client.workloads import Workload
from config.settings import ConfigError
from generate.auto import build
from simulate import find, program, verify
from simulate.costs import FAKE, save
from simulate.space import Space, space_of, trial_of
from simulate.trial import Trial, TrialResult
from tests.programs import ran

# nobatch by the fake line, 40 times slower: 2 tokens take 42 ms each, and a prompt of 1 to 64 words
# besides; so a replica serves about 9 a second
ENGINE = "--modes nobatch --model fake --fake-slowdown 40"
ASKED = f"{ENGINE} --lengths fixed:2 --arrival poisson:15"
ENOUGH = 200  # requests that tell whether the queue grows
RECORDED = "tests/simulate/own_vllm.jsonl.gz"  # from the root, where programs run


@pytest.fixture(autouse=True)
def cheap(undrawn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drawn, no process is started, and how busy this machine is takes no look."""
    monkeypatch.setattr(program, "physical_cores", lambda: 1)
    monkeypatch.setattr(machine, "hardware", dict)


def asked(out: Path, words: str) -> subprocess.CompletedProcess[str]:
    return ran("simulate", "--find", *f"{words} --out {out} --overwrite".split())


def found(out: Path, words: str) -> Any:
    """Return find.json."""
    done = asked(out, words)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((out / "find.json").read_text())


def fewest(out: Path, words: str, traffic: str = f"{ASKED} --numsamples {ENOUGH}") -> Any:
    """Return the fewest replicas, what was tried by their number, and all else."""
    answer = found(out, f"replicas {traffic} --router round_robin {words}")
    tried = {each["settings"]["replicas"]: each for each in answer["tried"]}
    return int(answer["best"].rpartition("=")[2]), tried, answer


# ---- the fewest replicas


def test_the_fewest_that_keep_up_are_found(tmp_path: Path, undrawn: contextlib.ExitStack) -> None:
    undrawn.close()  # a figure is drawn
    n, tried, _ = fewest(tmp_path, "--slo e2el:1000 --attainment 0.95 --repeats 4")
    assert n in (2, 3) and not tried[n]["misses"] and tried[n - 1]["misses"]
    page = (tmp_path / "find.md").read_text()
    assert f"| replicas={n} ← |" in page and "| 4 of 4 traces |" in page
    assert f"--fake-slowdown 40 --replicas {n}" in page.replace("40.0", "40")
    assert (tmp_path / "find.png").stat().st_size > 10_000


LAX = "--slo e2el:100000 --repeats 1"


def test_a_number_whose_queue_grows_does_not_suffice(tmp_path: Path) -> None:
    """One replica serves 9 of 15 a second; the trace ends before that breaks the limit. Two keep
    up, as one does at 5 a second.
    """
    n, tried, _ = fewest(tmp_path, LAX)
    assert n == 2 and [each["shares"][""] for each in tried[1]["traces"]] == [1.0]
    assert tried[1]["traces"][0]["queue_grows"] and tried[1]["misses"] == 1
    assert fewest(tmp_path, f"{LAX} --arrival poisson:5")[0] == 1


def test_of_too_few_requests_it_is_said_that_growth_is_not_known(tmp_path: Path) -> None:
    n, _, answer = fewest(tmp_path, f"{LAX} --numsamples 40")
    assert (n, answer["growth_needs"]) == (1, ENOUGH)
    assert "whether a queue grows is not known" in (tmp_path / "find.md").read_text()


def test_what_is_possible_counts_the_default_that_is_served_as_well(tmp_path: Path) -> None:
    """Of 80 possible trials it had made 83."""
    found(tmp_path, f"max_batch_size=1,2 {ENGINE} {LAX} --arrival poisson:5 --numsamples 10")
    assert "3 trials were made, of 3 possible ones." in (tmp_path / "find.md").read_text()


def test_a_trace_is_as_long_as_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "MOST_REQUESTS", 50)
    n, _, answer = fewest(tmp_path, LAX, f"{ENGINE} --lengths fixed:2 --arrival poisson:30")
    assert answer["requests"] == answer["growth_needs"] == 300, "30 a second, 10 s"
    assert n in (4, 5)


TRAFFIC = {
    "users": "--users a,10,fixed:2 b,10,fixed:1",
    "their seconds": "--users a,10,fixed:2,0-14 b,10,fixed:1,0-14",
    # 2 conversations per second; while they last, at first and at the end, fewer requests come
    "conversations": "--lengths fixed:2 --arrival poisson:2 --sessions 5:2",
}


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_replicas_are_found_for_users_and_conversations(
    traffic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "FEWEST", ENOUGH)
    monkeypatch.setattr(find, "LONG_S", 10.0)
    n, tried, _ = fewest(tmp_path, LAX, f"{ENGINE} {TRAFFIC[traffic]}")
    assert n == 2 and tried[1]["traces"][0]["queue_grows"]


def test_a_trace_is_the_same_for_each_seed(tmp_path: Path) -> None:
    requests = Workload(lengths="fixed:2").requests(60, "poisson:15")
    save_trace(file := tmp_path / "trace.jsonl", requests)
    traffic, more = f"{ENGINE} --trace {file}", "--slo e2el:500 --repeats 2"

    def distinct(tried: Any) -> list[int]:
        return [len({trace["shares"][""] for trace in each["traces"]}) for each in tried.values()]

    assert set(distinct(fewest(tmp_path, more, traffic)[1])) == {1}
    assert "times are the same in each" in (tmp_path / "find.md").read_text()
    assert 2 in distinct(fewest(tmp_path, more, f"{traffic} --arrival poisson:20")[1])


def test_what_no_number_of_replicas_meets_is_said(tmp_path: Path) -> None:
    words = f"replicas=1,2,4 {ASKED} --numsamples 40 --slo tpot:10 e2el:9000"
    done = asked(tmp_path, f"{words} --repeats 3")
    assert done.returncode == 1
    assert "none meets the limits; the nearest is replicas=" in done.stdout
    assert re.search(r"without tpot ≤ 10 ms: replicas=\d, ", done.stdout)
    assert "without e2el ≤ 9000 ms: none meets the others" in done.stdout


def test_a_delay_that_a_second_request_ends_is_no_bound(tmp_path: Path) -> None:
    """Alone each would wait for 0.9 s, and on more replicas more are alone."""
    windowed = "--modes windowed --batch-size-target 2 --max-batch-delay-ms 900"
    more = "--numsamples 40 --slo e2el:500 --attainment 0.8 --repeats 1 --arrival poisson:60"
    done = asked(tmp_path, f"replicas {ASKED} {windowed} {more}")
    assert "1. replicas=3" in done.stdout


def test_limits_within_the_uncertainty_of_the_costs_have_no_answer(tmp_path: Path) -> None:
    """A token takes 1.06 ms, give or take 10%: two of eight traces never meet 1.16 ms."""
    held_out = {"of_runs_percent": [-16.45, 0.0, 16.45]}
    config = build("nobatch", {"model": "fake"}, {}).model_dump(mode="json")
    source = {"config": config, "residuals": {"held_out": held_out}}
    save(replace(FAKE, source=source), costs := tmp_path / "unsure.json")
    traffic = "--modes nobatch --lengths fixed:10 --arrival poisson:50 --slo tpot:1.16"
    done = asked(tmp_path, f"replicas=1,9 {traffic} --numsamples 30 --repeats 8 --costs {costs}")
    assert done.returncode == 1
    assert "enough in 2 of 3 traces; relax the limits" in done.stdout, done.stdout


# ---- the best setting

SETTINGS = "--modes dynamic --arrival poisson:100 --numsamples 100 --repeats 3"


def test_the_best_that_meets_the_limits_is_named_with_what_they_cost(tmp_path: Path) -> None:
    """More rows make each token later: without its limit 8 rows are faster than one."""
    words = f"max_batch_size=1,8 token-budget=64 {SETTINGS} --lengths fixed:8 --for p99_e2el_ms"
    more = "--slo tpot:1.2 e2el:p99:9000 --arrival poisson:70"
    done = asked(tmp_path, f"{words} {more}")
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads((tmp_path / "find.json").read_text())
    name = "max_batch_size={} token_budget=64".format
    assert answer["best"] == name(1) and answer["without"]["tpot"] == name(8)
    assert f"without tpot ≤ 1.2 ms: {name(8)}, " in done.stdout
    assert "without e2el p99 ≤ 9000 ms: the same" in done.stdout
    command = "./server.sh dynamic --model fake --max-batch-size 1 --token-budget 64"
    assert command in done.stdout and answer["served_by"] == command


def test_a_price_adds_what_each_setting_costs(tmp_path: Path) -> None:
    """Two replicas cost twice what they sell their time for."""
    n, tried, _ = fewest(tmp_path, f"{LAX} --price 3600")
    [trace] = tried[n]["traces"]
    assert trace["costs"]["cost_per_thousand_within"] == pytest.approx(
        n * 1e3 / trace["values"][""]
    )
    assert "| cost per million tokens |" in (tmp_path / "find.md").read_text()


def test_a_measure_of_0_is_0(tmp_path: Path) -> None:
    """It was taken for one that is missing, the worst."""
    words = "max_batch_size=16,32 --slo e2el:60000 --for p50_queue_time_ms --numsamples 100"
    answer = found(tmp_path, f"{words} --arrival poisson:1 --repeats 1")
    values = [each["values"][""] for tried in answer["tried"] for each in tried["traces"]]
    assert (
        values and max(values) < 1000 and "1,000,000,000" not in (tmp_path / "find.md").read_text()
    )


def test_a_slow_replica_is_one_of_those_that_are_tried(tmp_path: Path) -> None:
    answer = found(tmp_path, f"replicas=1,2 {ASKED} {LAX} --numsamples 60 --slow 1:2")
    assert {each["settings"]["replicas"] for each in answer["tried"]} <= {1, 2}


def test_what_is_asked_of_a_run_is_refused(tmp_path: Path) -> None:
    made = f"--modes dynamic --numsamples 4 --arrival burst --repeats 2 --jobs 1 --out {tmp_path}"
    assert ran("simulate", *made.split()).returncode == 0
    for asked, said in (
        (f"--check {tmp_path}", "leave out --find"), (f"--resume {tmp_path}", "leave out --find"),
        (f"--slowest 3 {tmp_path}", "ask ./compare.sh --slowest 10 FOLDER"),
    ):  # fmt: skip
        done = ran("simulate", "--find", *asked.split())
        assert done.returncode == 2 and said in done.stderr


def test_a_limit_on_a_statistic_is_one_of_the_trace() -> None:
    made = program.parse(f"--find --slo ttft:9 e2el:p99:20 {SETTINGS}".split())
    result = trial_of(made, made.config("dynamic")).serve()
    assert result.beyond == ["e2el:p99"] and result.p99_e2el_ms > 20
    assert result.shares[""] == result.shares["e2el:p99"]
    assert result.shares["ttft"] == 1.0 > result.shares[""], "without it all are answered"
    assert not result.meets(0.1) and result.meets(0.1, "e2el:p99")


def space(words: str) -> Space:
    made = program.parse(shlex.split(f"--find {words} --slo ttft:9 --arrival poisson:9"))
    return space_of(made, made.find)


@pytest.mark.parametrize(("words", "names", "left_out", "why"), [
    ("order=fcfs,srpt mode=static,dynamic", [
        "order=fcfs mode=static", "order=fcfs mode=dynamic", "order=srpt mode=dynamic"], 1,
     "--order srpt pauses rows"),
    ("mode=static,multibin bins=2,4", [
        "mode=static", "mode=multibin bins=2", "mode=multibin bins=4"], 0, ""),
    ("max_num_seqs", [f"max_batch_size={n}" for n in (8, 16, 32, 64, 128)], 0, ""),
    ("prefix_caching", ["prefix_caching=False", "prefix_caching=True"], 0, ""),
    ("kv_reservation", ["kv_reservation=whole", "kv_reservation=demand"], 0, ""),
    ("length_predictor=exact,constant order=fcfs,sjf", ["length_predictor=exact order=sjf"], 3,
     "--length-predictor has no meaning without --order sjf"),
    ("length_predictor=constant,noisy:1 order=sjf", ["length_predictor=noisy:1 order=sjf"], 1,
     "--order sjf tells requests apart by predicted lengths"),
    ("speculate=0,4 draft=acceptance:0.7", ["speculate=4 draft=acceptance:0.7"], 1,
     "--draft proposes tokens for --speculate"),
    ("order=fcfs,prefix max_batch_size=4", ["order=fcfs max_batch_size=4"], 1,
     "--order prefix goes by what the prefix cache holds"),
    ("kv_cache=8blocks,64blocks", ["kv_cache=64blocks"], 1, "kv_cache 8blocks of 16 tokens hold"),
    ("mode=static order=fcfs,srpt", ["mode=static order=fcfs"], 1, "--order srpt pauses rows"),
])  # fmt: skip
def test_all_that_goes_together_is_tried(
    words: str, names: Sequence[str], left_out: int, why: str
) -> None:
    """A setting without a meaning in a mode is left out of its name. One value that fitted nowhere
    refused all the others.
    """
    made = space(words)
    assert [one.name for one in made.settings] == names
    assert made.left_out == left_out and made.why.startswith(why)


@pytest.mark.parametrize("words", ["order=fcfs,sjff", "mode=dynamic,dinamic", "max_batch_size=0,4",
                                   "length_predictor=constant order=sjf"])  # fmt: skip
def test_what_is_no_value_and_what_fits_nowhere_is_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="--find: "):
        space(words)


def test_all_orders_are_tried_by_their_name_alone() -> None:
    made = space("order")
    assert {"order=fcfs", "order=mlfq"} <= {one.name for one in made.settings}
    assert made.default.name == "order=fcfs" and "add --prefix-caching" in made.why


def test_the_default_is_the_baseline() -> None:
    """--baseline changed nothing."""
    words = "max_batch_size --variant a=dynamic --variant b='dynamic --max-batch-size 4'"
    for named, rows in (("", 32), (" --baseline b", 4)):
        assert space(words + named).default.config.max_batch_size == rows


# ---- the search, in a table of stated results


def searched(
    values: Callable[[int, int], float],
    misses: Callable[[int, int], bool] = lambda k, seed: False,
    n: int = 60,
) -> tuple[find.Search, str]:
    """Search among settings 1 … n; values and misses: of a setting and a trace."""
    made = program.parse(
        ["--find", f"max_batch_size={','.join(map(str, range(1, n + 1)))}",
         *["--slo", "ttft:9", "--arrival", "poisson:9", "--numsamples", "9"]]
    )  # fmt: skip

    def calls(call: Any, trials: Sequence[Trial]) -> Any:
        for trial in trials:
            k, seed = trial.config.max_batch_size, trial.seed
            value, share = values(k, seed), 0.0 if misses(k, seed) else 1.0
            both = {"": value, "ttft": value}, {"": share, "ttft": 1.0}
            result = TrialResult(*both, [], False, 1.0, 1.0, {})
            yield 0.0 if call is Trial.fills_s else result

    space = space_of(made, made.find)
    trial = trial_of(made, space.default.config)
    search = find.Search(space, trial, calls, Progress(Console(quiet=True)), ProgressStep(""))
    search.run()
    return search, search.best.name.rpartition("=")[2] if search.best else ""


def noise(k: int, seed: int) -> float:
    return float(np.random.default_rng([k, seed]).standard_normal())


def test_the_best_is_found_with_less_than_a_third_of_the_trials() -> None:
    """Traces differ by far more than settings do: pairs tell."""
    search, best = searched(lambda k, seed: 100 * noise(0, seed) - abs(k - 40) + noise(k, seed))
    assert best == "40"
    assert sum(map(len, search.results.values())) <= 0.3 * 60 * 40
    served = [len(results) for results in search.results.values()]
    assert served.count(find.FEW) > 30, "half, and what is surely worse, serve no more"


def test_of_equal_settings_the_first_is_named() -> None:
    assert searched(lambda k, seed: float(seed), n=8)[1] == "1"


def test_a_better_one_that_misses_the_limits_later_hands_over_to_those_that_do_not() -> None:
    """Number 9 is best, and misses from the tenth trace on: three misses of 40 are too many."""
    search, best = searched(lambda k, seed: float(k), lambda k, seed: k == 9 and seed > 8, n=9)
    assert best == "8" and search.without["ttft"] is not None
    assert search.without["ttft"].name == "max_batch_size=9"
    search, best = searched(lambda k, seed: float(k), lambda k, seed: k == 9 and seed > 37, n=9)
    assert best == "9", "two are not"


def test_if_none_meets_the_limits_the_nearest_is_named() -> None:
    search, best = searched(lambda k, seed: float(k), lambda k, seed: True, n=4)
    assert not best and search.why_not.startswith("none meets the limits; the nearest is max_batch")


# ---- one's own vLLM, and real servers


def test_settings_of_ones_own_vllm_are_found_by_its_recording(tmp_path: Path) -> None:
    words = f"max_num_seqs=4,64 scheduling_policy=sjf --vllm {RECORDED} --repeats 1"
    words += f" --svg --save-costs {tmp_path / 'mine.json'}"
    answer = found(tmp_path, f"{words} --slo ttft:60000 --attainment 0.1 --for mean_e2el_ms")
    assert {path.name for path in tmp_path.iterdir()} == {*runs.FOUND, "mine.json"}
    names = {"max_batch_size=4 order=sjf", "max_batch_size=64 order=sjf", "default"}
    assert {each["name"] for each in answer["tried"]} == names
    served = r"vllm serve \S+ --max-num-seqs (4|64) # and, without a flag: --order sjf"
    assert re.fullmatch(served, answer["served_by"])


def test_lengths_that_are_drawn_fit_into_the_recorded_context(tmp_path: Path) -> None:
    """367 tokens; the first request had 798 of them, and refused the search."""
    drawn = "--prompt-lengths uniform:1:900 --lengths uniform:1:300 --arrival poisson:3"
    words = f"max_num_seqs=4 --vllm {RECORDED} --repeats 1 --numsamples 40 {drawn}"
    answer = found(tmp_path, f"{words} --slo ttft:60000 --attainment 0.1")
    assert answer["best"] == "max_batch_size=4"


@pytest.mark.parametrize(("slower", "runs", "said", "least"), [
    (1.0, 5, "held", 0.9), (1.2, 5, "off", 0.99), (1.2, 2, "cannot tell, more runs would", 0.3),
])  # fmt: skip
def test_a_prediction_is_held_against_real_runs_of_the_same_traces(
    slower: float, runs: int, said: str, least: float
) -> None:
    """Traces differ by a third, and a real run from what is predicted of its trace by 3%. By means
    of both, of which neither knew the other's traces, all that were 1.2 times as slow held, too.
    """
    chance, n = np.random.default_rng(0), 300
    traces = np.exp(chance.normal(0, 0.3, 40))
    search, _ = searched(lambda k, seed: float(traces[seed]), n=1)
    assert search.best
    answers = Counter[str]()
    for _ in range(n):
        noise = np.exp(chance.normal(0, 0.03, runs))
        live = {k: Result(goodput=traces[k] / slower * noise[k]) for k in range(runs)}
        answers[verify.held(search, search.best, live).partition("%), ")[2]] += 1
    assert answers[said] >= least * n
    if slower > 1:
        assert not answers["held"]


def test_a_prediction_of_one_run_or_of_nothing_has_no_verdict() -> None:
    search, _ = searched(lambda k, seed: float(seed + 1), n=1)
    assert search.best
    runs = ((1, Result(goodput=3.0)), (2, Result()))
    found = [verify.held(search, search.best, {seed: run}) for seed, run in runs]
    assert found[0].endswith("3.00 in 1 real run, 2.00 predicted: +50.0%")
    assert found[1].endswith("0.00 in 1 real run, 3.00 predicted")


@pytest.mark.nightly
def test_the_best_and_the_default_run_for_real(tmp_path: Path) -> None:
    words = f"max_batch_size=1,8 {SETTINGS} --slo ttft:500 --verify 1 --arrival poisson:20"
    done = asked(tmp_path, f"{words} --lengths fixed:4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "default, ./server.sh dynamic --model fake: goodput" in done.stdout
    assert "1 real run," in (tmp_path / "find.md").read_text()
    assert (tmp_path / "verified" / "report.md").exists()


def test_a_default_that_is_not_shown_to_be_worse_is_named(tmp_path: Path) -> None:
    words = f"max_batch_size=64 --slo ttft:2000 {ASKED} --repeats 3 --numsamples 20 --jobs 1"
    said = asked(tmp_path, words.replace("poisson:15", "poisson:3")).stdout
    assert "max_batch_size=64: goodput" in said and "default is not shown to be worse" in said
