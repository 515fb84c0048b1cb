"""Traces: described in words, and read from files of our form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from client.draws import WorkloadError
from client.groups import describe, described
from client.traces import Request, load_trace
from client.workloads import Workload


def several(*whose: tuple[str | None, int | None]) -> list[Request]:
    """A request a second of these users and priorities."""
    return [
        Request(id=i, at=i, prompt="a", num_tokens=5, user=user, priority=priority)
        for i, (user, priority) in enumerate(whose)
    ]


FIVE, NINE = Workload("fixed:5"), "abcdefghi"
TALKS = Workload("fixed:5", sessions="2:0")
MIXED = Workload("fixed:5", slo_mix=["1:chat=ttft:9"])
DESCRIBED: dict[str, Sequence[Request]] = {
    "3 requests, TOKENS, all at once": FIVE.requests(3),
    "3 requests, TOKENS, 7 in flight: the next is sent when one is answered":
        FIVE.requests(3, "closed:7"),
    "100 requests, TOKENS, 20 requests per second with index of dispersion 0.00":
        FIVE.requests(100, "constant:20"),
    "20 requests, TOKENS, 20 requests per second": FIVE.requests(20, "constant:20"),
    "4 requests in 2 conversations, TOKENS, 5 conversations per second, each later turn 0 s on "
    "average after an answer": TALKS.requests(4, "constant:5"),
    "4 requests, TOKENS, 1 requests per second; 2 of ann from 0.0 to 1.0 s, 1 of no user from 2.0 "
    "to 2.0 s, 1 of bob from 3.0 to 3.0 s; 2 of level 1, 1 of level 2, 1 of the default level":
        several(("ann", 1), ("ann", 1), (None, None), ("bob", 2)),
    "9 requests, TOKENS, 1 requests per second; of 9 users": several(*((name, 0) for name in NINE)),
    "2 requests, TOKENS, all at once; 2 of class chat": MIXED.requests(2),
}  # fmt: skip


@pytest.mark.parametrize("words", DESCRIBED)
def test_a_load_is_described_as_it_was_realised(words: str) -> None:
    expected = words.replace("TOKENS", "5.0 completion tokens on average")
    assert described(describe(DESCRIBED[words])) == expected


def test_arrivals_that_come_in_bursts_are_dispersed() -> None:
    loads = [describe(FIVE.requests(2000, f"gamma:20:{cv}")) for cv in (0.3, 1, 3)]
    assert [load["requested_rate"] for load in loads] == pytest.approx([20] * 3, rel=0.15)
    even, poisson, bursty = [load["index_of_dispersion"] for load in loads]
    assert even < 0.3 and poisson == pytest.approx(1, abs=0.25) and bursty > 3


FIRST = {"id": 0, "at": 0, "prompt": "a", "num_tokens": 1}
LATER = {"id": 1, "at": 0, "prompt": "b", "num_tokens": 1, "after": 0, "think_s": 1}
IDS = {"prompt": None, "prompt_ids": [1]}


@pytest.mark.parametrize(("lines", "sentence"), [
    ([], "holds no requests"),
    ([FIRST, {"id": 1, "at": 0, "prompt": "a"}], "line 2: num_tokens: "),
    ([FIRST | {"at": -1}], "line 1: at: "),
    ([FIRST | {"at": 1.7e15}], "line 1: at: Input should be less than or equal to 1000000000"),
    ([FIRST | {"num_tokens": 10**30}], "line 1: num_tokens: "),
    ([FIRST | {"users": 10**10}], "line 1: users: "),
    ([FIRST | {"prompt": None, "prompt_ids": [10**30]}], "line 1: prompt_ids: "),
    ([FIRST | {"prompt": None}], "line 1: give either prompt or prompt_ids"),
    ([FIRST | {"prompt": ""}], "line 1: the prompt is empty"),
    ([FIRST, FIRST], "line 2: an earlier line has the id 0 too"),
    ([FIRST, FIRST | {"id": 1, "users": 2}], "numbers of users"),
    ([FIRST | {"user": ""}], "line 1: user: "),
    ([FIRST, FIRST | {"id": 1, "user": "NA"}], "line 2: NA is a missing value to pandas.read_csv"),
    ([FIRST | {"slo_class": "null"}], "line 1: null is a missing value to pandas.read_csv; choose"),
    ([FIRST | {"priority": -1}], "line 1: priority: "),
    ([FIRST, LATER | {"after": 7}], "line 2: after: no line before it has the id 7"),
    ([FIRST, LATER, LATER | {"id": 2}], "line 3: after: another request follows 0 already"),
    ([FIRST | {"think_s": 1}], "line 1: .* both after and think_s"),
    ([FIRST, LATER | {"think_s": None}], "line 2: .* both after and think_s"),
    ([FIRST, LATER | {"think_s": -1}], "line 2: think_s: "),
    ([FIRST | {"users": 2}, LATER | {"users": 2}], "line 2: users: .*leave out after or users"),
    ([FIRST | IDS, LATER], "line 2: prompt: a text cannot go on from prompt_ids"),
])  # fmt: skip
def test_a_bad_trace_is_refused_by_line(lines: list[Any], sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(WorkloadError, match=f"trace.jsonl.*{sentence}"):
        load_trace(path)
    path.write_text("nonsense")
    with pytest.raises(WorkloadError, match="line 1: Invalid JSON"):
        load_trace(path)
    with pytest.raises(WorkloadError, match="cannot read"):
        load_trace(tmp_path / "absent.jsonl")
