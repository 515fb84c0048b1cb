"""Imports point one way: the table of docs/design.md, no arrow more and none less."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from unittest import mock

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from config import environment
from tests.servers import ROOT


def read_arrows() -> dict[str, set[str]]:
    """Return the table of docs/design.md: the rooms that each room imports."""
    [table] = re.findall(r"```\n(.*?)```", (ROOT / "docs" / "design.md").read_text(), re.DOTALL)
    lines = [line.partition("→") for line in table.splitlines()]
    return {room.strip(): set(names.replace(",", " ").split()) for room, _, names in lines}


ARROWS = read_arrows()
OUTSIDE = ("tests", ".venv")


def rooms() -> Iterator[tuple[str, list[Path]]]:
    """Yield each module at the root and each folder of modules, with its files."""
    for path in ROOT.glob("*.py"):
        yield path.stem, [path]
    for folder in ROOT.iterdir():
        files = sorted(folder.rglob("*.py")) if folder.name not in OUTSIDE else []
        if files:
            yield folder.name, files


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(file: Path) -> Iterator[str]:
    """Yield the full names that a file imports, for types too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def row_of(name: str) -> str | None:
    """Return the row of the table for a module: its own, its folder's, or none."""
    while name and name not in ARROWS:
        name = name.rpartition(".")[0]
    return name or None


def test_every_room_imports_what_the_design_says() -> None:
    arrows: dict[str, set[str]] = {row: set() for row in ARROWS}
    for _, files in rooms():
        for file in files:
            row = row_of(module_of(file))
            assert row, f"{file} is in no room of docs/design.md"
            arrows[row] |= {other for name in imported(file) if (other := row_of(name))} - {row}
    assert arrows == ARROWS
    heart = {name.split(".")[0] for file in dict(rooms())["scheduling"] for name in imported(file)}
    assert not heart - {"scheduling", "sortedcontainers"} - sys.stdlib_module_names


def test_the_design_has_no_cycle() -> None:
    above = dict(ARROWS)
    while free := {room for room, below in above.items() if not below}:
        above = {room: below - free for room, below in above.items() if room not in free}
    assert above == {}


def test_few_files_lie_at_the_root() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 12


HEAVY = "torch flask gunicorn safetensors app"
ABSENT = {  # modules, and what they load without
    "scheduling.scheduler, scheduling.policies, simulate.costs": "torch flask pydantic numpy",
    "batching, stats, generate.fake": "torch flask aiohttp matplotlib pydantic numpy",
    "simulate.playground.run": "client numpy pydantic rich aiohttp torch",
    "client.client, compare.comparison": f"{HEAVY} matplotlib scipy tiktoken "
    "sortedcontainers ray fastapi server.replicas.serve",
    "simulate.simulation, simulate.run": f"{HEAVY} matplotlib scipy server.serving batching",
    "server.serving": "flask gunicorn",
    "server.replicas.replica, server.replicas.serve": "flask ray torch",
    "server.api.own, server.api.refusals": "flask werkzeug torch",
    "app": "torch aiohttp matplotlib",
    "server.launch": "torch aiohttp matplotlib flask app server.serving numpy",
    "model": "pydantic",
}


@pytest.mark.parametrize("modules", ABSENT)
def test_a_module_loads_without_what_it_must_not_know(modules: str) -> None:
    absent = {*ABSENT[modules].split()}
    program = f"import sys; import {modules}; print(*({absent!r} & set(sys.modules)))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# what needs more than requirements.txt, and the module that it lacks without
EXTRAS = {
    "server.replicas.handles": "ray",
    "server.replicas.ray_routers": "ray",
    "server.replicas.ingress": "fastapi",
    "server.replicas.ray_serve": "fastapi",
    "lab.vllm_recorder": "vllm",
}
for kernel in ("add_norm", "launches", "lora", "paged_attention", "products"):
    EXTRAS[f"generate.kernels.{kernel}"] = "triton"
# imports each of the modules where others, installed by hand or for the tests, cannot be found
IMPORTING = """
import importlib, json, sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
blocked, modules = json.load(sys.stdin)
class Unblocked(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in blocked else super().find_spec(name, path, target)
sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Unblocked]
missing = {}
for name in modules:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing[name] = error.name
print(json.dumps(missing))
"""


def base_distributions() -> set[str]:
    """Return the distributions of requirements.txt, and those that they need."""
    lines = [
        line
        for file in ("requirements.txt", "client/requirements.txt")
        for line in (ROOT / file).read_text().splitlines()
        if line and not line.startswith(("#", "-r"))
    ]
    names: set[str] = set()
    while lines:
        wanted = Requirement(lines.pop())
        name = canonicalize_name(wanted.name)
        if (wanted.marker is None or wanted.marker.evaluate({"extra": ""})) and name not in names:
            names.add(name)
            lines += requires(name) or []
    return names


def test_every_module_imports_with_the_base_requirements_or_is_named_as_an_extras() -> None:
    """A benchmark needed Ray, and ./test.sh failed wherever Ray was not installed."""
    base = base_distributions()
    blocked = [
        module
        for module, distributions in packages_distributions().items()
        if not base & {canonicalize_name(each) for each in distributions}
    ]
    files = [file for _, files in rooms() for file in files]
    programs = ("gunicorn_conf", "__main__")
    modules = [module_of(file) for file in files if file.stem not in programs]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING],
        cwd=ROOT, input=json.dumps([blocked, modules]), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == EXTRAS


# each file that is one, as it is called; docs/ and benchmarks/peers need no package at first
PROGRAMS = [
    ["client/client.py"],
    *(
        ["-m", module_of(file).removesuffix(".__main__")]
        for name, files in rooms() if name not in ("client", "docs")
        for file in files
        if "__name__ == \"__main__\"" in file.read_text() and file.parent.name != "peers"
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python without packages."""
    venv.create(folder := tmp_path_factory.mktemp("bare"))
    return folder / "bin" / "python"


@pytest.mark.parametrize("words", PROGRAMS, ids=lambda words: words[-1])
def test_a_program_outside_the_environment_says_which_python_runs_it(
    words: list[str], bare: Path
) -> None:
    """`python -m lab.benchmarks.engine` ended with a traceback that names matplotlib, and
    `tests.mutations` counted each test that it could not run as one that failed.
    """
    done = subprocess.run([bare, *words, "--qq"], cwd=ROOT, capture_output=True, text=True)
    [line] = done.stderr.splitlines()
    command = f"run .venv/bin/python {' '.join(words)} --qq, or pip install -r "
    assert done.returncode and command in line


def test_what_the_environment_itself_lacks_is_installed_there(tmp_path: Path) -> None:
    """After ./simulate.sh alone `python -m lab.benchmarks.engine` lacks torch in .venv itself."""
    said = missing("torch.nn", environment.VENV)
    assert said == "error: none; .venv/bin/python -m pip install -r requirements.txt"
    assert missing("no_such_package", tmp_path) is None


def missing(package: str, prefix: Path) -> str | None:
    with mock.patch.object(sys, "prefix", str(prefix)), contextlib.chdir(ROOT):
        return environment.sentence(ModuleNotFoundError("none", name=package))


def test_a_python_that_is_too_old_is_named() -> None:
    old = "import sys; sys.version_info = (3, 9); import client"
    done = subprocess.run([sys.executable, "-c", old], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == "error: Python 3.11 or newer is needed; install it and try again\n"
