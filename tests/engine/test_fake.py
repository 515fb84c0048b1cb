"""The fake engine made slower, so that several servers leave a few cores time to spare."""

from __future__ import annotations

import pytest

from client.load import Watch
from compare.measure import measure
from config import ConfigError, build
from generate.fake import FakeGenerator
from scheduling.inference import Inference, Iteration, Row
from simulate import simulation as simulate
from simulate.costs import FAKE
from simulate.run import SimulatedServer
from tests.simulate.test_simulated import ask


def test_it_sleeps_so_many_times_as_long() -> None:
    """An iteration of one row takes 1.06 ms, and 53 ms by 50."""
    slept: list[float] = []
    row = Row(Inference([0], 2), 1, 1, [], samples=True, idle=False)
    FakeGenerator(slept.append, slowdown=50).generate(Iteration([row], 1, 0, 0))
    assert slept == [pytest.approx(0.053)]


def test_virtual_time_charges_the_same() -> None:
    """Ten tokens after ten of a prompt are 10.7 ms, and 42.8 by 4."""
    config = build("nobatch", {"model": "fake", "device": "cpu", "fake_slowdown": "4"}, {})
    _, [outcome] = measure(SimulatedServer("nobatch", config, FAKE), [ask(0)], {}, 60.0, Watch())
    assert outcome.ended_at - outcome.sent_at == pytest.approx(4 * 10.7e-3)


def test_simulate_takes_it_with_the_stated_costs_and_refuses_it_with_measured_ones() -> None:
    argv = ["--modes", "dynamic", "--model", "fake", "--fake-slowdown", "4"]
    assert simulate.parse(argv).config("dynamic").fake_slowdown == 4
    with pytest.raises(ConfigError, match="the costs fake-server know no --fake-slowdown"):
        simulate.parse([*argv, "--costs", "fake-server"])
