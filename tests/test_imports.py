"""Imports point one way: the table of docs/design.md, no arrow more and none less."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import ROOT


def read_arrows() -> dict[str, set[str]]:
    """The table of docs/design.md: who may import whom when it runs."""
    [table] = re.findall(r"```\n(.*?)```", (ROOT / "docs" / "design.md").read_text(), re.DOTALL)
    lines = [line.partition("→") for line in table.splitlines()]
    return {room.strip(): set(names.replace(",", " ").split()) for room, _, names in lines}


ARROWS = read_arrows()


def rooms() -> Iterator[tuple[str, list[Path]]]:
    """Each module at the root and each folder of modules, with its files."""
    for path in ROOT.glob("*.py"):
        yield path.stem, [path]
    for folder in ROOT.iterdir():
        if (
            folder.is_dir()
            and folder.name not in ("tests", ".venv")
            and (files := sorted(folder.rglob("*.py")))
        ):
            yield folder.name, files


def imported(node: ast.AST) -> Iterator[str]:
    """The first names of all modules that are imported in it, but for types alone."""
    for child in ast.iter_child_nodes(node):
        if (
            isinstance(child, ast.If)
            and isinstance(child.test, ast.Name)
            and child.test.id == "TYPE_CHECKING"
        ):
            continue
        if isinstance(child, ast.Import):
            yield from (name.name.split(".")[0] for name in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield str(child.module).split(".")[0]
        yield from imported(child)


def test_every_room_imports_what_the_design_says() -> None:
    found = {
        room: {name for file in files for name in imported(ast.parse(file.read_text()))}
        for room, files in rooms()
    }
    assert found.keys() == ARROWS.keys()
    for room, names in found.items():
        assert (names & found.keys()) - {room} == ARROWS[room], room
    assert not found["scheduling"] - {"scheduling", "sortedcontainers"} - sys.stdlib_module_names


def test_the_design_has_no_cycle() -> None:
    above = dict(ARROWS)
    while free := {room for room, below in above.items() if not below}:
        above = {room: below - free for room, below in above.items() if room not in free}
    assert above == {}


def test_few_files_lie_at_the_root() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 10


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (
            "scheduling.scheduler, scheduling.policies, simulate.costs",
            {"torch", "flask", "pydantic", "numpy"},
        ),
        ("batching, stats, generate.fake", {"torch", "flask", "aiohttp", "matplotlib", "pydantic"}),
        (
            "client.client, client.compare",
            {"torch", "flask", "gunicorn", "tiktoken", "safetensors", "app", "sortedcontainers"}
            | {"ray", "fastapi", "deploy.serve"},
        ),
        (
            "client.simulate, client.simulated",
            {"torch", "flask", "gunicorn", "safetensors", "app", "serving", "batching"},
        ),
        ("serving", {"flask", "gunicorn"}),
        ("deploy.replica, deploy.serve", {"flask", "ray", "torch"}),
        ("wire.exchange, wire.own, wire.refusals", {"flask", "werkzeug", "torch"}),
        ("deploy.proxy", {"torch", "flask", "ray"}),
        ("app", {"torch", "aiohttp", "matplotlib"}),
        ("model", {"pydantic"}),
    ],
)
def test_a_module_loads_without_what_it_must_not_know(modules: str, absent: set[str]) -> None:
    program = f"import sys; import {modules}; print(*({absent!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
