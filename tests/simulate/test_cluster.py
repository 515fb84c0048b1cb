"""Runs that a Ray cluster of two nodes shares, where Ray is installed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simulate.cluster import Cluster
from tests.programs import output
from tests.simulate.test_simulated import SMALL

pytestmark = [pytest.mark.extra, pytest.mark.alone]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "200")  # on a busy machine
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed")
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    yield cluster
    cluster.shutdown()


@pytest.mark.usefixtures("undrawn")
def test_it_writes_the_same_and_repeats_a_lost_machines_calls(nodes: Any, tmp_path: Path) -> None:
    tables = []
    for where in ("--jobs 1", f"--ray {nodes.address}"):
        out = tmp_path / where.split()[0]
        output("simulate", f"{SMALL} --arrival poisson:50 --repeats 2 {where} --out {out}")
        tables.append([(out / f"seed-{n}" / "dynamic.json").read_bytes() for n in range(2)])
    assert tables[0] == tables[1]

    def begin(n: int) -> int:  # of this test alone, so that its code travels
        with (tmp_path / str(n)).open("a") as began:
            began.write("x")
        time.sleep(2)
        return n

    second = nodes.add_node(num_cpus=1)
    with Cluster(nodes.address) as workers:
        futures = [workers.submit(begin, n) for n in range(4)]
        while sum(file.name.isdigit() for file in tmp_path.iterdir()) < 2:
            time.sleep(0.01)
        nodes.remove_node(second)
        assert [workers.result(future) for future in futures] == [0, 1, 2, 3]
    assert sum(len((tmp_path / str(n)).read_text()) for n in range(4)) > 4
