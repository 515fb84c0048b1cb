"""docs/reading.md leads through files that exist and are as short as it says."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = 1800  # lines that are not blank


def test_the_marked_path_can_be_read_in_an_hour() -> None:
    listed = (ROOT / "docs" / "reading.md").read_text().split("```")[1].strip().splitlines()
    lines = {
        name: sum(bool(line.strip()) for line in (ROOT / name).read_text().splitlines())
        for name in (row.split()[0] for row in listed)
    }
    assert sum(lines.values()) <= MOST, lines
    assert sum(int(row.split()[1]) for row in listed) <= 66, "about an hour"
