"""The playground's runs, on CPython, beside the simulator's."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from client.traces import load_trace
from playground import run
from playground.build import BURST, ESTIMATES, settings
from simulate.run import SimulatedServer
from simulate.simulation import parse

STATE = BURST | {"costs": "demo", "rate": 60.0, "requests": 40}
VARIANTS = ["static", "windowed", "dynamic", "dynamic --order sjf",
            "dynamic --kv-reservation demand"]  # fmt: skip


def simulated(state: run.State, folder: Path) -> dict[str, list[list[float]]]:
    """Return the answers of the command that the page shows, by variant."""
    path = folder / "trace.jsonl"
    path.write_text(run.jsonl(state))
    words = shlex.split(run.command(state))[1:]
    options = parse([str(path) if word == path.name else word for word in words])
    result = {}
    for name, variant in zip(options.variants, state["variants"]):
        config = options.config(name)
        server = SimulatedServer(name, config, options.costs, stream=options.stream)
        answers = [outcome.answer for outcome in server.replay(load_trace(path))]
        result[variant] = [
            [a.id, a.first_token_at, a.last_token_at, a.answered_at] for a in answers if a
        ]
    return result


@pytest.fixture(scope="module")
def of_costs() -> run.Settings:
    return settings()[0]


@pytest.mark.parametrize(
    "other", [{}, {"stream": True, "blocks": 64, "rows": 8, "budget": 32, "seed": 1}]
)
def test_a_run_is_that_of_simulate_sh_to_the_picosecond(
    other: dict[str, Any], of_costs: run.Settings, tmp_path: Path
) -> None:
    for costs in ("demo", ESTIMATES[0]):
        state = STATE | other | {"costs": costs, "variants": VARIANTS[: 4 if other else 5]}
        for variant, wanted in simulated(state, tmp_path).items():
            assert sorted(run.served(variant, state, of_costs)["answers"]) == wanted
