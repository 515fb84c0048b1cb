"""Workloads of token ids, shared prefixes and conversations; Mooncake's traces."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client.draws import WorkloadError
from client.traces import Request, Trace, load_trace, replayed, save_trace
from client.workloads import Workload

GREEDY = "greedy,20,uniform:50:200"


def ids_of(requests: Sequence[Request]) -> list[list[int]]:
    assert all(request.prompt is None and request.prompt_ids for request in requests)
    return [request.prompt_ids or [] for request in requests]


def but_prompts(requests: Sequence[Request]) -> list[Request]:
    return [r.model_copy(update={"prompt": "", "prompt_ids": None}) for r in requests]


def test_prompts_of_ids_are_random_and_all_else_is_as_with_text() -> None:
    text = Workload(seed=3).requests(200, "poisson:5")
    requests = Workload(seed=3, prompts="ids").requests(200, "poisson:5")
    assert but_prompts(requests) == but_prompts(text)
    ids = ids_of(requests)
    assert [len(each) for each in ids] == [len(str(request.prompt).split()) for request in text]
    drawn = np.concatenate(ids)
    assert set(drawn) == set(range(256)), "every id that any tokenizer has, and no other"
    assert ids == ids_of(Workload(seed=3, prompts="ids").requests(200))
    assert ids != ids_of(Workload(seed=4, prompts="ids").requests(200))


@pytest.mark.parametrize(("zipf", "shares"), [(0, [1 / 3] * 3), (1, [6 / 11, 3 / 11, 2 / 11])])
def test_prompts_share_prefixes_as_often_as_zipfs_law_says(zipf: int, shares: list[float]) -> None:
    alone = Workload(seed=3, prompts="ids").requests(3000, "poisson:5")
    requests = Workload(seed=3, prefixes=f"3:40:{zipf}").requests(3000, "poisson:5")
    assert but_prompts(requests) == but_prompts(alone)
    assert [ids[40:] for ids in ids_of(requests)] == ids_of(alone), "only what comes first is new"
    times = Counter(tuple(ids[:40]) for ids in ids_of(requests))
    drawn = [n / 3000 for _, n in times.most_common()]
    assert drawn == pytest.approx(shares, abs=0.03)
    other = Workload(seed=4, prefixes=f"3:40:{zipf}").requests(3000)
    assert times.keys().isdisjoint(tuple(ids[:40]) for ids in ids_of(other)), "of each seed its own"


def test_the_rates_of_a_sweep_share_prefixes_and_nothing_else_of_their_prompts() -> None:
    """They meet one server: with one draw for all rates, a prefix cache had every prompt whole."""
    data = Workload(seed=3, prefixes="2:40:1")
    drawn = (data.requests(200, f"poisson:{rate}", scaled=True) for rate in (5, 6, 5))
    slow, fast, again = map(ids_of, drawn)
    assert slow == again, "every mode at the same rate gets the same prompts"
    assert {tuple(ids[:40]) for ids in slow} == {tuple(ids[:40]) for ids in fast}
    long = {tuple(ids) for ids in slow if len(ids) > 45}
    assert len(long) > 100 and long.isdisjoint(tuple(ids) for ids in fast)


@pytest.mark.parametrize(
    ("popularity", "shares"),
    [
        ("distinct", [1 / 3] * 3), ("uniform", [1 / 3] * 3), ("identical", [1]),
        ("skewed", [9 / 19, 6 / 19, 4 / 19]),  # each 1.5 times as often as the next
    ],
)  # fmt: skip
def test_adapters_are_as_popular_as_in_punica_s_paper(popularity: str, shares: list[float]) -> None:
    requests = Workload(seed=3, adapters=f"3:{popularity}").requests(3000)
    times = Counter(request.model for request in requests)
    drawn = [times[f"lora-{i}"] / 3000 for i in range(len(shares))]
    assert drawn == pytest.approx(shares, abs=0.03) and sum(drawn) == pytest.approx(1)
    if popularity == "distinct":
        assert len({request.model for request in requests[:3]}) == 3
    alone = Workload(seed=3).requests(3000)
    assert [r.model_copy(update={"model": None}) for r in requests] == list(alone)


def test_conversations_begin_as_the_arrival_says_and_go_on_after_answers() -> None:
    alone = Workload(seed=3).requests(3000)
    requests = Workload(seed=3, sessions="4:0.5").requests(3000, "poisson:5")
    firsts = [request for request in requests if request.after is None]
    opening = Workload(seed=3).requests(750, "poisson:5")
    assert [r.at for r in firsts] == [r.at for r in opening]
    by_id = {request.id: request for request in requests}
    for request in requests:
        if request.after is None:
            assert request.think_s is None and request.prompt == alone[request.id].prompt
        else:
            assert request.at == by_id[request.after].at
            assert request.prompt == f" {alone[request.id].prompt}", "its own words alone"
    assert len({r.after for r in requests}) == 2251, "three follow each first, one after the other"
    assert [r.num_tokens for r in requests] == [r.num_tokens for r in alone]
    think_s = [request.think_s for request in requests if request.think_s is not None]
    assert np.mean(think_s) == pytest.approx(0.5, abs=0.05) == np.std(think_s), "exponential"
    few = Workload(seed=3, sessions="4:0").requests(6, "constant:2")
    assert [r.after for r in few] == [None, 0, 1, 2, None, 4], "the last is cut short"


def test_conversations_can_begin_at_other_times_but_not_in_a_closed_loop() -> None:
    data = Workload(seed=3, sessions="3:1")
    slow = data.requests(9, "poisson:5")
    assert Trace.of(slow).sent_as("burst", 3) == data.requests(9, "burst") != slow
    with pytest.raises(WorkloadError, match="closed:2 sends a request after every answer"):
        data.requests(9, "closed:2")
    with pytest.raises(WorkloadError, match="closed:2 sends a request after every answer"):
        Trace.of(slow).sent_as("closed:2", 3)


@pytest.mark.parametrize(("options", "sentence"), [
    ({"prefixes": "4:64"}, "give K:TOKENS:ZIPF"),
    ({"prefixes": "0:64:1"}, "give K:TOKENS:ZIPF"),
    ({"prefixes": "4:64:-1"}, "give K:TOKENS:ZIPF"),
    ({"prefixes": "4:64:1", "prompts": "text"}, "leave out --prompts text"),
    ({"sessions": "3"}, "give TURNS:THINK_S"),
    ({"sessions": "0:1"}, "give TURNS:THINK_S"),
    ({"sessions": "3:-1"}, "give TURNS:THINK_S"),
    ({"sessions": "3:1", "prompts": "ids"}, "leave out --prompts ids and --prefixes"),
    ({"users": [GREEDY, GREEDY]}, "--users needs two users or more"),
    ({"users": [GREEDY, "b,2"]}, "unknown user 'b,2'; give NAME,RATE,LENGTHS"),
    ({"users": [GREEDY, "b,2,normal,9-3"]}, "unknown user 'b,2,normal,9-3'"),
    ({"users": [GREEDY, "b|c,2,normal"]}, "unknown user"),
    ({"users": [GREEDY, "b,2,zipf:3"]}, "--users 'b,2,zipf:3': unknown lengths 'zipf:3'"),
    ({"priorities": ["0.1:1", "0.8:2"]}, r"sum to 0.9; make it 1"),
    ({"priorities": ["1"]}, "give SHARE:LEVEL"),
    ({"priorities": ["1:-1"]}, "give SHARE:LEVEL"),
    ({"priorities": ["0.5:1", "0.5:1"]}, "give SHARE:LEVEL"),
    ({"priorities": ["0:1", "1:2"]}, "give SHARE:LEVEL"),
    ({"slo_mix": ["0.5:a=ttft:1", "0.4:b=tpot:1"]}, "sum to 0.9; make it 1"),
    ({"slo_mix": ["a=ttft:1"]}, "give SHARE:NAME=ttft:MS,tpot:MS"),
    ({"slo_mix": ["1:a=e2el:1"]}, "--slo-mix: 'a=e2el:1' is no class; write NAME=ttft:MS"),
    ({"adapters": "4"}, "unknown adapters '4'; give N:DISTRIBUTION of distinct, uniform"),
    ({"adapters": "0:uniform"}, "unknown adapters"),
])  # fmt: skip
def test_options_that_contradict_others_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WorkloadError, match=sentence):
        Workload(**options)


@pytest.mark.parametrize("options", [
    {},
    {"prefixes": "2:5:1"},
    {"sessions": "3:0.5"},
    {"priorities": ["0.5:1", "0.5:0"]},
    {"slo_mix": ["0.5:a=ttft:9,tpot:3.5", "0.5:b=tpot:2"]},
    {"adapters": "3:distinct"},
    {"users": ["a,9,fixed:2", "b,9,fixed:3"]},
])  # fmt: skip
def test_every_workload_is_the_same_from_a_file(options: dict[str, Any], tmp_path: Path) -> None:
    requests = Workload(seed=1, **options).requests(20, "poisson:3")
    save_trace(path := tmp_path / "trace.jsonl", requests)
    assert load_trace(path) == requests
    assert ('"user"' in path.read_text()) == ("users" in options), "some servers refuse the field"


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
    ([FIRST | {"priority": -1}], "line 1: priority: "),
    ([FIRST, LATER | {"after": 7}], "line 2: after: no line before it has the id 7"),
    ([FIRST, LATER, LATER | {"id": 2}], "line 3: after: another request follows 0 already"),
    ([FIRST | {"think_s": 1}], "line 1: .* both after and think_s"),
    ([FIRST, LATER | {"think_s": None}], "line 2: .* both after and think_s"),
    ([FIRST, LATER | {"think_s": -1}], "line 2: think_s: "),
    ([FIRST | {"users": 2}, LATER | {"users": 2}], "line 2: users: .*leave out after or users"),
    ([FIRST, LATER | IDS], "line 2: .*give prompt, not prompt_ids"),
    ([FIRST | IDS, LATER], "line 2: .*give prompt, not prompt_ids"),
])  # fmt: skip
def test_a_bad_trace_is_refused_by_line(lines: list[Any], sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(WorkloadError, match=sentence):
        load_trace(path)
    path.write_text("nonsense")
    with pytest.raises(WorkloadError, match="line 1: Invalid JSON"):
        load_trace(path)
    with pytest.raises(WorkloadError, match="cannot read"):
        load_trace(tmp_path / "absent.jsonl")


KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


def test_mooncakes_traces_are_read_as_they_are_or_scaled(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    asked = (3000, 1100, 500, [0, 1, 2]), (3000, 1024, 512, [0, 1]), (4500, 700, 1, [0, 9])
    lines = [dict(zip(KEYS, each)) for each in (*asked, (6000, 3, 1, [9]))]
    path.write_text("\n".join(map(json.dumps, lines)))
    whole = load_trace(path)
    assert [r.at for r in whole] == [0, 0, 1.5, 3], "seconds from the first"
    assert [len(ids) for ids in ids_of(whole)] == [1100, 1024, 700, 3]
    assert [r.num_tokens for r in whole] == [500, 512, 1, 1]
    scaled, words = replayed(path, 16, None, 0)
    assert words["scale"] == 16
    burst, _ = replayed(path, 16, "burst", 0)
    assert [r.at for r in burst] == [0] * 4 and ids_of(burst) == ids_of(scaled)
    assert [len(ids) for ids in ids_of(scaled)] == [35, 32, 22, 1], "⌈tokens × 16 / 512⌉"
    assert [r.num_tokens for r in scaled] == [16, 16, 1, 1]
    for block, requests in ((512, whole), (16, scaled)):
        a, b, c, d = ids_of(requests)
        assert a[: 2 * block] == b and a[:block] == c[:block], "equal hash ids, equal prompts"
        assert a[block : 2 * block][:6] != c[block:][:6]
        assert c[block:][: len(d)] == d, "a block is the same wherever it stands"
        assert max(a) < 256
    save_trace(tmp_path / "ours.jsonl", scaled)
    assert load_trace(tmp_path / "ours.jsonl") == scaled
    with pytest.raises(WorkloadError, match="prompts cannot be scaled; leave out --scale"):
        replayed(tmp_path / "ours.jsonl", 16, None, 0)


GOOD = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}


@pytest.mark.parametrize(("line", "sentence"), [
    (GOOD | {"hash_ids": [0]}, "1 hash_ids for 600 tokens; .* would be 2"),
    (GOOD | {"hash_ids": [0, -1]}, "hash_ids: "),
    (GOOD | {"timestamp": -1}, "timestamp: "),
    (GOOD | {"timestamp": "0"}, "timestamp: "),
    (GOOD | {"timestamp": 1e15}, "timestamp: "),
    (GOOD | {"output_length": 10**30}, "output_length: "),
    (GOOD | {"input_length": 0, "hash_ids": []}, "input_length: "),
    (GOOD | {"output_length": 0}, "output_length: "),
    (GOOD | {"session": 1}, "session: Extra inputs"),
])  # fmt: skip
def test_a_bad_mooncake_is_refused(line: dict[str, object], sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(line))
    with pytest.raises(WorkloadError, match=f"mooncake.jsonl, line 2: {sentence}"):
        load_trace(path)
