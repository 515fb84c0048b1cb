"""docs/course: its exercises fail with a sentence, the project's own policies make their schedules,
and its pages show what their commands print.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from course import test_mine as course
from scheduling.policies import Dynamic, Fair, NoBatching, Order, Policy, Sjf, Static, Windowed, own
from tests.counts import nightly_but
from tests.programs import ran
from tests.test_readme import PAGES, TEXT, of

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
def test_a_stub_fails_with_its_chapter_and_the_projects_own_policy_passes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert course.problem(name, SOLUTIONS[name]) is None
    file = course.ROOT / "course" / "mine" / f"{name}.py"
    if "NotImplementedError" not in file.read_text():
        pytest.skip("a reader has solved it")
    monkeypatch.setenv(own.HANDED_ON, "{}")
    stub = course.mine(file)
    said = course.problem(name, stub)
    assert said and (page := re.fullmatch(r"write \w+: (\S+) says what it returns", said))
    assert course.ROOT / page[1] in PAGES
    del own.SOURCES[type(stub)]


def test_the_first_difference_is_a_sentence() -> None:
    said = course.problem("static", Static(compact_batches=True))
    assert f"course/mine/static.py: {said}\n" in TEXT[course.ROOT / "docs/course/README.md"]
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
    done = ran("simulate", *command[:-1], str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = {line.strip() for line in done.stdout.splitlines()}
    assert {line.strip() for line in text.splitlines()} <= lines
