"""Each study at a small size, in virtual time, and claims that hold at any size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client.workloads import Workload
from lab.studies import fidelity, orders
from lab.studies.__main__ import NAMES, load
from lab.studies.runner import FinishedRuns, measured, write
from tests.programs import ran


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    less = {
        "grid": orders.SWEEPS["grid"]._replace(rows=(4, 32), loads=(0.5, 1.2)),
        "rows": orders.SWEEPS["rows"]._replace(rows=(8, 32)),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orders, "BURST", 300)
        patch.setattr(orders, "SWEEPS", less)
        patch.setattr("client.machine.hardware", dict)
        yield


@pytest.mark.nightly
def test_a_study_is_run_and_shown(tmp_path: Path) -> None:
    study, n = orders.STUDY, 63
    cases = [{**case, "seeds": [study.run(case, n, 0)]} for case in study.cases(n)]
    write(study, tmp_path, {"cases": cases, "requests": n, "seeds": 1})
    page = (tmp_path / "orders.md").read_text()
    assert page.startswith(f"# {study.title}\n") and "](orders.png)" in page
    assert page.count("\n| ") >= len(cases)


def test_every_study_has_its_module_and_every_module_its_study() -> None:
    modules = {path.stem for path in Path(orders.__file__).parent.glob("*.py")}
    programs = {"published"}  # of data that cannot be copied here
    parts = {"claims", "league", "own_vllm", "runner", "study", "virtual"}
    assert modules - parts - programs - {"__init__", "__main__"} == {*NAMES}
    assert [load(name).name for name in NAMES] == [*NAMES]
    shown = " ".join(ran("lab.studies").stdout.split())
    assert all(f"{name} {load(name).question}" in shown for name in NAMES)


@pytest.mark.parametrize(("simulated", "repeats", "verdict"), [
    (102.0, (100.0, 100.0), fidelity.MET),
    (94.0, (100.0, 100.0), fidelity.MISSED),
    (106.0, (104.0, 96.0), fidelity.BY_SPREAD),
    (115.0, (104.0, 96.0), fidelity.MISSED),
])  # fmt: skip
def test_an_error_is_judged_by_its_target_and_by_how_far_real_runs_are_apart(
    simulated: float, repeats: tuple[float, float], verdict: str
) -> None:
    def row(tokens: float) -> dict[str, Any]:
        times = dict.fromkeys(("e2e_s", "ttft_s", "tpot_s"), [tokens] * 1000)
        return {"capacity": tokens, **times, "failed": 0}

    seed = fidelity.compared([row(tokens) for tokens in repeats], row(simulated))
    assert seed["capacity_error"] == pytest.approx(simulated - 100)
    assert fidelity.verdict({"load": fidelity.BURST, "seeds": [seed]}, "capacity") == verdict
    loaded = {"load": "0.85", "seeds": [seed]}
    few = seed | {"requests": 1999}
    others = [loaded, loaded | {"load": "0.95"}, loaded | {"seeds": [few]}]
    reported = [fidelity.verdict(case, "p99") == fidelity.REPORTED for case in others]
    assert reported == [False, True, True]


@pytest.mark.nightly
def test_real_beside_simulated_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"kv_reservation": "demand", "kv_cache": "64blocks"}
    monkeypatch.setattr(fidelity, "VARIANTS", {"demand": ("dynamic", few)})
    monkeypatch.setattr(fidelity, "MODELS", {"fake": ("fake", {})})
    monkeypatch.setattr(fidelity, "PARTS", {"fake": {fidelity.PLAIN: (["demand"], (0.9,))}})
    kept = FinishedRuns(tmp_path / "fidelity.runs.jsonl", "")
    cases = measured(fidelity.STUDY, fidelity.cases(40, 2), 40, 1, kept)
    burst, loaded = cases[0]["seeds"][0].values()
    rate = 0.9 * burst["capacity"] / Workload().mean_num_tokens
    assert [case["seeds"][0]["0.9"]["rate"] for case in cases] == [loaded["rate"]] * 2
    assert loaded["rate"] == pytest.approx(rate, rel=1e-3)
    summary = fidelity.summarized(cases, 2)
    assert [case["load"] for case in summary] == ["burst", "0.9"]
    assert [case["seeds"][0]["requests"] for case in summary] == [80, 80]
    # the fake engine's own costs are the least that a server takes
    assert -90 < summary[1]["seeds"][0]["p50_error"] < 10
