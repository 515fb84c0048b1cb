"""How many replicas: the answer of a case that can be worked out, and questions without one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client import plan
from config import build
from simulate.costs import FAKE, save
from tests.programs import ran

# nobatch with the fake line: 10 tokens take 1.06 ms each, and a prompt of 1 to 64 words besides;
# so a replica serves about 90 a second
ASKED = ["--modes", "nobatch", "--lengths", "fixed:10", "--arrival", "poisson:150"]


def planned(tmp_path: Path, *more: str) -> dict[str, Any]:
    arguments = ["--plan", *ASKED, "--numsamples", "1000", "--repeats", "4", *more]
    done = ran("client.simulate", *arguments, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    return dict(json.loads((tmp_path / "plan.json").read_text()))


def test_the_fewest_that_can_keep_up_are_found(tmp_path: Path) -> None:
    found = planned(
        tmp_path, "--slo", "e2el:100", "--attainment", "0.95", "--router", "least_requests"
    )
    [answer] = found["answers"]
    assert answer["fewest"] in (2, 3)
    judged = {each["replicas"]: each for each in answer["judged"]}
    fewest = judged[answer["fewest"]]
    fewer = judged[answer["fewest"] - 1]
    assert fewest["suffices"] == 1 and fewer["suffices"] < 0.95
    low, high = fewest["suffices_between"]
    assert low == pytest.approx(0.51, abs=0.01) and high == 1, "of four traces little is known"
    page = (tmp_path / "plan.md").read_text()
    assert "(simulated)" in page and f"| {answer['fewest']} ← |" in page
    assert (tmp_path / "plan.png").stat().st_size > 20_000


def test_one_trace_is_one_when_it_is_asked_for(tmp_path: Path) -> None:
    more = ["--slo", "e2el:1000", "--attainment", "0.5", "--repeats", "1"]
    found = planned(tmp_path, *more)
    assert found["question"]["seeds"] == [0]
    assert all(len(judged["attainments"]) == 1 for judged in found["answers"][0]["judged"])


def test_what_no_number_of_replicas_meets_is_said(tmp_path: Path) -> None:
    done = ran("client.simulate", "--plan", *ASKED, "--slo", "tpot:1", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "no number of replicas meets tpot ≤ 1 ms" in done.stderr and "0.0% do" in done.stderr


def test_limits_within_the_uncertainty_of_the_costs_have_no_answer(tmp_path: Path) -> None:
    """A token takes 1.06 ms, give or take 10%: two of eight traces never meet 1.16 ms."""
    held_out = {"of_runs_percent": [-16.45, 0.0, 16.45]}
    source = {
        "config": build("nobatch", {"model": "fake"}, {}).model_dump(mode="json"),
        "residuals": {"held_out": held_out},
    }
    save(replace(FAKE, source=source), costs := tmp_path / "unsure.json")
    limits = ["--slo", "tpot:1.16", "--numsamples", "300", "--repeats", "8"]
    done = ran("client.simulate", "--plan", *ASKED, *limits, "--costs", str(costs))
    assert done.returncode == 2
    assert "of the traces, and more are no better" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--plan", *ASKED], "--slo ttft:200"),
        (["--plan", "--slo", "ttft:9"], "--arrival poisson:200"),
        (["--plan", *ASKED, "--slo", "ttft:9", "--replicas", "3"], "leave out --replicas"),
        (["--plan", *ASKED, "--slo", "ttft:9", "--attainment", "99"], "1 at most"),
        (["--plan", *ASKED, "--slo", "tokens:9"], "--slo 'tokens:9': give ttft:MS"),
        (["--plan", *ASKED, "--slo", "ttft:9", "--step"], "leave out --step"),
        (["--slo", "ttft:9"], "of --plan; add it"),
        (["--replay=calls.jsonl", "--step"], "leave out all else"),
        (["--router", "random"], "add --replicas"),
    ],
)
def test_a_question_that_cannot_be_is_refused(arguments: list[str], said: str) -> None:
    done = ran("client.simulate", *arguments)
    assert done.returncode == 2 and said in done.stderr


def test_intervals() -> None:
    assert plan.wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-3)
    assert plan.wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-3)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 0.999])
def test_another_trace_lies_where_it_is_expected(share: float) -> None:
    # traces of 200 requests that differ by more than chance, and of which many meet all limits
    rng = np.random.default_rng(7)
    attained = rng.binomial(200, rng.beta(20 * share, 20 * (1 - share), (4_000, plan.SEEDS + 1)))
    intervals = [plan.predicted(others) for _, *others in attained]
    inside = np.mean([low <= one <= high for (low, high), one in zip(intervals, attained[:, 0])])
    assert plan.coverage(plan.SEEDS) > 0.95
    assert inside > 0.94, "0.951 or more, and what chance does to 4,000"
    if share == 0.5:
        assert inside < 0.96, "and it is no wider than that takes"
