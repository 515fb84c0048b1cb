"""Numbers on pages are those of the files that they name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compare.report import quotes
from tests.servers import ROOT


@pytest.mark.parametrize("page", quotes.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_says_what_its_files_do(page: Path) -> None:
    text, differing = quotes.renewed(page.read_text())
    assert differing == [], "python -m compare.report.quotes --write"
    assert " ± " not in quotes.QUOTE.sub("", text), "an interval without the file it comes from"


PAGE = """\
Costs <!-- results/a.json#fronts/name=ray/seeds/*/ms:.1f -->{ms}<!-- end --> ms.

<!-- results/a.md#table 2 -->{table}<!-- end -->
"""


def test_a_number_that_its_file_does_not_have_is_named_and_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotes, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    fronts = [
        {"name": "plain", "seeds": [{"ms": 9.0}]},
        {"name": "ray", "seeds": [{"ms": 1.0}, {"ms": 3.0}]},
    ]
    (tmp_path / "results" / "a.json").write_text(json.dumps({"fronts": fronts, "n": -0.5}))
    (tmp_path / "results" / "a.md").write_text("# a\n\n| x |\n\ntext\n\n| y |\n| --- |\n| 1 |\n")
    old = PAGE.format(ms="1.9 ± 12.7", table="| y |")
    new, differing = quotes.renewed(old)
    assert len(differing) == 2 and "fronts" in differing[0] and "table 2" in differing[1]
    assert new == PAGE.format(ms="2.0 ± 12.7", table="\n| y |\n| --- |\n| 1 |\n\n")
    assert quotes.renewed(new) == (new, [])
    assert quotes.quoted("results/a.json", "n:.2f") == "−0.50"
    two = "fronts/name=ray/seeds/*/ms {} fronts/name=ray/seeds/*/ms:.1f"
    assert [quotes.quoted("results/a.json", two.format(sign)) for sign in "÷−"] == [
        "1.0 ± 0.0",
        "0.0 ± 0.0",
    ]
    (tmp_path / "results" / "b.md").write_text(
        "| a | b | c |\n| --- | --- | --- |\n| 1 | 2 | 3 |\n| 4 | 5 | 6 |\n"
    )
    some = quotes.quoted("results/b.md", "table 1 columns c;a rows 5")
    assert some == "| c | a |\n| --- | --- |\n| 6 | 4 |"
    gone = new.replace("ms:.1f", "s:.1f")
    text, [sentence] = quotes.renewed(gone)
    assert text == gone and "KeyError" in sentence
    (tmp_path / "README.md").write_text(old)
    for argv, code in ([], 1), (["--write"], 0), ([], 0):
        with pytest.raises(SystemExit) as ended:
            quotes.main(argv)
        assert int(ended.value.code or 0) == code
