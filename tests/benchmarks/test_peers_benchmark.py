"""benchmarks.peers without a peer: fakes stand in for them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness
from benchmarks.peers import __main__ as peers
from benchmarks.peers import engines

BFLOAT16 = ["ours dtype bfloat16", "vLLM bfloat16", "OpenVINO bfloat16"]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Measures with fake interpreters, which log what they run; returns what is new in the log.

    Ours says 30 tok/s, 20 in its second round; a peer 10, in int8 an error.
    """
    log, model = tmp_path / "log", tmp_path / "small"
    model.mkdir()
    (model / "config.json").touch()

    def fake(name: str, speech: str) -> str:
        path = tmp_path / name
        path.write_text(f'#!/bin/bash\necho "$@" >>{log}\n{speech}\n')
        path.chmod(0o755)
        return str(path)

    ours = f"echo $((30 - 10 * ($(grep -c burst {log}) == 2))).0 tok/s"
    fails = 'case "$*" in *int8*) echo "no int8 here" >&2; exit 2; esac'
    peer = f"{fails}; echo A peer 1.2, 10.0 tok/s"
    both = fake("peer", peer)
    monkeypatch.setattr(sys, "executable", fake("ours", ours))
    monkeypatch.setattr(peers, "native_bfloat16", lambda: True)
    monkeypatch.setattr(peers, "ROWS", (64,))

    def measured(*more: str) -> list[str]:
        before = len(log.read_text().splitlines()) if log.exists() else 0
        words = ["--model", str(model), "--out", str(tmp_path / "out"), "--peers-python", both]
        monkeypatch.setattr(sys, "argv", ["peers", *words, "--vllm-python", both, *more])
        harness.run(peers.main)
        return log.read_text().splitlines()[before:]

    return measured


def saved(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "peers.json").read_text())
    return found


def test_all_run_in_turn_and_ratios_are_of_neighbours(
    bench: Callable[..., list[str]], tmp_path: Path
) -> None:
    ran = bench("--pairs", "2")
    of_bfloat16 = [line for line in ran if "int8" not in line]
    programs = [" ".join(line.split()[1:3]).removesuffix(" --threads") for line in of_bfloat16]
    peer = "benchmarks.peers.engines"
    once = ["benchmarks.burst", f"{peer} vllm", f"{peer} openvino"]
    assert programs == once + once[::-1]
    assert all(f"--model {tmp_path / 'small'} --n 64" in line for line in ran)
    first, second = (r for r in saved(tmp_path)["rounds"] if r["kind"] == "bfloat16")
    assert [run["runner"] for run in first["runs"]] == BFLOAT16
    assert [run["tokens_per_s"] for run in second["runs"]] == [20, 10, 10]
    page = (tmp_path / "out" / "peers.md").read_text()
    assert (
        "| small | 64 | ours dtype bfloat16 | vLLM bfloat16 | 25.0 (20.0 to 30.0) "
        "| 10.0 (10.0 to 10.0) | **2.50** (2.00 to 3.00) | 2 |"
    ) in page
    everything = page + json.dumps(saved(tmp_path))
    assert ", A peer 1.2; `" in page
    assert not any(str(tmp_path / name) in everything for name in ("small", "peer", "ours"))


def test_a_failed_peer_is_run_once(bench: Callable[..., list[str]], tmp_path: Path) -> None:
    ran = bench("--pairs", "2")
    assert [sum(f"{peer} --" in line for line in ran if "int8" in line) for peer in
            ("burst", "openvino", "ctranslate2")] == [4, 1, 1]  # fmt: skip
    assert "no int8 here" in (tmp_path / "out" / "peers.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("openvino", "No module named 'openvino'; install benchmarks/requirements-peers.txt"),
        ("vllm --n 65", "--n must be from 1 to 64"),
        ("ctranslate2", "make it by python -m benchmarks.peers.checkpoint"),
        ("vllm --dtype int8", "vllm computes in bfloat16 or float32 here"),
    ],
)
def test_bad_input_ends_with_a_sentence(
    arguments: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["engines", *arguments.split(), "--model", str(tmp_path)])
    (tmp_path / "openvino").mkdir()
    with pytest.raises(SystemExit) as ended:
        engines.main()
    assert ended.value.code == 2 and said in capsys.readouterr().err
