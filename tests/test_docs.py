"""The documentation as a site."""

from __future__ import annotations

import functools
import http.server
import inspect
import json
import re
import shlex
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from compare.variants import parse_modes
from docs.course import test_mine as course
from docs.site.__main__ import (
    BUILT,
    COLUMNS,
    COMMANDS,
    LINK,
    ROOT,
    SEARCHED,
    Pages,
    folded,
    make_html,
    tracked,
)
from docs.site.__main__ import PAGES as COPIED
from scheduling.policies import Dynamic, Fair, NoBatching, Order, Policy, Sjf, Static, Windowed
from scheduling.policies import base as helpers
from scheduling.policies.base import View
from scheduling.prefix_cache import Account
from scheduling.user_policies import SOURCES
from server.live.history import Cell
from simulate.saved_page import histories
from tests.counts import nightly_but
from tests.programs import output
from tests.server.live.shown import iterations
from tests.test_readme import BLOCKS, PAGES, TEXT, of

ASKED = (  # by new users, of the docs
    *("overload", "slow request", "csv", "pandas", "kubernetes", "docker", "resume", "price"),
    *("energy", "regression", "CI"),
)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def test_code_that_a_page_links_to_is_a_page_and_claims_have_a_verdict_each(tmp_path: Path) -> None:
    Pages(tracked(), tmp_path).write()
    field = (tmp_path / "docs" / "field.md").read_text()
    assert "[static.py](../scheduling/policies/static.py.md)" in field
    assert "[drawn](../index.md#the-four-modes)" in field and "<!--" not in field
    assert "```text\n  " in (tmp_path / "docs" / "course" / "03-static.md").read_text()
    static = (tmp_path / "scheduling" / "policies" / "static.py.md").read_text()
    assert "class Static(" in static
    rows = [line for line in (tmp_path / "claims.md").read_text().splitlines() if line[:3] == "| W"]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert len(rows) > 20 and all(len(row) == 6 and all(row[:5]) for row in cells)
    dead = [link for link in LINK.findall("".join(rows)) if not (tmp_path / link).exists()]
    assert dead == [], "claims.md had one, of a page beside docs/field.md"


def test_wide_commands_become_lines_with_their_comments_above() -> None:
    command = './b.sh --json \'{"a": "b  c"}\' ' + " ".join(["--flag value"] * 9)
    shown = folded(f"./a.sh --short 1    # why\n{command}\n")
    assert shown.startswith(
        '# why\n./a.sh --short 1\n./b.sh --json \'{"a": "b  c"}\' --flag value '
    )
    assert shown.count(" \\\n    --flag value") == 1, "a flag keeps its value"
    assert shown.replace(" \\\n    ", " ").endswith(f"\n{command}\n")
    assert folded("./a.sh  # narrow\n") == "./a.sh  # narrow\n"
    blocks = [folded(block) for text in TEXT.values() for block in COMMANDS.findall(text)]
    lines = [line for block in blocks for line in block.splitlines() if line[:1] != "#"]
    assert not [each for each in lines if len(each) > COLUMNS and " --" in each[:COLUMNS].strip()]


def test_what_readers_look_for_leads_to_a_guide_before_code(tmp_path: Path) -> None:
    Pages(tracked(), tmp_path).write()
    led = [word for words in SEARCHED.values() for word in words]
    assert sorted(led) == sorted(ASKED)
    guides = (ROOT / "docs" / "site" / "mkdocs.yml").read_text()
    for page, words in SEARCHED.items():
        assert f": {page}\n" in guides, "a page of the menu"
        assert f"tags: {json.dumps(words)}\n" in (tmp_path / page).read_text()
    assert '\nsearch: {"boost": 0.1}\n' in (tmp_path / "app.py.md").read_text()


@pytest.fixture(scope="module")
def site() -> None:
    pytest.importorskip("mkdocs", reason="not installed: pip install -r requirements-docs.txt")
    assert subprocess.run([ROOT / "docs.sh", "--build"]).returncode == 0


@pytest.mark.extra
@pytest.mark.alone
@pytest.mark.usefixtures("site")
def test_the_site_finds_what_readers_look_for_and_cuts_no_line(opened: Callable[..., Any]) -> None:
    show = functools.partial(Quiet, directory=str(BUILT))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), show) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{served.server_port}"
        tab = opened(f"{url}/docs/policies.html")
        cut = "[...document.querySelectorAll('pre > code')].map(e => e.scrollWidth - e.clientWidth)"
        assert max(tab.evaluate(cut)) <= 0
        for page, words in SEARCHED.items():
            for word in words:
                tab.fill(".md-search__input", word)
                tab.press(".md-search__input", "End")  # it listens to keys
                found = tab.locator(".md-search-result__link")
                html = page.removeprefix("docs/").replace(".md", ".html")
                found.and_(tab.locator(f"[href*='{html}']")).first.wait_for()
                assert html in found.first.get_attribute("href"), word
        served.shutdown()


@pytest.mark.extra
@pytest.mark.alone  # it takes the whole machine for a minute
@pytest.mark.usefixtures("site")
def test_the_site_is_built_and_a_link_to_nothing_fails_it() -> None:
    for page in ("index", "claims", "try", "docs/settings", "assets/live"):
        assert (BUILT / f"{page}.html").is_file(), page
    links = re.findall(r'(?:href|src)="([^":#?]+)["#?]', (BUILT / "try.html").read_text())
    assert [each for each in links if not (BUILT / each).exists()] == []  # MkDocs checks no HTML
    dead = "docs/nothing.md"
    with (COPIED / "docs" / "cpu.md").open("a") as broken:
        broken.write(f"\n[dead](../{dead})\n")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        make_html()
    assert dead in failed.value.stderr


# ---- docs/course: exercises fail with a sentence, our own policies make their schedules

SOLUTIONS: dict[str, Policy | Order] = {
    "nobatch": NoBatching(),
    "static": Static(),
    "windowed": Windowed(batch_size_target=2, max_batch_delay_ms=2000),
    "dynamic": Dynamic(),
    "chunked": Dynamic(),
    "preemption": Dynamic(kv_reservation="demand", watermark=0),
    "sjf_aging": Sjf(aging=15),
    "fair": Fair(),
}
SHOWN = [
    shown
    for page in PAGES
    for shown in re.findall(r"```text (runs/\S+)\n(.*?)```", TEXT[page], re.DOTALL)
]  # folder of a run, and what is shown of it


@pytest.mark.parametrize("name", course.EXERCISES)
def test_a_stub_fails_and_our_own_policy_passes(name: str) -> None:
    assert course.problem(name, SOLUTIONS[name]) is None
    file = course.ROOT / "docs" / "course" / "mine" / f"{name}.py"
    if "NotImplementedError" not in file.read_text():
        pytest.skip("a reader has solved it")
    stub = course.mine(file)
    said = course.problem(name, stub)
    assert said and (page := re.fullmatch(r"write \w+: (\S+) says what it returns", said))
    assert course.ROOT / page[1] in PAGES
    del SOURCES[type(stub)]


def test_chapters_call_helpers_as_these_are() -> None:
    """Chapter 6 left out an argument that `tokens_to_compute` had got."""
    text = "".join(TEXT[page] for page in PAGES if page.parent.name == "course")
    owners = {"": (helpers,), "view.": (View, None), "account.": (Account, None)}
    called = set()
    for owner, name, given in re.findall(r"`((?:\w+\.)?)(\w+)\(([^()`]*)\)`", text):
        kind, *itself = owners.get(owner, (None,))
        if helper := getattr(kind, name, None):
            inspect.signature(helper).bind(*itself, *filter(None, given.split(",")))
            called.add(owner + name)
    assert {"tokens_to_compute", "start", "view.cached_tokens", "account.take"} <= called


def test_modes_that_a_page_compares_differ_in_name() -> None:
    """`static,….py:Static` of the course was refused: both would be static.json."""
    named = re.findall(r"--modes (\S+\.py:\w+)", "".join(TEXT.values()))
    assert named and all(parse_modes(modes) for modes in named)


def test_the_first_difference_is_a_sentence() -> None:
    said = course.problem("static", Static(compact_batches=True))
    assert f"docs/course/mine/static.py: {said}\n" in TEXT[course.ROOT / "docs/course/README.md"]
    said = course.problem("windowed", Static())
    assert said and "1, at: expected its beginning at 2 s; got its beginning at 0 s." in said


def test_the_contract_comes_after_the_schedule(tmp_path: Path) -> None:
    mine = "from scheduling.policies import Static\nclass Mine(Static): request_level = False"
    (tmp_path / "mine.py").write_text(mine)
    said = course.violation(tmp_path / "mine.py")
    assert said and "VIOLATED  any workload is served once, within all limits" in said


@pytest.mark.parametrize(("folder", "text"), nightly_but(SHOWN[:1], SHOWN))
@pytest.mark.usefixtures("undrawn")
def test_a_chapter_shows_what_its_command_prints(folder: str, text: str, tmp_path: Path) -> None:
    [command] = [argv for argv in of("./simulate.sh") if argv[-2:] == ["--out", folder]]
    shown = output("simulate", "", *command[:-1], str(tmp_path))
    lines = {line.strip() for line in shown.splitlines()}
    assert {line.strip() for line in text.splitlines()} <= lines


# ---- the live page shows the worked examples of README.md and docs/policies.md as these do

LINES = [line for page in PAGES for line in TEXT[page].splitlines()]
NOT_COMPUTED = "sw"


def examples() -> list[tuple[list[str], list[list[str]]]]:
    """Return each ./simulate.sh of a worked example, and the commands that show its run."""
    result: list[tuple[list[str], list[list[str]]]] = []
    lines = [line for block in BLOCKS for line in block.splitlines() if line]
    for program, *arguments in (shlex.split(line, comments=True) for line in lines):
        if program == "./simulate.sh" and "second" in arguments:
            result.append((arguments, []))
        elif result and "simulate.saved_page" in arguments and result[-1][0][-1] in arguments:
            result[-1][1].append(arguments[2:])
    return result


@pytest.mark.parametrize(
    ("arguments", "shows"),
    nightly_but([each for each in examples() if each[0][-1] == "runs/modes"], examples()),
)
@pytest.mark.usefixtures("undrawn")
def test_examples_are_shown(arguments: list[str], shows: list[list[str]], tmp_path: Path) -> None:
    out, run = arguments[-1], tmp_path / "run"
    output("simulate", "", *arguments[:-1], str(run))
    shown = {name: json.loads(text) for name, text in histories(run)[0].items()}
    for name, history in shown.items():
        drawings = by_row(history), by_request(history)
        assert any(is_on_a_page(name, lines) for lines in drawings), (name, drawings)
    assert shows, f"nothing shows {out}"
    for show in shows:
        output("simulate.saved_page", "", *[str(run) if each == out else each for each in show])
        [data] = re.findall(r'id="runs">(.*?)</script>', (run / "live.html").read_text())
        for history in json.loads(data):
            assert history["iterations"] == shown[history["about"]["name"]]["iterations"]


def by_row(history: Mapping[str, Any]) -> list[str]:
    """A line for each row: the request of each second; small if idle, + if it is padding."""
    names = {id_: user or chr(ord("A") + id_) for id_, _, _, _, user, *_ in history["requests"]}

    def letter(cell: Cell) -> str:
        return names[cell.id].lower() if cell.kind == "i" else names[cell.id]

    columns: dict[int, list[str]] = {}
    for seen in iterations(history):
        cells = (cell for _, cell in sorted(seen.cells.items()) if computed(cell))
        columns[round(seen.at)] = [*map(letter, cells), *"+" * seen.padding]
    rows = zip_longest(*columns.values(), fillvalue="")
    return ["".join(f"{cell:<2}" for cell in row) for row in rows]


def by_request(history: Mapping[str, Any]) -> list[str]:
    """A line for each request: the prompt tokens of each second, or d for a decode."""
    rows: dict[int, str] = {}
    for number, seen in enumerate(iterations(history)):
        for cell in filter(computed, seen.cells.values()):
            work = "d" if cell.kind == "d" else str(cell.n)
            rows[cell.id] = f"{rows.get(cell.id, ''):<{2 * number}}{work}"
    return [f"{chr(ord('A') + id_)}  {rows[id_]}" for id_ in sorted(rows)]


def computed(cell: Cell) -> bool:
    return cell.kind not in NOT_COMPUTED


def is_on_a_page(name: str, rows: Sequence[str]) -> bool:
    """Return whether a page has these rows below each other, the first behind the name."""
    first, *others = [row.rstrip() for row in rows]
    for i, line in enumerate(LINES):
        for match in re.finditer(rf"\b{name}( \d+)? +{re.escape(first)}(?=  |$)", line):
            column = match.end() - len(first)
            below = [following[column:] for following in LINES[i + 1 : i + 1 + len(others)]]
            if all(re.match(rf"{re.escape(row)}(  |$)", text) for row, text in zip(others, below)):
                return True
    return False
