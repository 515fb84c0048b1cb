"""Costs are found again from the report of a server in virtual time, whose costs are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client.traces import Request
from config.config import Config
from generate.auto import build
from scheduling.building import build_scheduler
from scheduling.inference import Inference
from simulate import PS, Loop, SimulatedReplica
from simulate.costs import Costs, Line, load, work
from simulate.fitting import Observed, Served, fit, observe, residuals
from simulate.measure_costs import RandomRequests, Segment, at_once, turns
from simulate.replica import Stretch
from tests.programs import output, ran

US = 10**6  # picoseconds
STRAIGHT = Costs.straight("straight", 1000 * US, 60 * US, 70_000, 10 * US, 3_000)
SMALL = {"model": "fake", "max_batch_size": 4, "token_budget": 64}


def config_of(**settings: Any) -> Config:
    return build("dynamic", SMALL | settings, {})


def reported(
    config: Config, costs: Costs, requests: Sequence[Request],
    slow: Callable[[], float] = lambda: 1.0, stream: bool = False,
) -> tuple[list[Served], list[list[float]]]:  # fmt: skip
    """The requests and the iterations of a server whose iterations take slow() times as long."""
    inferences = [Inference(request.ids, request.num_tokens) for request in requests]
    for inference in inferences:
        inference.streamed = stream
    loop = Loop()
    iterations: list[list[float]] = []

    def computed(stretch: Stretch) -> None:
        took = stretch.first / PS * slow()
        iterations.append([stretch.begun / PS, took, len(stretch.iteration.rows)])

    replica = SimulatedReplica(loop, build_scheduler(config), costs, computed=computed)
    loop.serve([(r.at, [inference]) for r, inference in zip(requests, inferences)], replica)
    served = []
    for i in inferences:
        assert i.admitted_at is not None and i.answered_at is not None
        times = i.arrived_at, i.arrived_at, i.admitted_at, i.answered_at, i.answered_at
        served.append(Served(*times, len(i.prompt_ids), i.num_tokens, stream))
    return served, iterations


def observed(
    config: Config, costs: Costs, slow: Callable[[], float] = lambda: 1.0
) -> tuple[list[Observed], list[list[Observed]]]:
    """A round of the benchmark's own traffic, and its runs in which plain requests come and go."""
    traffic = RandomRequests(config, seed=1)
    together = [(traffic.together(n), False) for n in at_once(config) for _ in range(3)]
    coming = [(traffic.other(30, rate), rate > 30) for rate in (5.0, 20.0, 40.0)]
    runs = [
        observe(config, *reported(config, costs, requests, slow, stream))
        for requests, stream in together + coming
    ]
    return [each for run in runs for each in run], runs[-3:-1]


def test_iterations_are_known_from_the_instants_of_admission() -> None:
    """Prompts of 100, 10 and 10 tokens are computed 64 at a time; the third one comes late."""
    config, costs = config_of(), STRAIGHT
    prompts = [(0.0, 100, 6), (0.0, 10, 1), (0.003, 10, 2)]
    requests = [
        Request(id=i, at=at, prompt_ids=[1] * n, num_tokens=tokens)
        for i, (at, n, tokens) in enumerate(prompts)
    ]
    seen = observe(config, *reported(config, costs, requests))
    rows = ([row for row in each.iteration.rows if not row.decodes] for each in seen)
    chunks = [[(row.start, row.n_tokens) for row in prompts] for prompts in rows]
    assert chunks[:4] == [[(0, 64)], [(64, 36), (0, 10)], [(0, 10)], []]
    assert [each.answered for each in seen] == [0, 1, 0, 1, 0, 0, 1]
    assert [each.gap is None for each in seen] == [False] * 6 + [True]
    # of the five threads' turns, 1 ms each, the last is over when the sixth iteration begins
    assert [each.beside for each in seen[:6]] == [True] * 5 + [False]


def test_what_does_not_go_together_is_refused() -> None:
    config = config_of()
    traffic = RandomRequests(config, seed=1).together(3)
    served, iterations = reported(config, STRAIGHT, traffic)
    iterations[2][2] += 1
    with pytest.raises(ValueError, match=r"iteration 2 had .* rows .*run it again"):
        observe(config, served, iterations)


GRAPHS = {1: 200 * US, 2: 380 * US, 4: 400 * US}  # one of 4 rows takes hardly longer than of 2


@pytest.mark.parametrize(("sizes", "truth", "lines"), [
    ("", replace(STRAIGHT, gap=90 * US, gap_row=5 * US, gap_answer=300 * US, gap_answer_row=40 * US,
                 gap_stream=70 * US, gap_stream_row=20 * US),
     [1, 2, 3, 4]),
    ("4,2,1", Costs("padded", {n: Line(t, context=9_000) for n, t in GRAPHS.items()},
                    prompts=Line(700 * US, prefill=10 * US, chunk_context=3_000)), [1, 2, 4]),
], ids=("a line", "decoder batch sizes"))  # fmt: skip
def test_known_costs_are_found(sizes: str, truth: Costs, lines: list[int]) -> None:
    config = config_of(**({"decoder_batch_sizes": sizes} if sizes else {}))
    seen, mixed = observed(config, truth)
    assert any(each.iteration.padding for each in seen) == bool(sizes)
    found = fit("found", seen, at_once(config), mixed)
    assert list(found.decode) == lines and {each.rows for each in seen} >= {*lines}
    for each in seen:
        assert found.of(each.iteration) == pytest.approx(truth.of(each.iteration), rel=1e-6)
        for answered in (0, 2) if not sizes else ():
            expected = truth.between(each.iteration, answered)
            assert found.between(each.iteration, answered) == pytest.approx(expected, rel=1e-6)
    amounts = [work(each.iteration) for each in seen if not each.decodes]
    terms = [(1, each.rows, *each[2:]) for each in amounts]  # tokens follow from the others
    assert np.linalg.matrix_rank(np.array(terms)) == 5, "the traffic tells all terms apart"
    errors = residuals(found, [seen])
    assert errors["mean_absolute_percent"] < 1e-4 and abs(errors["whole_percent"]) < 1e-4


def test_noise_is_averaged_and_stalls_are_left_out() -> None:
    """Iterations are apart by 10%, and every fiftieth takes four times as long."""
    config, rng = config_of(), np.random.default_rng(0)
    truth = STRAIGHT
    seen, mixed = observed(
        config, truth, lambda: rng.lognormal(0, 0.1) * (4 if rng.random() < 0.02 else 1)
    )
    found = fit("found", seen, at_once(config), mixed)
    apart = [found.of(each.iteration) / truth.of(each.iteration) for each in seen]
    assert np.percentile(apart, 5) > 0.96 and np.percentile(apart, 95) < 1.04
    errors = residuals(found, [seen])
    assert 6 < errors["mean_absolute_percent"] < 16 and 1 < errors["outliers_percent"] < 4


def test_what_comes_at_once_takes_turns() -> None:
    """Four requests, 2 ms apart; one iteration answers three of them, 3 ms apart, another one."""
    config, costs = config_of(), STRAIGHT
    requests = [Request(id=i, at=0.0, prompt_ids=[1], num_tokens=2 + i // 3) for i in range(4)]
    served, iterations = reported(config, costs, requests)
    apart = []
    for i, each in enumerate(served):
        times: dict[str, Any] = {"arrived_at": each.arrived_at + 0.002 * i}
        times["received_at"] = each.answered_at + 0.003 * i
        apart.append(each._replace(**times))
    together = Segment("burst", False, False, apart, iterations)
    others = [together._replace(streamed=True), together._replace(arrivals="loop")]
    assert turns([together, *others]) == pytest.approx((0.002, 0.003))
    assert turns(others) == (0.0, 0.0)


@pytest.mark.parametrize(("words", "sentence"), [
    ("--model fake --name fake", "give another --name"),
    ("--model fake --ahead", "unknown flag --ahead"),  # hides the gaps that are fitted
])  # fmt: skip
def test_bad_input_ends_with_a_sentence(words: str, sentence: str) -> None:
    done = ran("simulate.measure_costs", *words.split())
    assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.nightly
def test_the_command_measures_a_server(tmp_path: Path) -> None:
    small = f"--model fake --max-model-len 64 --max-batch-size 2 --seconds 0 --out {tmp_path}"
    assert "held_out: iterations" in output("simulate.measure_costs", small)
    costs = load(tmp_path / "fake-server.json")
    # a sleep is never shorter than was asked for
    assert costs.decode[1].iteration >= 1060 * US
    assert min(costs.gap + costs.gap_row, costs.request, costs.answer, costs.request_turn) > 0
    source = costs.source
    assert source["config"]["model"] == "fake" and source["n_blocks"] == 8 and source["commit"]
    assert source["rounds"] == 1 and source["residuals"]["held_out"]["iterations"] > 20
