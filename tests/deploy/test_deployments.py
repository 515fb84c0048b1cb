"""A comparison of replicas behind a front end: the same trace and tables, counts that are those of
all replicas, and nothing left running.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from client.load import Watch
from client.wire import Plain
from compare import deployments, options
from compare.deployments import Deployed, Deployment, added_over_time, together
from compare.measure import Target, measure
from config import ConfigError
from observers.run import Run
from simulate import simulation as simulate
from stats import ROW_KINDS
from tests.fronts import skip_without
from tests.programs import ran
from tests.servers import asks


@pytest.mark.parametrize(
    ("front", "router"),
    [pytest.param("ray", "least_tokens", marks=pytest.mark.extra), ("proxy", "leastconn")],
)
@pytest.mark.nightly
def test_a_comparison_of_two_replicas_reports_the_sums_of_both(
    front: str, router: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In `dynamic` each token is one live row, on whichever replica, as long as no prompt is cut.

    Two prompts that came in one iteration had more tokens than --token-budget (256), so that one
    was computed in two: 311 live rows for 310 tokens, now and then on a busy machine.
    """
    skip_without(front)
    monkeypatch.setenv("STARTED_BY", str(tmp_path))  # all that is started has it, orphans too
    done = ran(
        "compare", "--skip-calibration", "--deploy", front, "--router", router,
        "--modes", "dynamic", "--model", "fake", "--fake-slowdown", "3", "--numsamples", "20",
        "--arrival", "poisson:40", "--lengths", "choice:5,20", "--token-budget", "2048",
        "--out", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    remaining = [
        process.info["cmdline"]
        for process in psutil.process_iter(["environ", "cmdline"])
        if (process.info["environ"] or {}).get("STARTED_BY") == str(tmp_path)
    ]
    assert remaining == []
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["deployment"] == {"front": front, "replicas": 2, "router": router}
    result = json.loads((tmp_path / "dynamic.json").read_text())
    tokens = sum(request["completion_tokens"] for request in result["requests"])
    assert result["completed"] == 20 and result["live_rows"] == tokens, result["server"]
    assert result["config"]["fake_slowdown"] == 3
    each = result["server"]["by_replica"].values()
    assert len(each) == 2 and sum(replica["completed"] for replica in each) == 20
    assert sum(replica["total_output_tokens"] for replica in each) == tokens
    assert result["largest_batch"] == max(replica["largest_batch"] for replica in each)
    assert min(replica["completed"] for replica in each) > 0, "both got some"
    over_time = result["occupancy_over_time"]
    busy_rows_s = sum(replica["occupancy"] * replica["busy_s"] * 32 for replica in each)
    assert sum(over_time["live"]) * over_time["bin_s"] == pytest.approx(busy_rows_s, rel=0.01)
    page = (tmp_path / "report.md").read_text()
    assert "each on 2 replicas behind" in page and f"router {router}" in page
    for name in result["server"]["by_replica"]:
        assert f"| dynamic | {name} |" in page


@pytest.mark.parametrize(
    ("parse", "argv", "sentence"),
    [
        (
            options.parse,
            "--replicas 2",
            "--replicas applies to servers behind a front end; add --dep",
        ),
        (options.parse, "--router prefix", "--router applies to servers behind a front"),
        (options.parse, "--deploy rya", "argument --deploy: invalid choice: 'rya'"),
        (options.parse, "--deploy proxy --replicas 0", "--replicas 0: give 1 or more"),
        (options.parse, "--deploy proxy --router prefix", "--deploy proxy has leastconn"),
        (options.parse, "--deploy ray", "pip install -r requirements-ray.txt"),
        (simulate.parse, "--deploy ray --replicas 2", "--deploy applies to running servers"),
    ],
)
def test_an_impossible_deployment_is_refused_before_any_server_starts(
    parse: Callable[[list[str]], Any], argv: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # Ray is not installed
    with pytest.raises(ConfigError) as caught:
        parse(argv.split())
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def run(rows: list[int], busy_s: float, occupied_s: float, largest: int) -> Run:
    result = Run(largest_batch=largest)
    result.seconds.update({"busy": busy_s, "occupied": occupied_s})
    result.counts.update({f"{kind}_rows": n for kind, n in zip(ROW_KINDS, rows)})
    result.counts.update({"finished": largest, "completion_tokens": rows[0], "prompt_tokens": 7})
    result.counts["draft_tokens"] = 9
    result.by_tokens[5], result.latency_by_tokens[5] = largest, busy_s
    result.samples = {"ttft": np.array([busy_s])}
    return result


def test_reports_of_single_servers_are_added_as_those_of_replicas_are() -> None:
    """Ray's ingress has all values; measures that need these are left out here."""
    a, b = run([30, 10, 0, 0, 4], 4.0, 1.0, 3), run([10, 0, 5, 0, 1], 1.0, 0.5, 9)
    head = {"mode": "dynamic", "model": "fake", "kv_blocks": 100}
    added, true = together([head | a.report(), head | b.report()]), (a + b).report()
    assert added["largest_batch"] == 9 and added["kv_blocks"] == 200
    assert added["occupancy"] == pytest.approx(1.5 / 5) and added["live_rows"] == 40
    for key in added.keys() & true.keys():
        assert added[key] == true[key], key
    assert not [key for key in added if key.startswith(("p50", "p99"))]
    assert not {"throughput", "output_throughput", "mean_ttft_ms"} & added.keys()


def test_rows_of_replicas_over_time_add_up() -> None:
    """One runs 2 rows from 0 to 4, the other 3 rows from 2 to 6; a third nothing."""
    total = added_over_time([[[0.0, 4.0, 2, 0, 0, 0, 0]], [[2.0, 4.0, 3, 0, 0, 0, 0]], []])
    thirds = [float(np.mean(part)) for part in np.array_split(total["live"], 3)]
    assert thirds == pytest.approx([2.0, 5.0, 3.0], abs=0.02)
    assert total["started_at"] == 0 and total["bin_s"] * len(total["live"]) == pytest.approx(6)
    assert added_over_time([[], []])["live"] == []


def test_without_the_counts_of_a_replaced_replica_no_sums_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [["a", "b"], ["a", "c"]]  # before and after

    def get(url: str, *_: Any, **__: Any) -> dict[str, Any]:
        return {"replicas": dict.fromkeys(names[1])}

    monkeypatch.setattr(deployments, "get", get)
    monkeypatch.setattr(Target, "begin", lambda self: None)
    monkeypatch.setattr(Target, "replay", lambda *_: [])
    deployment = Deployment("ray", 2, "power_of_two")
    target = Deployed("x", "http://x", Plain(), deployment=deployment, replicas=names[0])
    assert target.are_several
    result, _ = measure(target, asks(1, 1), {}, 1.0, Watch())
    assert result["live_rows"] is None and result["occupancy"] is None
    assert "a replica was replaced" in next(iter(result["errors"]))
