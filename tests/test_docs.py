"""The documentation as a site."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from docs.site.__main__ import BUILT, PAGES, ROOT, Pages, tracked


def test_code_that_a_page_links_to_is_a_page_and_claims_have_a_verdict_each(tmp_path: Path) -> None:
    Pages(tracked(), tmp_path).write()
    field = (tmp_path / "docs" / "field.md").read_text()
    assert "[static.py](../scheduling/policies/static.py.md)" in field
    assert "[drawn](../index.md#the-four-modes)" in field and "<!--" not in field
    static = (tmp_path / "scheduling" / "policies" / "static.py.md").read_text()
    assert "class Static(" in static
    rows = [line for line in (tmp_path / "claims.md").read_text().splitlines() if line[:3] == "| W"]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert len(rows) > 20 and all(len(row) == 6 and all(row[:5]) for row in cells)


@pytest.mark.extra
@pytest.mark.alone  # it takes the whole machine for a minute
def test_the_site_is_built_and_a_link_to_nothing_fails_it() -> None:
    pytest.importorskip("mkdocs", reason="not installed: pip install -r requirements-docs.txt")
    assert subprocess.run([ROOT / "docs.sh", "--build"]).returncode == 0
    for page in ("index", "claims", "try", "docs/settings", "assets/live"):
        assert (BUILT / f"{page}.html").is_file(), page
    dead = "docs/nothing.md"
    with (PAGES / "docs" / "cpu.md").open("a") as broken:
        broken.write(f"\n[dead](../{dead})\n")
    built = ["-m", "mkdocs", "build", "--config-file", str(PAGES.parent / "mkdocs.yml")]
    failed = subprocess.run(
        [ROOT / ".venv" / "bin" / "python", *built], capture_output=True, text=True
    )
    assert failed.returncode != 0 and dead in failed.stderr
