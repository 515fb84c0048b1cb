"""Numbers on pages, quoted from files of results, and tables that are made from code.

    python -m docs.quotes            name the quotes that differ from their source
    python -m docs.quotes --write    bring them up to date

A quote stands between two comments, of which the first names a file or a run's folder and a part:

    <!-- results/demo#headlines output_throughput mean_e2el_ms -->…<!-- end -->
    <!-- results/replicas/fronts.json#costs/front=ray/seeds/*/request_ms:.1f -->…<!-- end -->

    <!-- code#settings -->…<!-- end -->

A part of the code is a table of docs/reference.py. Parts of a run are `headlines` (the
numbers named, else all), `capacity`, `identity`, `overloads` and `made`. A part of a JSON file is
the way to a number and its format: keys, indices, KEY=VALUE of the items of a list, and * for each
of them, one a seed, of which a mean and its interval are shown. Two such ways with ÷ or − between
them are compared seed by seed. A part of a page is `table N`, of which `columns model;rows` shows
those columns and `rows TEXT;TEXT` the rows that hold one of these texts.
"""

from __future__ import annotations

import argparse
import operator
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from client import saving
from client.results import keys
from client.runs import RunError, SavedRun, load, read_json
from compare import sweep
from compare.analysis import estimate
from compare.report import sentences, tables
from compare.servers import ROOT
from docs import reference

QUOTE = re.compile(r"<!-- (code|results/\S+?)#(.+?) -->(.*?)<!-- end -->", re.DOTALL)
PAGES = (
    "README.md",
    "results/README.md",
    "generate/demo/README.md",
    "lab/*/README.md",
    "docs/**/*.md",
)


def headlines(run: SavedRun, *names: str) -> str:
    """Return the headline table, or its columns of these names."""
    if not names:
        return tables.headlines(run.variants)
    cases = tables.of_variants(run.variants)
    return tables.markdown(tables.rows_of(["variant"], keys(" ".join(names)), cases))


def capacity(run: SavedRun) -> str:
    outcomes = {name: [sweep.outcome(s) for s in seeds] for name, seeds in run.points.items()}
    return tables.capacity_table(outcomes, bool(run.first["goodput"]))


def made(run: SavedRun) -> str:
    """Return the machine, commit and date of a run."""
    hardware, date = run.first["hardware"], run.first["date"][:10]
    machine = f"{hardware['cores']} cores of an {hardware['cpu']} ({hardware['memory_gb']:.0f} GB)"
    return f"{machine}, commit {run.first['commit']}, {date}"


PARTS: dict[str, Callable[..., str]] = {
    "headlines": headlines,
    "capacity": capacity,
    "made": made,
    "identity": lambda run: sentences.identity(run) or "",
    "overloads": lambda run: " ".join(sentences.overloads(run)),
}


def quoted(source: str, part: str) -> str:
    """Return the text of a part of a source. Raises an error where there is none."""
    if source == "code":
        return reference.TABLES[part]()
    path = ROOT / source
    if path.suffix == ".json":
        way, _, form = part.partition(":")
        return _formatted(_number(read_json(path), way), form)
    word, *arguments = part.split()
    if path.suffix == ".md":
        return _table(path.read_text("utf-8"), part)
    return PARTS[word](load(path, requests=False), *arguments)


def _table(page: str, part: str) -> str:
    """Return a page's N-th table, or some of its columns and rows."""
    wanted = re.fullmatch(r"table (\d+)(?: columns (.+?))?(?: rows (.+))?", part)
    if not wanted:
        raise ValueError("a part of a page is table N [columns A;B] [rows TEXT;TEXT]")
    number, columns, texts = wanted.groups(default="")
    blocks = [block for block in page.split("\n\n") if block.startswith("|")]
    head, line, *rows = blocks[int(number) - 1].strip().splitlines()
    lines = [head, line, *(row for row in rows if any(text in row for text in texts.split(";")))]
    if not columns:
        return "\n".join(lines)
    names = [cell.strip() for cell in head.strip("|").split("|")]
    places = [names.index(name) for name in columns.split(";")]
    cells = [row.strip("|").split("|") for row in lines]
    return "\n".join(f"|{'|'.join(row[place] for place in places)}|" for row in cells)


def _number(result: Any, way: str) -> Any:
    """Return the value at the end of a way, or how two differ, seed by seed."""
    for sign, of in (("÷", operator.truediv), ("−", operator.sub)):
        first, found, second = way.partition(f" {sign} ")
        if found:
            return [of(*both) for both in zip(_at(result, first), _at(result, second), strict=True)]
    return _at(result, way)


def _at(value: Any, way: str) -> Any:
    """Return the value at the end of a way through JSON."""
    step, _, rest = way.partition("/")
    name, _, wanted = step.partition("=")
    if not step:
        return value
    if step == "*":
        return [_at(item, rest) for item in value]
    if wanted:
        return _at([item for item in value if str(item[name]) == wanted], rest)
    if isinstance(value, list) and not step.isdigit():
        [value] = value  # the only item that a KEY=VALUE has left
    return _at(value[int(step) if isinstance(value, list) else step], rest)


def _formatted(value: Any, form: str) -> str:
    if isinstance(value, list):
        both = estimate(value)
        return f"{both.mean:{form}} ± {both.half:{form.lstrip('+')}}".replace("-", "−")
    return format(value, form).replace("-", "−") if form else str(value)


def renewed(text: str) -> tuple[str, list[str]]:
    """Return a page with its quotes brought up to date, and the names of those that differed."""
    differing = []

    def renew(quote: re.Match[str]) -> str:
        source, part, old = quote.groups()
        try:
            new = quoted(source, part)
        except (LookupError, TypeError, ValueError, OSError, RunError) as error:
            differing.append(f"{source}#{part}: {error!r}")
            return quote[0]
        if new == old.strip():
            return quote[0]
        differing.append(f"{source}#{part}")
        new = f"\n{new}\n\n" if "\n" in new else new
        return f"<!-- {source}#{part} -->{new}<!-- end -->"

    return QUOTE.sub(renew, text), differing


def pages() -> list[Path]:
    return [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m docs.quotes",
        description="Check numbers on pages against the files of results that they come from.",
    )
    parser.add_argument("--write", action="store_true", help="bring the pages up to date")
    write, wrong = parser.parse_args(argv).write, False
    for page in pages():
        text, differing = renewed(page.read_text("utf-8"))
        for name in differing:
            print(f"{page.relative_to(ROOT)}: {name}")
        if write:
            saving.write(page, text)
        wrong |= bool(differing)
    sys.exit(wrong and not write)


if __name__ == "__main__":
    main()
