"""studies.prefixes at a small size: what caching saves, where, and what is written of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scheduling.inference import Inference
from scheduling.prefix_cache import block_keys
from studies import prefixes
from tests.programs import ran

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("prefixes")
    small = ["--seeds", "1", "--requests", "80", "--loads", "0.8", "--processes", "1"]
    done = ran("studies.prefixes", *small, "--out", str(out))
    assert done.returncode == 0, done.stderr
    return out


def cases(folder: Path, **what: Any) -> list[dict[str, Any]]:
    found = json.loads((folder / "prefixes.json").read_text())["cases"]
    mine = [case for case in found if what.items() <= case.items()]
    return [case | case["seeds"][0] for case in mine]


def test_what_is_shared_is_computed_once_and_what_is_not_costs_nothing(folder: Path) -> None:
    for load in ("0.8", "burst"):
        for trace, most in (("shared", 40), ("conversations", 50), ("random", 100)):
            of = {c["variant"]: c for c in cases(folder, table="caching", trace=trace, load=load)}
            assert list(of)[-2:] == ["dynamic", "dynamic, caching"]
            assert len(of) == (4 if load == "burst" else 2)
            without, caching = of["dynamic"], of["dynamic, caching"]
            assert without["computed"] == 100 and caching["computed"] <= most
            assert caching["computed"] + caching["hits"] == pytest.approx(100)
            assert caching["requests"] == without["requests"] == 80
            if trace == "random":
                assert caching["seeds"] == without["seeds"], "to the last digit"
            else:
                assert caching["ttft_ms"] < without["ttft_ms"]


def test_a_larger_pool_finds_more_and_never_more_than_an_unlimited_one(folder: Path) -> None:
    for trace in ("64 prefixes", "conversations"):
        what = {"table": "pool", "trace": trace, "variant": "dynamic, caching"}
        shares = [case["hits_to_oracle"] for case in cases(folder, **what)]
        assert shares[0] < shares[-1] <= 100 + 1e-9 and len(shares) == len(prefixes.POOLS)


def test_the_oracle_knows_all_that_was_served_before() -> None:
    def served(prompt: list[int], completion: list[int], at: float) -> Inference:
        keys = block_keys(prompt + completion[:-1], prefixes.BLOCK)
        return Inference(prompt, len(completion), keys=keys, tokens=completion, arrived_at=at)

    first = served([1] * 40, [2] * 9, 0.0)
    turn = served([1] * 40 + [2] * 9 + [3], [4], 1.0)
    alike = served([1] * 32, [5], 2.0)
    assert prefixes.oracle([alike, turn, first]) == 0 + 48 + 16


def test_it_is_told_and_drawn(folder: Path) -> None:
    text = (folder / "prefixes.md").read_text()
    for said in ("## With and without", "| random | burst | static, caching |", "commit "):
        assert said in text
    assert "`--prefixes 16:256:1`" in text and "(prefixes.png)" in text
    assert (folder / "prefixes.png").stat().st_size > 50_000
