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
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from queue import SimpleQueue

import pytest

ROOT = Path(__file__).resolve().parent.parent
AREAS = {  # what is broken, and the tests that must notice
    "scheduling": (["scheduling", "batching.py"], ["tests/scheduling", "tests/simulate"]),
    "engine": (["generate", "model.py", "config/shapes.py", "generate/weights.py"],
               ["tests/generate", "tests/server/api/test_logprobs.py",
                "tests/simulate/test_costs.py"]),
    "api": (["server/api"], ["tests/server/api"]),
    "comparison": (["compare", "stats.py"], ["tests/compare", "tests/client"]),
}  # fmt: skip
# where things are drawn, which no test looks at by the pixel; elsewhere `draws` says where
SKIPPED = {"client/drawing.py", "compare/report/figures.py"}
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
TIMEOUT_S = 900


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


def draws(function: ast.FunctionDef) -> bool:
    """Return whether a function makes a figure or is given an axis to draw on."""
    makes_figure = isinstance(function.returns, ast.Name) and function.returns.id == "Figure"
    return makes_figure or "axis" in [each.arg for each in function.args.args]


def places(tree: ast.Module) -> list[tuple[int, int]]:
    """Index (in `ast.walk`) and change of each mutant, of code that runs in a function."""
    functions = (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef))
    lines = (line for function in functions if not draws(function) for line in function.body)
    runs = {id(node) for line in lines for node in ast.walk(line)}
    walked = [(at, node) for at, node in enumerate(ast.walk(tree)) if id(node) in runs]
    return [
        (at, which) for at, node in walked for which, _ in enumerate(changes(copy.deepcopy(node)))
    ]


def mutant(source: str, at: int, which: int) -> tuple[str, str]:
    """The source with one change, and the change in words."""
    tree = ast.parse(source)
    node = list(ast.walk(tree))[at]
    what = next(islice(changes(node), which, None))
    return ast.unparse(ast.fix_missing_locations(tree)), f"{getattr(node, 'lineno', '?')}: {what}"


def chosen(n: int, seed: int, folder: Path) -> list[tuple[str, str, int, int]]:
    """Area, file and place of n mutants, as many of each area."""
    draw, picked = random.Random(seed), []
    for area, (rooms, _) in AREAS.items():
        files = [file for room in rooms for file in sorted((folder / room).rglob("*.py"))]
        files += [folder / room for room in rooms if room.endswith(".py")]
        names = [name for file in files if (name := str(file.relative_to(folder))) not in SKIPPED]
        trees = ((name, ast.parse((folder / name).read_text())) for name in names)
        all_places = [(area, name, *place) for name, tree in trees for place in places(tree)]
        picked += draw.sample(all_places, n // len(AREAS))
    return picked


def noticed(folder: Path, area: str, file: str, at: int, which: int) -> tuple[bool, str]:
    """Run the area's tests on one mutant in `folder`; return whether one failed, and the change."""
    path = folder / file
    source = path.read_text()
    broken, what = mutant(source, at, which)
    path.write_text(broken)
    tests = [test for test in AREAS[area][1] if (folder / test).exists()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--timeout=120", *tests]
    command += ["-m", "not nightly and not extra and not alone"]
    try:
        done = subprocess.run(command, cwd=folder, timeout=TIMEOUT_S, capture_output=True)
        return done.returncode != pytest.ExitCode.OK, f"{file}:{what}"
    except subprocess.TimeoutExpired:
        return True, f"{file}:{what} (time)"
    finally:
        path.write_text(source)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--n", type=int, default=60, help="mutants (default: 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="mutants at a time (default: 2)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        copies: SimpleQueue[Path] = SimpleQueue()
        for i in range(options.processes):
            folder = Path(temporary) / str(i)
            subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
            copies.put(folder)

        def tried(place: tuple[str, str, int, int]) -> bool:
            folder = copies.get()
            dead, what = noticed(folder, *place)
            copies.put(folder)
            print("died    " if dead else "SURVIVED", what, flush=True)
            return dead

        with ThreadPoolExecutor(options.processes) as pool:
            dead = list(pool.map(tried, chosen(options.n, options.seed, folder)))
    print(f"{sum(dead)} of {len(dead)} mutants died")


if __name__ == "__main__":
    main()
