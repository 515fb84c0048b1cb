"""The costs of runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from client.price import costs
from client.results import Result
from client.runs import load
from tests.programs import output

RUN = Result(wall_clock_s=1800.0, total_output_tokens=4_000_000, goodput=2.0)


def test_a_run_costs_its_machines() -> None:
    assert costs(RUN, 2.0) == {
        "cost_per_million_tokens": 0.25, "cost_per_thousand_within": pytest.approx(1 / 3.6)
    }  # fmt: skip
    # two replicas, of which one began in the last quarter of an hour; the warm-up is not counted
    changes = [[0.0, 1, 0], [2700.0, 1, 1]]
    twice = replace(RUN, server={"replicas": {"changes": changes, "end_s": 3600.0}})
    assert costs(twice, 2.0)["cost_per_million_tokens"] == 0.375
    nothing = replace(RUN, total_output_tokens=0, goodput=None)
    assert set(costs(nothing, 2.0).values()) == {None}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("more", ["", "--warm-up 150", "--max-seconds 2"])
def test_replicas_are_paid_for_as_long_as_what_they_sell_takes(more: str, tmp_path: Path) -> None:
    """A run that is cut has replicas, too; a warm-up's seconds are not paid for."""
    words = f"--modes dynamic --replicas 2 --numsamples 300 --arrival poisson:100 {more} --price 1"
    output("simulate", f"{words} --out {tmp_path}")
    result = load(tmp_path).results[0]["dynamic"]
    assert result.cost_per_million_tokens
    paid = 2 * result.wall_clock_s / 3600
    found = result.cost_per_million_tokens * result.total_output_tokens / 1e6
    assert found == pytest.approx(paid, rel=1e-6)
    assert result.server["replicas"]["changes"][-1][1:] == [2, 0]


@pytest.mark.usefixtures("undrawn")
def test_a_price_adds_columns(tmp_path: Path) -> None:
    words = "--model fake --modes dynamic --numsamples 30 --lengths fixed:9 --arrival poisson:50 "
    words += f"--goodput e2el:500 --overwrite --out {tmp_path}"
    assert "cost per" not in output("simulate", words)
    assert "cost per" not in (tmp_path / "report.md").read_text().split("## Definitions")[0]
    assert "1,000 in" in output("simulate", f"{words} --price 3600")
    assert "| cost per million tokens |" in (tmp_path / "report.md").read_text()
    result = load(tmp_path).variants["dynamic"][0]
    assert result.goodput
    assert result.cost_per_thousand_within == pytest.approx(1e3 / result.goodput)
