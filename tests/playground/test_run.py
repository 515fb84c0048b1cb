"""The playground's runs, on CPython, beside the simulator's; and what its editor's text does."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client.traces import load_trace
from playground import run
from playground.build import BURST, ESTIMATES, settings
from scheduling.policies import MODES, ORDERS, own
from simulate.run import SimulatedServer
from simulate.simulation import parse

STATE = BURST | {"costs": "demo", "rate": 60.0, "requests": 40}
VARIANTS = ["static", "windowed", "dynamic --order sjf", "dynamic --kv-reservation demand"]


def simulated(command: str, trace: Path) -> list[list[list[float]]]:
    """Return each variant's answers, by the command that the page shows and its trace."""
    words = shlex.split(command)[1:]
    options = parse([str(trace) if word == "trace.jsonl" else word for word in words])
    servers = [
        SimulatedServer(name, options.config(name), options.costs, stream=options.stream)
        for name in options.variants
    ]
    return [
        [
            [a.id, a.first_token_at, a.last_token_at, a.answered_at]
            for outcome in server.replay(load_trace(trace))
            if (a := outcome.answer)
        ]
        for server in servers
    ]


@pytest.fixture(scope="module")
def of_costs() -> run.Settings:
    return settings()[0]


@pytest.mark.parametrize(
    "other",
    [{}, {"costs": ESTIMATES[0], "stream": True, "blocks": 64, "rows": 8, "budget": 32, "seed": 1}],
)
def test_a_run_is_that_of_simulate_sh_to_the_picosecond(
    other: dict[str, Any], of_costs: run.Settings, tmp_path: Path
) -> None:
    state = STATE | other | {"variants": VARIANTS}
    trace = tmp_path / "trace.jsonl"
    trace.write_text(run.jsonl(state))
    results = [run.served(variant, state, of_costs) for variant in VARIANTS]
    answers = [sorted(result["answers"]) for result in results]
    assert answers == simulated(run.command(state), trace)


@pytest.fixture
def editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder for the editor's text, and the tables of modes and orders as they were."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(own.HANDED_ON, "{}")
    monkeypatch.setattr(own, "PROBLEMS", {})
    yield
    run.learn("")


ORDER = """from scheduling.policies.orders import Order
class Mine(Order):
    in_order = False
    def key(self, inference):
        return {}
"""


def test_a_policy_is_learnt_anew_and_what_it_raises_has_its_line(
    editor: None, of_costs: run.Settings
) -> None:
    mine = "dynamic --order yours.py:Mine"
    state = STATE | {"rows": 2}
    for key, same in (("-inference.num_tokens", False), ("inference.num_tokens", True)):
        assert run.learn(ORDER.format(key)) == {
            "modes": [], "orders": ["yours.py:Mine"], "error": ""
        }  # fmt: skip
        sjf = run.served("dynamic --order sjf", state, of_costs)["answers"]
        assert (run.served(mine, state, of_costs)["answers"] == sjf) is same
    run.learn(ORDER.format("1 / 0"))
    error = run.served(mine, state, of_costs)["error"]
    assert error.endswith("ZeroDivisionError: division by zero (yours.py, line 5)")
    assert run.learn("x = 1\nx = = 2")["error"].endswith("(yours.py, line 2)")
    assert "yours.py:Mine" not in {*MODES, *ORDERS}
    assert run.served(mine, state, of_costs) == {"error": "there is no yours.py:Mine"}
