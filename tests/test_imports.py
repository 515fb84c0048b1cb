"""Imports point one way: each room uses those before it in the list of docs/design.md alone."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from unittest import mock

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from config import environment
from tests.servers import ROOT

DESIGN = (ROOT / "docs" / "design.md").read_text()
# the rooms from the ground up
FLOORS = re.findall(r"^(\w+) — ", DESIGN.split("```rooms\n")[1].split("```")[0], re.MULTILINE)
FILES = [  # each file of code, as a path from the root; exercises of the course are a reader's own
    file.relative_to(ROOT)
    for folder in [ROOT, *(path for path in ROOT.iterdir() if path.name not in ("tests", ".venv"))]
    for file in sorted(folder.glob("*.py") if folder == ROOT else folder.rglob("*.py"))
    if file.parent.name not in ("mine", "tests") and file.parent.parent.name != "tests"
]


def module_of(file: Path) -> str:
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(file): file for file in FILES}


def imported(file: Path) -> Iterator[str]:
    """Yield the full names that a file imports, for types too."""
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def file_of(name: str) -> Path | None:
    """Return the file of a module, or that of the module that has the name; none: a package's."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return MODULES.get(name)


@cache
def arrows() -> dict[Path, set[Path]]:
    """Return what each file imports. Every worker loads this module, and one needs them."""
    return {
        file: {other for name in imported(file) if (other := file_of(name))} - {file}
        for file in FILES
    }


def room_of(file: Path) -> str:
    return file.parts[0].removesuffix(".py")


def test_every_file_is_in_a_room_and_imports_rooms_below_its_own_alone() -> None:
    assert {room_of(file) for file in FILES} == set(FLOORS)
    assert [
        f"{file} imports {other}"
        for file, others in arrows().items()
        for other in others
        if FLOORS.index(room_of(other)) > FLOORS.index(room_of(file))
    ] == []


def test_no_test_of_the_product_imports_the_laboratory() -> None:
    """Nor does the product itself, which lies below it."""
    importing = re.compile(r"^\s*(from|import) lab\b", re.MULTILINE)
    tests = (ROOT / "tests").rglob("*.py")
    assert [file for file in tests if importing.search(file.read_text())] == []


def test_no_files_and_no_folders_import_each_other() -> None:
    """A folder and one inside it are one."""
    [*TopologicalSorter(arrows()).static_order()]  # raises CycleError
    folders: dict[Path, set[Path]] = {}
    for file, others in arrows().items():
        for a, b in ((file.parent, other.parent) for other in others):
            if Path() not in (a, b) and not a.is_relative_to(b) and not b.is_relative_to(a):
                folders.setdefault(a, set()).add(b)
    [*TopologicalSorter(folders).static_order()]


def test_the_scheduler_knows_no_clock_no_thread_and_no_command_line() -> None:
    heart = [file for file in FILES if room_of(file) == "scheduling"]
    names = {name.partition(".")[0] for file in heart for name in imported(file)}
    assert not names - {"scheduling", "sortedcontainers"} - sys.stdlib_module_names
    assert not names & {"ctypes", "os", "threading", "time"}
    assert [file for file in heart if "sys.argv" in (ROOT / file).read_text()] == []


HEAVY = "torch flask gunicorn safetensors app"
ABSENT = {  # modules, and what they load without
    "scheduling.scheduler, scheduling.policies, simulate.costs": "torch flask pydantic numpy",
    "batching, stats, generate.fake": "torch flask aiohttp matplotlib pydantic numpy",
    "simulate.playground.worker": "client numpy pydantic rich aiohttp torch",
    "client.client, compare.comparison": f"{HEAVY} matplotlib scipy tiktoken "
    "ray fastapi server.replicas.serve",
    "simulate.program, simulate.server": f"{HEAVY} matplotlib scipy server.serving batching",
    "server.serving": "flask gunicorn",
    "server.replicas.replica, server.replicas.serve": "flask ray torch",
    "server.api.about, server.api.door, server.api.rendering": "flask werkzeug torch",
    "app": "torch aiohttp matplotlib msgspec",
    "app, server.processes.twin": "torch",
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
    "simulate.vllm.vllm_order": "vllm",
    "simulate.vllm.vllm_order_queue": "vllm",
    "simulate.vllm.vllm_recorder": "vllm",
}
for kernel in ("add_norm", "draw", "known", "launches", "lora", "paged_attention", "products"):
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
    programs = ("gunicorn_conf", "__main__", "test_mine")
    modules = [module_of(file) for file in FILES if file.stem not in programs]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING],
        cwd=ROOT, input=json.dumps([blocked, modules]), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == EXTRAS


# each file that is one, as it is called; docs/ and lab/benchmarks/peers need no package at first
PROGRAMS = [["client/client.py"]] + [
    ["-m", module_of(file).removesuffix(".__main__")]
    for file in FILES
    if '__name__ == "__main__"' in (ROOT / file).read_text()
    if room_of(file) not in ("client", "docs") and file.parent.name != "peers"
]


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
