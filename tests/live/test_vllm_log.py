"""Logs of vLLM on the page: a recording of vLLM 0.32 on a CPU (results/live), and lines that the
same server printed.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from compare.runs import RunError
from live import vllm_log
from live.__main__ import beside
from live.history import iterations
from live.timeline import events
from tests.servers import ROOT

RECORDING = ROOT / "results" / "live" / "vllm.jsonl"
LINE = (
    "(APIServer pid=7) INFO 11-25 04:42:{second:02} [loggers.py:199] Engine 000: Iteration({i}): "
    "{p} context requests, {n} context tokens, {d} generation requests, {g} generation tokens, "
    "iteration elapsed time: 500.00 ms, CPU KV cache usage: 9.4%\n"
)
HEAD = '{"vllm":"0.32","format":1}\n'


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(vllm_log.history(path)))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "vllm.log"


def test_a_recording_is_shown_as_vllm_computed_it() -> None:
    shown = read(RECORDING)
    steps = [json.loads(line) for line in RECORDING.read_text().splitlines()][1:]
    computed, made, recomputed = Counter[int](), Counter[int](), 0
    for step, iteration in zip(steps, iterations(shown), strict=True):
        cells = {cell.id: cell for cell in iteration.cells.values() if cell.kind != "s"}
        assert {id_: (c.start, c.n) for id_, c in cells.items()} == {
            id_: (start, n) for id_, start, n, _ in step["rows"]
        }
        assert (iteration.waiting, iteration.blocks_used) == (step["waiting"], step["blocks_used"])
        recomputed += sum(cell.kind == "r" for cell in cells.values())
        for id_, _, n, tokens in step["rows"]:
            computed[id_] += n
            made[id_] += tokens
    assert recomputed and any(step["preempted"] for step in steps)
    asked = {id_: (prompt, tokens) for id_, _, prompt, tokens, *_ in shown["requests"]}
    assert {id_: tokens for id_, _, _, _, tokens in shown["ended"]} == made
    assert made == {id_: tokens for id_, (_, tokens) in asked.items()} and len(made) == 30
    counters = [event["args"].get("tokens", 0) for event in events(shown) if event["ph"] == "C"]
    assert sum(counters) == sum(computed.values())
    assert min(arrived_at for _, arrived_at, *_ in shown["requests"]) == 0


def test_vllms_own_log_names_nobody(log: Path) -> None:
    """Two prompts of unknown length, then one of 7 tokens; then two rows that compute 9 tokens of
    what has decoded, since one was preempted, and nobody knows which.
    """
    log.write_text(
        "INFO 11-25 04:42:00 [core.py:1] hello\n"
        + LINE.format(second=10, i=3, p=2, n=30, d=0, g=0)
        + LINE.format(second=10, i=4, p=1, n=7, d=1, g=1)
        + LINE.format(second=13, i=5, p=0, n=0, d=2, g=9)
        + LINE.format(second=13, i=6, p=0, n=0, d=1, g=1)[:99]
    )
    shown = read(log)
    seen = list(shown["iterations"])
    assert [at for at, *_ in seen] == [0, 0.5, 3] and {values[2] for values in seen} == {-1}
    kinds = [sorted((c.kind, c.n) for c in i.cells.values()) for i in iterations(shown)]
    assert kinds == [[("p", -1), ("p", -1)], [("d", 1), ("p", 7)], [("u", 0), ("u", 0)]]
    assert all(cell.id < 0 for i in iterations(shown) for cell in i.cells.values())
    assert shown["requests"] == shown["ended"] == shown["snapshots"] == []
    names = Counter(event["name"] for event in events(shown) if event["ph"] in "XC")
    assert names == {
        "? prefill": 3, "? decode": 1, "? unknown": 2, "tokens of an iteration": 1,
    }  # fmt: skip
    assert "last line was cut off" in shown["about"]["note"] and "Grey" in shown["about"]["missing"]


def test_vllms_first_request_arrives_with_that_of_the_server_beside_it() -> None:
    ours = {name: json.dumps({"requests": [[0, 2.5], [1, 0.25]]}) for name in ("a", "dynamic")}
    texts = beside(ours, None, RECORDING)
    assert list(texts) == ["dynamic", "vllm"]
    assert min(at for _, at, *_ in json.loads(texts["vllm"])["requests"]) == 0.25
    with pytest.raises(RunError, match="name one with --of"):
        beside(ours, ["a", "dynamic"], RECORDING)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("hello\n", "is no log of vLLM; make one with --enable-logging-iteration-details"),
        ('{"vllm":"0.40","format":2}\n', "it is of format 2, and this code reads format 1"),
        (LINE.format(second=1, i=0, p=1, n=9, d=0, g=0) * 2, "iteration 0 comes after iteration 0"),
        (HEAD, "it has no iterations yet; send vLLM some requests first"),
        (HEAD.replace("format", "for"), "is not as a recording of vLLM should be: KeyError"),
        (HEAD + "{\n" + HEAD, "line 2 is no JSON"),
    ],
)
def test_a_log_that_cannot_be_shown_is_refused(text: str, sentence: str, log: Path) -> None:
    log.write_text(text)
    with pytest.raises(RunError) as refused:
        vllm_log.history(log)
    assert str(refused.value).startswith(str(log)) and sentence in str(refused.value)
