"""Runs that others published: their loads, and errors of means."""

from __future__ import annotations

import numpy as np
import pytest

from lab.studies import published
from lab.studies.published import COSTS, LOADS, MEASURES, OURS, PART, PROMPTS, Load
from simulate.costs import load


def test_requests_fill_each_stage_and_repeat_their_prompts() -> None:
    trace = published.requests(LOADS["codegen"])
    at = np.array([request.at for request in trace])
    assert len(trace) == 9000 // PART
    assert at[3000 // PART - 1] == pytest.approx(600 / PART)
    assert at[-1] == pytest.approx(1200 / PART)
    prompts = [tuple(request.prompt_ids or ()) for request in trace]
    assert len({*prompts}) == PROMPTS and prompts[PROMPTS:] == prompts[:-PROMPTS]
    assert {len(prompt) for prompt in prompts} == {566} and len({p[:100] for p in prompts}) == 10


def test_errors_are_those_of_the_published_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that took what is foreseen has no error, whatever others foresaw; stages and models
    without costs are left out.
    """
    monkeypatch.setitem(LOADS, "codegen", Load(10, 20, 8, [(5.0, 20.0)]))
    pair, name = next(iter(COSTS.items()))
    means = published.foreseen(load(name), LOADS["codegen"], 2048)
    row = dict(zip(("model", "hardware", "tp"), pair), exp_id="1", simulator="other")
    row |= {"workload": "codegen", "max_num_batched_tokens": "2048"}
    rows = [
        {**row, "metric_name": metric, "stage_index": stage, "predicted": str(1.1 * ms)}
        | {"actual": str(ms)}
        for metric, measure in MEASURES.items()
        for stage in ("0", "-1")
        for ms in [means[measure]]
    ]
    found = published.errors([*rows, {**rows[1], "model": "another/model"}])
    assert [*found] == ["Llama-3.1-8B-Instruct"]
    for measure in MEASURES.values():
        assert found["Llama-3.1-8B-Instruct"][OURS][measure] == pytest.approx([0], abs=1e-9)
        assert found["Llama-3.1-8B-Instruct"]["other"][measure] == pytest.approx([10])
    assert published.table(rows).count("\n") == 3
