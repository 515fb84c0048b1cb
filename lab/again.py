"""What made a result, and its numbers beside those of the same command run again; lab/again.sh
calls both.

    python -m lab.again results/NAME          commit, command and file, a line each
    python -m lab.again OLD NEW               two files of numbers beside each other
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from client.machine import ROOT
from client.runs import read_json

SHOWN = 60  # numbers that differ
# commits of clones that were not kept, and the first commit of the history that has their results
LOST = {
    "c19a4623c9": "c8685d81",
    **dict.fromkeys(("712671f1c2", "6958360a34", "248cf1a37a", "b18f4154ca"), "9280a221"),
}
STATED = (  # how pages state it
    re.compile(r"`(?P<command>[^`\n]+)`, commit `?(?P<commit>\w+)"),
    re.compile(r"commit (?P<commit>\w+), [\d-]+T\S+, `(?P<command>[^`]+)`"),
)


class Made(NamedTuple):
    commit: str
    command: str
    file: Path  # its numbers, or else its page


ENDING = re.compile(r"\.(md|json|json\.gz)$")


def made(name: str) -> Made:
    """Return what made a result: results/NAME, a folder or a file with or without its ending.

    Raises LookupError, naming what lies there, if that is no single result.
    """
    path = ROOT / ENDING.sub("", name)
    if path.is_dir() and not (path / "summary.json").exists():
        files = [*path.glob("*.json*")] or path.glob("*.md")
        inside = {ENDING.sub("", each.name) for each in files}
        if len(inside) != 1:
            raise LookupError(f"{name} has {len(inside)} results; name one of {sorted(inside)}")
        path = path / inside.pop()
    elif path.is_dir():  # a run's
        path = path / "summary"
    json, page = path.with_name(f"{path.name}.json"), path.with_name(f"{path.name}.md")
    if path.name == "summary":
        page = path.with_name("report.md")
    file = next((each for each in (json, Path(f"{json}.gz"), page) if each.exists()), None)
    if file is None:
        raise LookupError(f"{name} is no result")
    kept: dict[str, Any] = read_json(json) if file != page else {}
    if (first := json.parent / "seed-0" / "summary.json").exists():
        kept |= read_json(first)
    text = page.read_text("utf-8") if page.exists() else ""
    stated = next((found.groupdict() for form in STATED if (found := form.search(text))), {})
    commit, command = (kept.get(key) or stated.get(key) for key in ("commit", "command"))
    if not (commit and command):
        raise LookupError(f"{name} names no commit with a command")
    known = str(commit).partition(" ")[0]  # "… with changes"
    return Made(LOST.get(known, known), str(command), file)


def numbers(value: Any, way: str = "") -> Iterator[tuple[str, float]]:
    """Yield each number with the way to it; those of all seeds have the same way."""
    if isinstance(value, dict):
        for key in value.keys() - {"hardware", "date", "commit"}:
            yield from numbers(value[key], f"{way}/{key}")
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from numbers(each, f"{way}/{'*' if way.endswith('/seeds') else i}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield way, value


def means(file: Path) -> dict[str, float]:
    found = defaultdict(list)
    for way, number in numbers(read_json(file)):
        found[way].append(number)
    return {way: fmean(each) for way, each in found.items()}


def beside(old: Path, new: Path) -> Iterator[str]:
    """Yield how the numbers of two files differ; of all seeds their means are compared."""
    before, after = means(old), means(new)
    both = [way for way in before if way in after]
    changed = [way for way in sorted(both) if before[way] != after[way]]
    yield f"{len(both) - len(changed):,} of {len(both):,} numbers are equal"
    for way in changed[:SHOWN]:
        ratio = f"{after[way] / before[way]:.3f}" if before[way] else "–"
        yield f"{before[way]:14.6g} {after[way]:14.6g} {ratio:>9}  {way}"
    if len(changed) > SHOWN:
        yield f"… and {len(changed) - SHOWN:,} others"


def main() -> None:
    try:
        match sys.argv[1:]:
            case [name]:
                print(*made(name), sep="\n")
            case [old, new]:
                print(*beside(Path(old), Path(new)), sep="\n")
            case _:
                sys.exit(__doc__)
    except (LookupError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
