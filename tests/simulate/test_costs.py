"""Costs of an iteration: a line in what it computes, in whole picoseconds; and their files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compare.report.tables import markdown
from generate import fake
from generate.fake import FakeGenerator
from scheduling.inference import Inference, Iteration, Row
from simulate import costs
from simulate.costs import FAKE, Costs, CostsError, Line, load, save, work
from simulate.loop import PS
from simulate.roofline import DEVICES, REACHED, Device

UNITS = ("bytes", "flops")
STRAIGHT = Costs.straight("x", iteration=500, row=70, context=3, prefill=11, chunk_context=2)
GRAPHS = Costs(
    "graphs",
    {1: Line(100, context=5), 4: Line(400, context=1)},
    prompts=Line(20, prefill=11, chunk_context=2),
)


def decode_row(context: int, idle: bool = False) -> Row:
    """A row that computes its token at position context - 1, after a prompt of one."""
    start = context - 1
    return Row(Inference([0], context), start, 1, [], samples=True, idle=idle)


def chunk(start: int, n: int) -> Row:
    return Row(Inference([0] * (start + n + 1), 1), start, n, [], samples=False, idle=False)


def iteration(rows: list[Row], padding: int = 0) -> Iteration:
    return Iteration(rows, len(rows), 0, 0, padding=padding)


def iterations(*kinds: st.SearchStrategy[Row]) -> st.SearchStrategy[Iteration]:
    rows = st.lists(st.one_of(*kinds), min_size=1, max_size=5)
    return st.builds(iteration, rows, st.integers(0, 3))


DECODE = st.builds(decode_row, st.integers(2, 1024), st.booleans())
PREFILL = st.builds(chunk, st.integers(0, 900), st.integers(1, 256))


def test_costs_count_what_an_iteration_computes() -> None:
    """Rows attend 10 and 20 positions, a chunk of 3 tokens 5, 6 and 7; one row is padding."""
    mixed = iteration([decode_row(10), decode_row(20, idle=True), chunk(4, 3)], padding=1)
    assert work(mixed) == (4, 6, 30, 3, 18)
    assert STRAIGHT.of(mixed) == 500 + 4 * 70 + 30 * 3 + 3 * 11 + 18 * 2
    one_token = Row(Inference([0], 5), 0, 1, [], samples=True, idle=False)
    assert work(iteration([one_token])) == (1, 1, 0, 1, 1), "a prompt, too"


@given(iterations(DECODE, PREFILL))
def test_fakes_costs_are_its_generators(some: Iteration) -> None:
    assert FAKE.of(some) / PS == pytest.approx(fake.cost_s(some), rel=1e-12)
    assert load("fake") is FAKE and load("second").of(some) == PS
    slept: list[float] = []
    FakeGenerator(slept.append, slowdown=50).generate(some)
    assert slept == [pytest.approx(50 * FAKE.of(some) / PS)]


def test_rows_have_lines_by_their_number() -> None:
    """Between one row and four lie two thirds of the way, and above four the same straight line."""
    three, five = [decode_row(10)] * 3, [decode_row(10)] * 5
    assert GRAPHS.of(iteration(three, padding=1)) == 400 + 30
    assert GRAPHS.of(iteration(three)) == 300 + 30 * 2
    assert GRAPHS.of(iteration(five)) == 500, "and no slope below 0"
    with_prompt = iteration([*three, chunk(0, 1)])
    assert GRAPHS.of(with_prompt) == 400 + 30 + 20 + 11 + 2
    assert GRAPHS.slower(2).of(with_prompt) == 2 * GRAPHS.of(with_prompt)


def test_products_are_those_of_all_tokens() -> None:
    """A chunk of 6 tokens beside three rows is 9 tokens: an eighth of the way from 8 to 16."""
    costs = replace(GRAPHS, products={1: 1000, 8: 1000, 16: 1800})
    three = [decode_row(10)] * 3
    assert costs.of(iteration(three)) == GRAPHS.of(iteration(three)) + 1000
    mixed = iteration([*three, chunk(0, 6)])
    assert costs.of(mixed) == GRAPHS.of(mixed) + 1100
    assert costs.slower(2).of(mixed) == 2 * costs.of(mixed)
    assert costs.following(iteration(three)) == (costs.of(iteration([decode_row(11)] * 3)), 6)


def test_what_lies_between_iterations_depends_on_rows_answers_and_streams() -> None:
    costs = replace(STRAIGHT, gap=1000, gap_row=10, gap_answer=200, gap_answer_row=30)
    costs = replace(costs, gap_stream=50, gap_stream_row=3)
    rows = [decode_row(10), decode_row(10), decode_row(10, idle=True), chunk(0, 5)]
    assert costs.between(iteration(rows, padding=1), 2) == 1000 + 50 + 2 * (200 - 5 * 30)
    assert costs.between(iteration(rows, padding=6), 2) == 1000 + 100, "a thread gives nothing back"
    for row in rows:
        row.inference.streamed = True
    assert costs.between(iteration(rows), 0) == 1000 + 40 + 50 + 2 * 3, "two tokens are sent"


def test_a_slower_server_is_slow_between_iterations_too() -> None:
    def times(k: int) -> Costs:
        gaps: list[Any] = [gap * k for gap in (1000, 10, 200, 8, 50, 3)] + [7, 9, 5, 6]
        costs = Costs("x", {4: Line(400 * k)}, *gaps)  # the last four are those of HTTP
        return replace(costs, load=3 * k, prompts=Line(10 * k), products={1: 150 * k})

    costs = times(1)
    assert costs.scaled(2.0) == times(2)
    assert costs.slower(2.0).gap == 1000, "an engine alone"


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    rest: list[Any] = [{"config": {"model": "demo"}}, 11, 12, Line(1, 2, 3, 4), {1: 5, 8: 6}]
    costs = Costs("mine", {4: Line(1, 2)}, *range(1, 11), *rest)
    save(costs, path := tmp_path / "new" / "mine.json")
    assert load(path) == costs == load(str(path))


def test_unknown_costs_are_said_with_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "FOLDER", tmp_path)
    save(STRAIGHT, tmp_path / "demo.json")
    assert load("demo").name == "demo"
    with pytest.raises(
        CostsError, match=r"no costs 'dmeo'; name one of results/costs, such as demo"
    ):
        load("dmeo")
    with pytest.raises(CostsError, match="there are no costs"):
        load(tmp_path / "nowhere.json")


WRONG: list[tuple[Any, str]] = [
    ({"prompts": {"row": 1}}, "row"),
    ({"products": {"1": -1}}, "-1 is no number of picoseconds"),
    ({"gap": -1}, "-1 is no number of picoseconds"),
    ({"gap": 1.5}, "1.5 is no number of picoseconds"),
    ({"answer": True}, "True is no number"),
    ({"decode": []}, "items"),
    ([1], ""),
]


@pytest.mark.parametrize(("change", "reason"), WRONG)
def test_a_wrong_file_is_refused(change: Any, reason: str, tmp_path: Path) -> None:
    save(STRAIGHT, path := tmp_path / "x.json")
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | change if isinstance(change, dict) else change))
    with pytest.raises(CostsError, match=f"holds no costs .*{reason}.*measure them again"):
        load(path)


@pytest.mark.parametrize("device", ["h100", "l4", "cpu:46:418"])
@given(some=iterations(DECODE, PREFILL), padding=st.integers(0, 400))
def test_an_estimate_is_the_roofline(device: str, some: Iteration, padding: int) -> None:
    """Its 24 layers of width 1024, and the LM head. With much padding products outlast reading."""
    some = some._replace(padding=padding)
    of_gpu = DEVICES.get(device, Device(46, 0.418, 0.418))
    bytes_per_s, flops_per_s = of_gpu.gb_per_s * 1e9, of_gpu.bfloat16 * 1e12
    rows, tokens, context, _, pairs = work(some)
    layers, head, width = 24 * 12 * 1024**2, 50257 * 1024, 24 * 1024
    others = 2 * (24 * 13 + 2) * 1024  # bytes of biases and norms, which are read, too
    read = [(2 * layers + others, 2 * tokens * layers), (2 * head, 2 * rows * head)]
    expected = sum(max(n / bytes_per_s, flops / flops_per_s) for n, flops in read) / REACHED
    expected += context * max(4 * width / bytes_per_s, 4 * width / flops_per_s) / REACHED
    launches = (7 * 24 + 6) * (device in DEVICES)  # as on an H200
    expected += pairs * 4 * width / flops_per_s / REACHED + launches * 1.3e-6
    estimate = load(f"roofline:{device},gpt2-medium,bfloat16")
    assert estimate.of(some) / PS == pytest.approx(expected, rel=1e-3)  # in whole picoseconds
    first, second, third = ([decode_row(n), decode_row(n + 5)] for n in (20, 21, 22))
    following, longer = estimate.following(iteration(first, padding))
    assert following == estimate.of(iteration(second, padding))
    assert following + longer == estimate.of(iteration(third, padding))


def test_the_error_of_estimates_for_this_machine_is_the_documented_one() -> None:
    """In percent of the fitted costs, by what lab.benchmarks.engine found of bandwidth and peak."""
    rows = (1, 4, 8, 16, 32)
    some = [*(iteration([decode_row(256)] * n) for n in rows), iteration([chunk(0, 256)])]
    table = [["costs", "1 row", *(f"{n} rows" for n in rows[1:]), "a prompt of 256"]]
    for name in ("gpt2", "gpt2-medium", "gpt2-float32", "demo"):
        fitted = load(name)
        model, dtype = (fitted.source["config"][key] for key in ("model", "dtype"))
        path = costs.FOLDER.parent / "engine" / f"gpt2-{dtype}" / "engine.json"
        gb_per_s, gflops = (json.loads(path.read_text())[f"{n}_per_s"] / 1e9 for n in UNITS)
        estimate = load(f"roofline:cpu:{gb_per_s:.0f}:{gflops:.0f},{model},{dtype}")
        errors = [100 * (estimate.of(each) / fitted.of(each) - 1) for each in some]
        table.append([f"`{name}`", *(f"{error:+.0f}" for error in errors)])
    page = costs.FOLDER.parents[1] / "docs" / "simulating.md"
    assert markdown(table, left=1) in page.read_text(), markdown(table, left=1)


@pytest.mark.parametrize("name", ["demo", "demo-epyc", "fake-server", "gpt2-epyc"])
def test_the_errors_that_reports_state_are_those_of_the_study(name: str) -> None:
    """They are written by hand, from the first table of the study's page."""
    stated = dict(load(name).source["fidelity"])
    page = (costs.FOLDER.parents[1] / stated.pop("page") / "fidelity.md").read_text()
    _, _, *rows = page[page.index("| servers") :].split("\n\n")[0].splitlines()
    assert len(rows) >= len(stated) > 1
    for row, error in zip(rows, stated.values()):
        assert f"{error:.1f}" in [cell.strip(" %") for cell in row.split("|")], row
