"""What iterations cost is found again from what a server tells of them: here one in virtual time,
whose costs are known.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import calibration
from benchmarks.calibration import Segment, Traffic, at_once
from benchmarks.costs import turns
from benchmarks.fitting import Observed, Served, fit, nonnegative, observe, residuals
from client.traces import Request
from config import Config, ConfigError, build
from scheduling import scheduler
from scheduling.inference import Inference
from simulate import PS, Loop, SimulatedReplica
from simulate.costs import Costs, Line, load, work
from simulate.replica import Stretch
from tests.programs import ran

US = 10**6  # picoseconds
STRAIGHT = Line(1000 * US, 60 * US, 70_000, 10 * US, 3_000)
SMALL = {"model": "fake", "max_batch_size": 4, "token_budget": 64}


def exactly() -> float:
    return 1.0


def config_of(**settings: Any) -> Config:
    return build("dynamic", SMALL | settings, {})


def told(
    config: Config,
    costs: Costs,
    requests: Sequence[Request],
    slow: Callable[[], float] = exactly,
    stream: bool = False,
) -> tuple[list[Served], list[list[float]]]:
    """The requests and the iterations of a server whose iterations take slow() times as long."""
    inferences = [Inference(request.ids, request.num_tokens) for request in requests]
    for inference in inferences:
        inference.streamed = stream
    loop = Loop()
    iterations: list[list[float]] = []

    def computed(stretch: Stretch) -> None:
        took = stretch.first / PS * slow()
        iterations.append([stretch.begun / PS, took, len(stretch.iteration.rows)])

    replica = SimulatedReplica(loop, scheduler.build(config), costs, computed=computed)
    loop.serve([(r.at, [inference]) for r, inference in zip(requests, inferences)], replica)
    served = []
    for i in inferences:
        assert i.admitted_at is not None and i.answered_at is not None
        times = i.arrived_at, i.arrived_at, i.admitted_at, i.answered_at, i.answered_at
        served.append(Served(*times, len(i.prompt_ids), i.num_tokens, stream))
    return served, iterations


def observed(
    config: Config, costs: Costs, slow: Callable[[], float] = exactly
) -> tuple[list[Observed], list[list[Observed]]]:
    """A round of the benchmark's own traffic, and its runs in which plain requests come and go."""
    traffic = Traffic(config, seed=1)
    asked = [(traffic.together(n), False) for n in at_once(config) for _ in range(3)]
    coming = [(traffic.other(30, rate), rate > 30) for rate in (5.0, 20.0, 40.0)]
    runs = [
        observe(config, *told(config, costs, requests, slow, stream))
        for requests, stream in asked + coming
    ]
    return [each for run in runs for each in run], runs[-3:-1]


def test_iterations_are_known_from_who_was_admitted_when() -> None:
    """Prompts of 100, 10 and 10 tokens are computed 64 at a time; the third one comes late."""
    config, costs = config_of(), Costs("straight", STRAIGHT)
    prompts = [(0.0, 100, 3), (0.0, 10, 1), (0.003, 10, 2)]
    requests = [
        Request(id=i, at=at, prompt_ids=[1] * n, num_tokens=tokens)
        for i, (at, n, tokens) in enumerate(prompts)
    ]
    seen = observe(config, *told(config, costs, requests))
    chunks = [
        [(row.start, row.n_tokens) for row in each.iteration.rows if not row.decodes]
        for each in seen
    ]
    assert chunks[:4] == [[(0, 64)], [(64, 36), (0, 10)], [(0, 10)], []]
    assert [each.answered for each in seen] == [0, 1, 0, 2]
    assert [each.gap is None for each in seen] == [False, False, False, True]
    # the threads of the first two take 2 ms, and the first iteration less
    assert seen[0].beside == pytest.approx(seen[0].seconds / 1e-3)
    since = seen[2].started_at - 0.003  # the third one's thread began
    assert seen[0].beside + seen[1].beside == pytest.approx(2 + since / 1e-3)


def test_what_does_not_go_together_is_refused() -> None:
    config = config_of()
    traffic = Traffic(config, seed=1).together(3)
    served, iterations = told(config, Costs("straight", STRAIGHT), traffic)
    iterations[2][2] += 1
    with pytest.raises(ValueError, match=r"iteration 2 had .* rows .*run it again"):
        observe(config, served, iterations)


def test_a_known_line_is_found() -> None:
    config = config_of()
    truth = Costs("truth", STRAIGHT, 90 * US, 5 * US, 300 * US, 40 * US, 70 * US, 20 * US)
    seen, mixed = observed(config, truth)
    found = fit("found", seen, at_once(config), mixed)
    assert list(found.decode) == [1, 2, 3, 4] and {each.rows for each in seen} == {1, 2, 3, 4}
    for each in seen:
        assert found.of(each.iteration) == pytest.approx(truth.of(each.iteration), rel=1e-6)
        for answered in (0, 2):
            expected = truth.between(each.iteration, answered)
            assert found.between(each.iteration, answered) == pytest.approx(expected, rel=1e-6)
    terms = [work(each.iteration) for each in seen if not each.decodes]
    assert np.linalg.matrix_rank(np.array(terms)) == 5, "the traffic tells all terms apart"
    left = residuals(found, [seen])
    assert left["mean_absolute_percent"] < 1e-4 and abs(left["whole_percent"]) < 1e-4


def test_each_decoder_batch_size_has_its_line() -> None:
    """Rows are filled up to 1, 2 or 4, and a graph of 4 takes hardly longer than one of 2."""
    config = config_of(decoder_batch_sizes="4,2,1")
    graphs = {1: 200 * US, 2: 380 * US, 4: 400 * US}
    truth = Costs("truth", STRAIGHT, decode={n: Line(t, context=9_000) for n, t in graphs.items()})
    seen, mixed = observed(config, truth)
    assert any(each.iteration.padding for each in seen)
    found = fit("found", seen, at_once(config), mixed)
    assert list(found.decode) == [1, 2, 4]
    for each in seen:
        assert found.of(each.iteration) == pytest.approx(truth.of(each.iteration), rel=1e-6)


def test_noise_is_averaged_and_stalls_are_left_out() -> None:
    """Iterations are apart by 10%, and every fiftieth takes four times as long."""
    config, rng = config_of(), np.random.default_rng(0)
    truth = Costs("truth", STRAIGHT)
    seen, mixed = observed(
        config, truth, lambda: rng.lognormal(0, 0.1) * (4 if rng.random() < 0.02 else 1)
    )
    found = fit("found", seen, at_once(config), mixed)
    apart = [found.of(each.iteration) / truth.of(each.iteration) for each in seen]
    assert np.percentile(apart, 5) > 0.96 and np.percentile(apart, 95) < 1.04
    left = residuals(found, [seen])
    assert 6 < left["mean_absolute_percent"] < 16 and 1 < left["outliers_percent"] < 4


def test_what_comes_at_once_takes_turns() -> None:
    """Four requests, 2 ms apart; one iteration answers three of them, 3 ms apart, another one."""
    config, costs = config_of(), Costs("straight", STRAIGHT)
    requests = [Request(id=i, at=0.0, prompt_ids=[1], num_tokens=2 + i // 3) for i in range(4)]
    served, iterations = told(config, costs, requests)
    seen = observe(config, served, iterations)
    apart = [
        each._replace(
            arrived_at=each.arrived_at + 0.002 * i, received_at=each.answered_at + 0.003 * i
        )
        for i, each in enumerate(served)
    ]
    together = Segment(None, None, False, seen, apart)
    others = [together._replace(**how) for how in ({"streamed": True}, {"users": 1}, {"rate": 9.0})]
    assert turns([together, *others]) == pytest.approx((0.002, 0.003))
    assert turns(others) == (0.0, 0.0)


def test_no_coefficient_is_negative() -> None:
    """y = 1 - x falls: without a negative slope its mean is what is left."""
    x = np.arange(4.0)
    found = nonnegative(np.column_stack([np.ones(4), x]), 4 - x, np.ones(4))
    assert found == pytest.approx([2.5, 0])
    assert list(nonnegative(np.empty((0, 2)), np.empty(0), np.empty(0))) == [0, 0]


@pytest.mark.nightly
def test_the_command_measures_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "KEPT", tmp_path)
    small = ["--model", "fake", "--max-model-len", "64", "--seconds", "0", "--out", str(tmp_path)]
    two_rows = ["--max-batch-size", "2"]
    with pytest.raises(ConfigError, match="no rounds of fake-server are kept"):
        ran("benchmarks.costs", *small, *two_rows, "--more")
    done = ran("benchmarks.costs", *small, *two_rows)
    assert done.returncode == 0, done.stderr
    costs = load(tmp_path / "fake-server.json")
    assert 1 in costs.decode
    # a sleep is never shorter than it was asked for
    assert costs.decode[1].iteration >= 1060 * US
    assert costs.gap + costs.gap_row > 0 and costs.request > 0 and costs.answer > 0
    assert costs.request_turn > 0
    told = json.loads((tmp_path / "fake-server.json").read_text())
    assert told["config"]["model"] == "fake" and told["n_blocks"] == 8 and told["commit"]
    assert told["residuals"]["held_out"]["iterations"] > 20
    assert "held_out: all time" in done.stdout and "held_out_streams" in done.stdout
    assert told["rounds"] == 1 and ran("benchmarks.costs", *small, *two_rows, "--more")
    more = json.loads((tmp_path / "fake-server.json").read_text())
    assert more["rounds"] == 2
    n = [each["residuals"]["held_out"]["iterations"] for each in (told, more)]
    assert n[1] > 1.5 * n[0], "both rounds are judged"
    with pytest.raises(ConfigError, match="other settings"):
        ran("benchmarks.costs", *small, "--max-batch-size", "1", "--more")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "fake", "--name", "fake"], "another --name"),
        (["--model", "fake", "--order", "sjf"], "unknown flag --order"),
    ],
)
def test_what_cannot_be_measured_is_said(arguments: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ran("benchmarks.costs", *arguments)
