"""The runs of which docs/ have pictures can still be made; a browser is not needed for that."""

from __future__ import annotations

import re
import shlex

import pytest

from benchmarks.screenshots import SHOTS, html
from simulate.simulation import parse
from tests.servers import ROOT


@pytest.mark.parametrize("name", SHOTS)
def test_a_picture_has_its_run_and_is_in_docs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = SHOTS[name].arguments
    told = re.findall(r'"name":"([^"]+)"', html(arguments))
    assert told == list(parse(shlex.split(arguments)).variants)
    path = ROOT / "docs" / f"live-{name}.png"
    assert path.stat().st_size < 120_000
    assert any(f"]({path.name})" in page.read_text() for page in path.parent.glob("*.md"))
