"""A recording's file: its content, what is found if it was cut or changed, and full disks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from generate.auto import build
from scheduling.policies import Dynamic, Plan, View
from scheduling.scheduler import Scheduler
from server.observers.recording import END, Entry, line_of, record
from server.serving import Server
from simulate import drive
from simulate.replay import ReplayError, replay, replay_file
from tests.servers import ROOT
from tests.virtual import Ask

SETTINGS = {
    "model": "fake", "max_batch_size": 4, "max_waiting": 2, "max_model_len": 20, "block_size": 4,
    "kv_cache": "6blocks", "kv_reservation": "demand", "prefix_caching": True, "token_budget": 8,
}  # fmt: skip
# one waits too long, the last one finds no room
ASKS = [
    Ask(0, prompt=9, tokens=6, content=1, n=2), Ask(1, prompt=9, tokens=4, content=1),
    Ask(2, prompt=3, tokens=12, content=2, user="ann", streamed=True),
    Ask(2, prompt=3, tokens=12, content=3, deadline=4.5), Ask(3, prompt=3, tokens=9, content=4),
    Ask(4, prompt=3, tokens=9, content=5), Ask(4, prompt=3, tokens=9, rows=3),
]  # fmt: skip


def recorded(**settings: Any) -> list[str]:
    """The lines of a server that serves ASKS, an iteration per second."""
    entries: list[Entry] = []
    scheduler = record(build("dynamic", SETTINGS | settings, {}), entries.append)
    drive(scheduler, [(ask.at, ask.group(4)) for ask in ASKS], lambda iteration: 1.0)
    scheduler.forget_prefixes()
    return [line_of(entry) for entry in [*entries, END]]


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return recorded()


def found(lines: list[str], **having: Any) -> int:
    """The first line that has these names and values; ... has any value."""
    return next(
        i
        for i, entry in enumerate(map(json.loads, lines))
        if all(entry.get(k) == v or (v is ... and k in entry) for k, v in having.items())
    )


def test_what_a_whole_recording_comes_to_is_said_in_a_sentence(lines: list[str]) -> None:
    rows = sum('"rows"' in line for line in lines)
    assert str(replay(lines)) == f"{rows} of {rows} iterations are equal, row by row."
    for call in ("enqueue", "schedule", "apply", "expire", "forget_prefixes"):
        assert found(lines, call=call)
    assert found(lines, error="overloaded") and found(lines, preempted=1)


CHANGES: dict[str, tuple[dict[str, Any], Callable[[Entry], Any], str]] = {
    "start of a row": (
        {"now": 1.0, "rows": ...}, lambda entry: entry["rows"][1].__setitem__(1, 77),
        "row 1 of request 1: start is 77 in the recording, and 8 in the replay",
    ),
    "number of rows": (
        {"now": 1.0, "rows": ...}, lambda entry: entry["rows"].append(entry["rows"][0]),
        "rows: 4 in the recording, 3 in the replay",
    ),
    "reason of a refusal": (
        {"error": ...}, lambda entry: entry.update(error="rate_limit_exceeded"),
        'error is "rate_limit_exceeded" in the recording, and "overloaded" in the replay',
    ),
    "an instant": (
        {"call": "expire"}, lambda entry: entry.update(now=4.25),
        "it changed something in the recording, and changes nothing in the replay",
    ),
    "an unknown request": (
        {"call": "expire"}, lambda entry: entry.update(call="fail", ids=[99], why="cancelled"),
        "request 99 is in flight in the recording, and not in the replay",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_is_found_and_named(name: str, lines: list[str]) -> None:
    having, change, said = CHANGES[name]
    changed, i = [*lines], found(lines, **having)
    change(entry := json.loads(lines[i]))
    changed[i] = json.dumps(entry)
    result = replay(changed)
    before, rows = (sum('"rows"' in line for line in part) for part in (lines[:i], lines))
    assert f"line {i + 1} ({entry['call']}): {said}" in str(result.first_difference)
    assert (result.equal, result.iterations) == (before, rows)
    assert str(result).startswith(f"{before} of {rows} iterations are equal")
    assert "The first difference is in " in str(result)


def test_a_policy_that_fails_fails_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Dynamic.plan

    def fails(policy: Dynamic, view: View) -> Plan:
        if not 3 <= view.now < 4:
            return plan(policy, view)
        raise ZeroDivisionError

    monkeypatch.setattr(Dynamic, "plan", fails)
    entries: list[Entry] = []
    scheduler = record(build("dynamic", SETTINGS, {}), entries.append)
    scheduler.enqueue(Ask(0).group(4), 0.0)
    for now in (2.0, 3.0, 4.0):
        try:
            iteration, _ = scheduler.schedule(now)
            scheduler.apply(iteration, [1], now)
        except ZeroDivisionError:
            pass
    lines = [line_of(entry) for entry in entries]
    assert found(lines, error="ZeroDivisionError") == 4
    assert replay(lines).first_difference is None
    monkeypatch.setattr(Dynamic, "plan", plan)
    assert 'error is "ZeroDivisionError" in the recording, and nothing' in str(replay(lines))


def test_a_line_that_is_missing_is_named(lines: list[str]) -> None:
    for i in range(1, len(lines) - 2):
        with pytest.raises(ReplayError, match=rf"line {i + 1}: .* call {i} is missing"):
            replay(lines[:i] + lines[i + 1 :])


def test_a_recording_that_ends_early_is_replayed_up_to_there_and_says_so(lines: list[str]) -> None:
    early = "A recording ends before the server did, and was replayed up to there."
    killed = [*lines[:30], lines[30][:-5]]
    for those in (killed, killed[:-1]):
        result = replay(those)
        assert result.calls == 29 and result.equal == result.iterations > 5
        assert result.first_difference is None and str(result).endswith(early)
    assert early not in str(replay(lines))


def test_a_file_may_hold_several_recordings(lines: list[str]) -> None:
    alone = replay(lines)
    several = [*lines, *lines[:30], *recorded(order="sjf")]
    result = replay(several)
    assert result.first_difference is None and result.iterations > 2 * alone.iterations
    assert "in 3 recordings. A recording ends before" in str(result)
    i = found(lines, waiting=3)
    several[i] = several[i].replace('"waiting":3', '"waiting":1')
    assert replay(several).equal > result.equal - alone.iterations, "the others are compared"


@pytest.mark.parametrize(("i", "line", "sentence"), [
    (5, '{"gap":"the disk is too slow"}', "line 6: calls are missing .* disk is too slow"),
    (5, '{"n":5,"call":"sch', "line 6: this is no line of a recording"),
    (5, '{"n":5,"call":"sing"}', "line 6: .* no call is named sing"),
    (5, "[]", "line 6: this is no line of a recording"),
    (1, '{"n":1,"call":"enqueue","group":[{"prompt_tokens":1},{"prompt_tokens":1},{"leader":0}]}',
     "line 2: a request has 3 completions of 2 prompts"),
    (0, '{"recording":2,"settings":{}}', "line 1: .* of version 2, .* version 1"),
    (0, '{"recording":1,"settings":{"mode":"dynamic"}}', "line 1: .*n_blocks.? is unknown"),
    (0, '{"recording":1,"settings":{"mode":"best"}}', "line 1: .*best.? is unknown or missing"),
    (0, '{"id":7,"state":"finished"}', "line 1: a recording begins with its settings"),
])  # fmt: skip
def test_what_cannot_be_replayed_says_why(
    i: int, line: str, sentence: str, lines: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "recording.jsonl"
    path.write_text("\n".join([*lines[:i], line, *lines[i + 1 :]]))
    with pytest.raises(ReplayError, match=f"{path}, {sentence}"):
        replay_file(str(path))


def test_a_recording_with_a_setting_that_is_unknown_names_it(lines: list[str]) -> None:
    first = json.loads(lines[0])
    first["settings"]["kv_cache_gb"] = 4.0
    said = "line 1: the recording has the setting kv_cache_gb, which this version does not know"
    with pytest.raises(ReplayError, match=rf"^{said} \(did you mean kv_cache\?\)\.$"):
        replay([json.dumps(first), *lines[1:]])


@pytest.mark.parametrize(
    ("content", "sentence"), [("", "no recording"), ("\xff", "not text"), (None, "No such file")]
)
def test_no_recording_is_refused(content: str | None, sentence: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "file").write_text(content, "latin-1")
    with pytest.raises(ReplayError, match=sentence):
        replay_file(str(tmp_path / "file"))


def test_a_recording_has_no_token_but_what_scheduling_goes_by(lines: list[str]) -> None:
    entries = [json.loads(line) for line in lines]
    members = [member for entry in entries for member in entry.get("group", [])]
    assert {name for member in members for name in member} == {
        "prompt_tokens", "num_tokens", "seed", "keys", "leader", "user", "streamed", "deadline"
    }  # fmt: skip
    applied = {name for entry in entries if entry.get("call") == "apply" for name in entry}
    assert applied == {"n", "call", "now", "keys", "answered"}


def test_a_server_that_is_not_recorded_has_a_plain_scheduler() -> None:
    server = Server(build("dynamic", SETTINGS, {}))
    assert type(server.scheduler) is Scheduler and server.recording is None
    server.close()


@pytest.mark.parametrize("with_gap", [True, False])
def test_no_line_is_half_there_when_the_file_is_full(with_gap: bool, tmp_path: Path) -> None:
    """A recording ends with a gap; a request log has each line that found room."""
    path = tmp_path / "recording.jsonl"
    program = f"""
import resource, sys, time
sys.path.insert(0, {str(ROOT)!r})
from server.observers.line_writer import LineWriter
from server.observers.recording import END, gap, line_of
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 2000))
writer = LineWriter({str(path)!r}, "the file", line_of, 100, gap if {with_gap} else None)
for n in range(4):
    for i in range(1, 11):
        writer.put({{"n": 10 * n + i, "call": "forget_prefixes"}})
    time.sleep(0.2)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
writer.put(END)
writer.close()
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    *whole, last = map(json.loads, path.read_text().splitlines())
    assert last == ({"gap": "File too large"} if with_gap else END)
    assert [line["n"] for line in whole] == list(range(1, 1 + len(whole))) != []
    assert len(whole) < 40 and "File too large; lines are lost" in ended.stderr
    assert "lines were lost" in ended.stderr


def test_a_recording_that_is_older_than_some_settings_is_replayed_with_their_defaults() -> None:
    """The committed one beside vLLM's was refused a day later, for want of --shed."""
    result = replay_file(str(ROOT / "results" / "live" / "ours.jsonl"))
    assert result.first_difference is None and result.equal == result.iterations > 200
