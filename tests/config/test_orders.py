"""Settings of orders reach the scheduler, where they have a meaning."""

from __future__ import annotations

import pytest

from config import ConfigError, parse, resolve
from scheduling.building import build_scheduler as scheduler_of
from scheduling.policies import Mlfq, Priority
from scheduling.policies.windowed import Windowed
from tests.config.test_sentences import EXAMPLE


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "gpu_is_usable", lambda: False)


def test_settings_that_fit_are_taken_without_a_warning() -> None:
    for line in (
        f"static --order priority --queue-policy {EXAMPLE};3:timeout_ms=0 --max-wait-s 5",
        "dynamic --order priority --priority-levels 2 --default-priority-level 2",
        "dynamic --order srpt --length-predictor constant",
        "dynamic --order sjf --preserve-ordering",
        "dynamic --order priority --priority-levels 1 --queue-policy 1:timeout_ms=5,max_size=9 "
        "--preserve-ordering",
        "multibin --bins 2 --length-predictor noisy:0.5 --order fcfs",
        "windowed --preferred-batch-sizes 32,1",
        "dynamic --budget-counts all --token-budget 9 --max-batch-size 9",
        "windowed --preferred-batch-sizes 4,2 --batch-size-limit 4",
        # there the target of 4, which 3 rows never reach, has no meaning
        "windowed --preferred-batch-sizes 2 --batch-size-limit 3",
        "nobatch --user-requests-per-minute 1 --user-tokens-per-minute 9 --preserve-ordering",
        "dynamic --order fair --user-weights a=1e-3,b=2,c=d=1",
    ):
        assert parse([*line.split(), "--model", "fake"], {}, dotenv=None).warnings() == []


def test_a_queue_policy_changes_what_it_states_and_leaves_the_rest_as_it_is() -> None:
    text = " 1 : timeout_ms=2.5 , override=yes ;;2:max_size=7,;3:"
    order = Priority(queue_policy=text)
    one, two, three = (order.queue_policies[level] for level in (1, 2, 3))
    assert (one.timeout_ms, one.action, one.max_size, one.override) == (2.5, "reject", 0, True)
    assert (two.timeout_ms, two.action, two.max_size, two.override) == (0, "reject", 7, False)
    assert (three.timeout_ms, three.max_size) == (0, 0)
    order = Priority(queue_policy="2:max_size=7; default :timeout_ms=5")
    states = {n: (own.timeout_ms, own.max_size) for n, own in order.queue_policies.items()}
    assert states == {1: (5, 0), 2: (0, 7), 3: (5, 0)}, (
        "the default's is of those without their own"
    )


def test_settings_reach_the_scheduler() -> None:
    line = f"windowed --order priority --queue-policy {EXAMPLE} --max-wait-s 5 --model fake"
    line += " --priority-levels 2 --default-priority-level 2 --preferred-batch-sizes 2,4"
    scheduler = scheduler_of(parse(line.split(), {}, dotenv=None))
    assert scheduler.order == Priority(5.0, 2, 2, EXAMPLE)
    assert isinstance(scheduler.policy, Windowed)
    assert scheduler.policy.preferred_batch_sizes == (2, 4)
    assert scheduler._ordering is None
    in_order = parse(["static", "--preserve-ordering", "--model", "fake"], {}, dotenv=None)
    assert scheduler_of(in_order)._ordering is not None


def test_settings_of_other_modes_and_orders_in_the_environment_are_no_error() -> None:
    """A .env may be shared between modes: sizes beyond a smaller server's rows, and levels that
    another order has, were once refused where they have no meaning.
    """
    shared = "PREFERRED_BATCH_SIZES=64 QUEUE_POLICY=5:max_size=1 DEFAULT_PRIORITY_LEVEL=5 BINS=8"
    shared += " AGING=1 PREFILL_WEIGHT=1 LENGTH_PREDICTOR=constant MAX_WAIT_S=5 USER_WEIGHTS=a=2"
    environ = dict(f"EB_{word}".split("=", 1) for word in shared.split())
    for line in ("dynamic", "static", "nobatch", "dynamic --order fair", "dynamic --order mlfq"):
        config = parse([*line.split(), "--model", "fake"], environ, dotenv=None)
        assert config.bins == 8 and config.max_wait_s == 5
    assert Mlfq(max_wait_s=5.0).promote_after_s == 5
    for line, message in (
        ("windowed", "64 is no batch size"),
        ("dynamic --order priority", "default-priority-level 5 is beyond the 3"),
        ("multibin", "gives all the same"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(line.split(), environ, dotenv=None)
    with pytest.raises(ConfigError, match="no weight"):  # text that cannot be read
        parse(["dynamic"], {"EB_USER_WEIGHTS": "a"}, dotenv=None)
