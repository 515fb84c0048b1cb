"""Several runs compared: intervals, paired differences, equal texts, and tables of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client.results import Json, Result
from client.runs import SavedRun
from compare.analysis import difference, estimate, identical_outputs
from compare.report import tables
from compare.report.sentences import identity
from tests.compare.test_sweep import calm


def test_the_interval_is_students() -> None:
    found = estimate([1, 2, 3, 4, 5])  # t(0.975, 4) = 2.776, s = 1.581
    assert found.mean == 3 and found.half == pytest.approx(2.776 * 1.5811 / 5**0.5, rel=1e-3)
    assert estimate([7.0]).half is None and not estimate([7.0]).shown, "one seed has no interval"


def test_a_paired_difference_is_shown_where_seeds_differ_more_than_modes() -> None:
    rng = np.random.default_rng(1)
    seeds = rng.normal(100, 30, 6)  # what the traces do to both
    first, second = ((seeds + more + rng.normal(0, 1, 6)).tolist() for more in (0, 5))
    apart = difference(first, second)
    assert apart.shown and apart.mean == pytest.approx(5, abs=1.5)
    assert (estimate(first).half or 0) > 10, "unpaired, it would drown"
    assert not difference(first, first[::-1]).shown
    assert not difference([1.0, 2.0], [2.0, 1.0]).shown
    assert difference([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]).shown
    assert not difference([1.0], [9.0]).shown, "one seed shows no difference"


def test_a_difference_within_a_step_of_the_lattice_is_not_shown() -> None:
    """Five seeds that agree on two neighbouring rates do not say by how much the border moved."""
    one, two = [8.0] * 5, [8.724] * 5
    assert difference(one, two).shown and not difference(one, two, 0.0905).shown
    assert difference(one, [16.0] * 5, 0.0905).shown
    assert estimate(one, 0.0905).half == pytest.approx(0.724)

    def results(values: list[float]) -> list[Result]:
        return [calm(goodput_rate=value, output_throughput=value) for value in values]

    text = tables.differences_table({"a": results(one), "b": results(two)}, "a")
    assert "no difference shown (+0.724 ± 0.79)" in text
    assert text.count("no difference shown") == 1, "throughput has no lattice"
    whole = [{"a": [calm(goodput_rate=v) for v in run]} for run in (one, two)]
    text = tables.runs_table(dict(zip(("then", "now"), whole)), paired=True)
    assert "8 ± 0.724" in text and "(× 1.09, no difference shown)" in text


def test_a_difference_of_which_seeds_are_missing_has_no_interval() -> None:
    one = [calm(capacity=value) for value in (10.0, 10.1, 10.2, 10.0, 10.1)]
    two = [calm(capacity=value) for value in (20.0, 20.1, None, 20.2, 20.1)]
    [entry] = tables.differences({"a": one, "b": two}, "a")
    assert entry["capacity"].half is None and not entry["capacity"].shown
    text = tables.differences_table({"a": one, "b": two}, "a")
    assert "no difference shown (+10.1, not of all seeds)" in text
    assert "20.1 (4 of 5 seeds)" in tables.runs_table({"x": {"b": two}}, paired=True)


def test_a_difference_of_zero_has_no_sign() -> None:
    values = {"a": (1.0, 1.0), "b": (0.9, 0.7), "c": (1.1, 1.3)}
    results = {name: [calm(p50_ttft_ms=value) for value in of] for name, of in values.items()}
    assert tables.differences_table(results, "a").count("| no difference shown (0 ± 1) |") == 2


def test_texts_are_compared_over_the_requests_that_every_mode_answered() -> None:
    def result(*texts: str | None) -> Result:
        known = [{} if text is None else {"text": text} for text in texts]
        return Result(requests=[{"id": i} | text for i, text in enumerate(known)])

    def sentence(*outputs: Json, model: str = "demo", **of_b: str) -> str | None:
        config = {"model": model}
        results = [{"a": Result(config=config), "b": Result(config=config | of_b)}]
        common: dict[str, Any] = {"variants": {"a": {}, "b": {}}, "also": {}, "config": config}
        seeds: list[Json] = [common | {"identical_outputs": each} for each in outputs]
        return identity(SavedRun(Path(), seeds, results, []))

    found = identical_outputs({"a": result("x", "yes, it is", None), "b": result("x", "yes", "w")})
    assert found == {"requests": 2, "identical": 1, "parted_after": [0.3]}
    one, two = sentence(found), sentence(found, found)
    assert one and one.startswith("1 of 2 requests (50%)") and "Why" not in one
    because = sentence(found, dtype="bfloat16", attention="kernel", linear="onednn")
    assert because and because.startswith(one) and "the sums of --linear onednn depend" in because
    assert "begin to differ after 30 to 30% of their length" in one
    assert two and two.startswith("2 of 4 requests (50%)"), "of all seeds"
    assert sentence(identical_outputs({"a": result(None), "b": result("x")})) is None
    same = identical_outputs({"a": result("x"), "b": result("x")})
    assert sentence(same) == "All 1 requests that every variant answered got the same text in each."
    assert sentence(same, model="fake") is None, "its letters are no model's"
    empty = identical_outputs({"a": result("", "", "x"), "b": result("", "", "y")})
    assert empty == {"requests": 1, "identical": 0, "parted_after": [0.0]}, "'' shows nothing"
    assert sentence(identical_outputs({"a": result(""), "b": result("")})) is None
