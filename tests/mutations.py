"""Breaks the code on purpose, one place at a time, and counts how often the tests notice.

    python -m tests.mutations --n 60 --seed 0

A mutant is the committed code with one change: a comparison or an operator swapped, a condition
negated, a number one larger, a `break` or a call removed. It runs in a copy of the repository, so
that the working tree does not change. Survivors are printed with file and line: either a test is
missing, or the change makes no difference to any user.
"""

from __future__ import annotations

import argparse
import ast
import copy
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.servers import ROOT

AREAS = {  # what is broken, and the tests that must notice
    "scheduling batching.py": "tests/scheduling tests/simulate",
    "generate model.py config/shapes.py": "tests/generate tests/server/api/test_logprobs.py "
    "tests/simulate/test_costs.py",
    "server/api": "tests/server/api",
    "compare stats.py": "tests/compare tests/client",
}
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add},
}
DRAWS = re.compile(r"\b(axis|Axes|Figure)\b")  # in the head of a function
TIMEOUT_S = 900
Place = tuple[str, Path, int, int]  # tests, file, index in `ast.walk`, change


def changes(node: ast.AST) -> Iterator[str]:
    """Apply each change that there is for a node to it, in turn, and say which it is."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        node.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[call-overload]
        yield "comparison"
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPS:
        node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
        yield "operator"
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        test, node.test = node.test, ast.UnaryOp(ast.Not(), node.test)
        yield "condition"
        node.test = test
    if isinstance(node, ast.Constant) and type(node.value) is int:
        node.value += 1
        yield "number"
    if isinstance(node, ast.For | ast.While | ast.If):
        body = node.body
        for i, line in enumerate(body):
            is_call = isinstance(line, ast.Expr) and isinstance(line.value, ast.Call)
            if is_call or isinstance(line, ast.Break | ast.Continue):
                body[i] = ast.copy_location(ast.Pass(), line)
                yield f"without line {line.lineno}"
                body[i] = line


def places(file: Path, tests: str) -> Iterator[Place]:
    """Yield each mutant of the code that runs in a function, and draws nothing: no test looks at a
    figure by the pixel.
    """
    tree = ast.parse(file.read_text())
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    lines = [line for each in functions if not DRAWS.search(_head(each)) for line in each.body]
    runs = {id(node) for line in lines for node in ast.walk(line)}
    for at, node in enumerate(ast.walk(tree)):
        if id(node) in runs:
            for which, _ in enumerate(changes(copy.deepcopy(node))):
                yield tests, file, at, which


def _head(function: ast.FunctionDef) -> str:
    return ast.unparse(function.args) + ast.unparse(function.returns or ast.Constant(None))


def chosen(n: int, seed: int, folder: Path) -> Iterator[Place]:
    """Yield n mutants, as many of each area."""
    draw = random.Random(seed)
    for rooms, tests in AREAS.items():
        files = [
            file
            for path in (folder / room for room in rooms.split())
            for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])
        ]
        all_places = [place for file in files for place in places(file, tests)]
        yield from draw.sample(all_places, n // len(AREAS))


def died(folder: Path, tests: str, file: Path, at: int, which: int) -> bool:
    """Run the tests on one mutant; return whether one failed, and print the change."""
    source = file.read_text()
    tree = ast.parse(source)
    node = list(ast.walk(tree))[at]
    what = next(islice(changes(node), which, None))
    file.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--timeout=120", *tests.split()]
    command += ["-n", "2", "-m", "not nightly and not extra and not alone"]
    try:
        done = subprocess.run(command, cwd=folder, timeout=TIMEOUT_S, capture_output=True)
        dead = done.returncode != pytest.ExitCode.OK
    except subprocess.TimeoutExpired:
        dead = True
    file.write_text(source)
    where = f"{file.relative_to(folder)}:{getattr(node, 'lineno', '?')}"
    print("died    " if dead else "SURVIVED", f"{where}: {what}", flush=True)
    return dead


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--n", type=int, default=60, help="mutants (default: 60)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
        dead = [died(folder, *place) for place in list(chosen(options.n, options.seed, folder))]
    print(f"{sum(dead)} of {len(dead)} mutants died")


if __name__ == "__main__":
    main()
