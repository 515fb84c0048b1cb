"""Texts of traces and servers that a terminal or a spreadsheet would obey."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from client import client
from client.progress import Output
from client.traces import Request, save_trace
from tests.programs import output, ran
from tests.stub import Handler, stub

EVIL = "\x1b]0;title\x07\x1b[31mBob\u202egnp\x9b2J\u2066"
SHOWN = "]0;title[31mBobgnp2J"
NAMES = [EVIL, "=1+1", "+1", "-1", "@a", "[/b]"]


def obeyed(text: str) -> set[str]:
    """Return the characters of a text that a terminal obeys."""
    return {each for each in text if not each.isprintable()} - {"\n"}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    requests = [
        Request(id=i, at=0.0, prompt="a", num_tokens=2, user=name) for i, name in enumerate(NAMES)
    ]
    save_trace(path := tmp_path / "trace.jsonl", requests)
    return path


@pytest.mark.usefixtures("undrawn")
def test_names_of_a_trace_are_plain_in_a_terminal_and_in_a_spreadsheet(
    trace: Path, tmp_path: Path
) -> None:
    shown = output("simulate", f"--modes dynamic --trace {trace} --out {tmp_path}/run")
    assert f"of {SHOWN} from" in shown and not obeyed(shown)
    with (tmp_path / "run" / "requests.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [row["user"] for row in rows] == [EVIL, "'=1+1", "'+1", "'-1", "'@a", "[/b]"]
    assert all(float(row["e2el_ms"]) >= 0 and int(row["requested_tokens"]) == 2 for row in rows)


def test_the_client_shows_names_and_errors_of_servers_plainly(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user [/b] ended it in a traceback."""
    with stub() as server:
        words = f"--url {server.url} --api openai --trace {trace} --figure {tmp_path}/f.png"
        shown = output("client.client", words)
        monkeypatch.setattr(Handler, "do_GET", lambda self: self._whole(500, {"error": EVIL}))
        failed = ran("client.client", *words.split())
    assert "of [/b] from" in " ".join(shown.split()) and not obeyed(shown)
    assert f"500 {SHOWN}" in failed.stderr and not obeyed(failed.stderr)


def test_a_completion_is_printed_plainly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client, "stream", lambda url, body, s, show, key: show(f"a\t{EVIL}\n"))
    client.one_prompt("http://h", client.parse(["--prompt", "hi"]))
    assert capsys.readouterr().out == f"a\t{SHOWN}\n\n"


def test_a_terminal_gets_no_control_characters_but_those_of_the_console() -> None:
    file = io.StringIO()
    Output(file=file, force_terminal=True).print(EVIL, style="red", highlight=False)
    assert file.getvalue() == f"\x1b[31m{SHOWN}\x1b[0m\n"
