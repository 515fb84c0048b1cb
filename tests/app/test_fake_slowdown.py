"""The fake engine made slower, so that several servers leave a few cores time to spare: it sleeps
so much longer, virtual time charges the same, and no other engine takes it.
"""

from __future__ import annotations

import time

import pytest

from client.load import Watch
from compare.measure import measure
from config import ConfigError, build, has_effect
from generate import load_generator
from scheduling.inference import Inference, Iteration, Row
from simulate import simulation as simulate
from simulate.costs import FAKE
from simulate.simulated import Simulated
from tests.simulate.test_simulated import ask


def test_it_really_sleeps_so_many_times_as_long() -> None:
    """An iteration of one row takes 1.06 ms, and 53 ms by 50."""
    config = build("dynamic", {"model": "fake", "fake_slowdown": "50"}, {})
    generator = load_generator(config, None, 257)
    row = Row(Inference([0], 2), 1, 1, [], samples=True, idle=False)
    start = time.perf_counter()
    generator.generate(Iteration([row], 1, 0, 0))
    assert 0.053 <= time.perf_counter() - start < 0.5


def test_virtual_time_charges_the_same() -> None:
    """Ten tokens after ten of a prompt are 10.7 ms, and 42.8 by 4."""
    config = build("nobatch", {"model": "fake", "device": "cpu", "fake_slowdown": "4"}, {})
    target = Simulated("nobatch", config, FAKE)
    _, [outcome] = measure(target, [ask(0)], {}, 60.0, Watch())
    assert outcome.ended_at - outcome.sent_at == pytest.approx(4 * 10.7e-3)


def test_simulate_takes_it_with_the_stated_costs_and_refuses_it_with_measured_ones() -> None:
    asked = ["--modes", "dynamic", "--model", "fake", "--fake-slowdown", "4"]
    assert simulate.parse(asked).config("dynamic").fake_slowdown == 4
    with pytest.raises(ConfigError, match="the costs fake-server know no --fake-slowdown"):
        simulate.parse([*asked, "--costs", "fake-server"])


@pytest.mark.parametrize("model", [{}, {"model": "demo"}])
def test_another_engine_is_not_made_slower(model: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--fake-slowdown has no meaning without --model fake"):
        build("dynamic", model | {"fake_slowdown": "4"}, {})
    assert not has_effect("fake_slowdown", {"mode": "dynamic", "model": "demo"})


@pytest.mark.parametrize("times", ["0", "-1", "inf", "nan"])
def test_it_is_a_number_above_0(times: str) -> None:
    with pytest.raises(ConfigError, match=f"--fake-slowdown '{times}': input should be"):
        build("dynamic", {"model": "fake", "fake_slowdown": times}, {})
