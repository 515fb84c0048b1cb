"""What all benchmarks share: options, settings with an effect, sentences, turns, and pages."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from benchmarks import agreement, burst, costs, engine, gpu, harness
from benchmarks.faults import __main__ as faults
from benchmarks.harness import alternate, mean
from tests.benchmarks.conftest import Run


def test_turns_alternate_and_ratios_are_of_the_same_round() -> None:
    """The second round was twice as fast for both, so that the ratio is 3 in each."""
    order: list[str] = []

    def turn(name: str) -> dict[str, float]:
        order.append(name)
        return {"speed": (3.0 if name == "ours" else 1.0) * (1 + (len(order) > 2))}

    found = alternate(("ours", "peer"), turn, 2)
    assert order == ["ours", "peer", "peer", "ours"]
    ratio = mean(found["ours"], "speed", found["peer"])
    assert (ratio.mean, ratio.half) == (3, 0) and mean(found["peer"], "speed").mean == 1.5


@pytest.mark.parametrize(
    ("benchmark", "arguments", "sentence"),
    [
        (burst, "--model demo --n 65", "--n must be from 1 to 64"),
        (burst, "--model demo --modes orca", "unknown mode 'orca'"),
        (burst, "--model fake", "leave out --model fake"),
        (burst, "--tokenizer bytes", "unknown flag --tokenizer"),
        (burst, "--batch-size-target 3", "--batch-size-target has no meaning in mode dynamic"),
        (engine, "--model demo --rows 1,x", "no list of positive numbers"),
        (engine, "--model demo --contexts 2000", "at most 1024 tokens"),
        (engine, "--model demo --rows 64 --kv-cache 0.02GB", "raise --kv-cache"),
        (engine, "--model demo --rows 64 --max-batch-size 32", "raise --max-batch-size, 32"),
        (engine, "--order fcfs", "unknown flag --order"),
        (engine, "--prefix-caching", "unknown flag --prefix-caching"),
        (engine, "--max-waiting 3", "unknown flag --max-waiting"),
        (engine, "--ahead", "unknown flag --ahead"),  # plans are made by no thread
        (agreement, "--model demo --n 33 --max-batch-size 32", "at most --max-batch-size"),
        (agreement, "--loop-interval-ms 3", "unknown flag --loop-interval-ms"),
        (gpu, "", "device cuda: no GPU is usable here; use --device cpu"),
        (gpu, "--port 1", "unknown flag --port"),
        (costs, "--model fake --name fake", "give another --name"),
        (costs, "--model fake --order sjf", "unknown flag --order"),
        (costs, "--model fake --ahead", "unknown flag --ahead"),  # hides the gaps that are fitted
        (faults, "--only nothing", "no fault has these words in its name"),
    ],
)
def test_bad_input_ends_with_a_sentence(
    benchmark: ModuleType, arguments: str, sentence: str, refusal_of: Callable[..., str]
) -> None:
    """A setting that would have no effect is refused, so that none is recorded."""
    assert sentence in refusal_of(benchmark, arguments)


@pytest.mark.nightly
def test_only_settings_with_an_effect_are_recorded(
    small: str, result_of: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EB_PORT", "9")  # the environment may be shared
    two = result_of(burst, small, "--n 1 --modes dynamic,windowed")["config"]
    one = result_of(burst, small, "--n 1")["config"]
    assert not {"mode", *harness.NO_HTTP} & set(two) and set(two) - set(one) == {
        "batch_size_target", "batch_size_limit", "max_batch_delay_ms", "compact_batches",
        "preferred_batch_sizes",
    }  # fmt: skip
