"""Nothing that a benchmark records is without effect on it, and what would have none is not
offered.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import agreement, attention, burst, engine, gpu, huggingface, long_prompt
from benchmarks.common import NO_HTTP, run
from config import ONLY_OVER_HTTP, Config


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of a tiny model with GPT-2's vocabulary and context."""
    folder = tmp_path_factory.mktemp("small")
    folder.joinpath("config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16})
    )
    return ["--model", str(folder), "--weights", "random", "--dtype", "float32", "--threads", "1"]


def last_line(
    main: Callable[[], None], arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_the_loop_interval_that_a_burst_records_is_slept(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It was recorded, and the engine's loop never heard of it."""
    found = last_line(
        burst.main, [*small, "--n", "2", "--loop-interval-ms", "5"], monkeypatch, capsys
    )
    mode = found["modes"]["dynamic"]
    assert found["config"]["loop_interval_ms"] == 5 and mode["wall_clock_s"] >= 0.005 * (
        mode["iterations"] - 1
    )


@pytest.mark.nightly
def test_only_settings_with_an_effect_are_recorded(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("EB_PORT", "9")  # the environment may be shared
    two = last_line(
        burst.main, [*small, "--n", "1", "--modes", "dynamic,windowed"], monkeypatch, capsys
    )["config"]
    one = last_line(burst.main, [*small, "--n", "1"], monkeypatch, capsys)["config"]
    assert not {"mode", *NO_HTTP} & set(two) and set(two) - set(one) == {
        "batch_size_target", "batch_size_limit", "max_batch_delay_ms", "compact_batches",
        "preferred_batch_sizes",
    }  # fmt: skip
    monkeypatch.setattr(attention, "BYTES", 100_000)
    rows = ["--rows", "1,2", "--contexts", "20", "--repeats", "1"]
    found = last_line(attention.main, [*small[:2], *small[4:], *rows], monkeypatch, capsys)
    assert set(found["config"]) == {"model", "device", "dtype", "threads", "block_size", "kv_dtype"}
    assert [point["bytes"] for point in found["points"]] == [n * 20 * 2 * 16 * 4 for n in (1, 2)]
    assert all(min(point["bytes_per_s"].values()) > 0 for point in found["points"])


@pytest.mark.nightly
def test_of_hugging_faces_only_settings_with_an_effect_are_recorded(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    theirs = last_line(huggingface.main, [*small, "--n", "1"], monkeypatch, capsys)["config"]
    assert set(theirs) == {"model", "weights", "weights_seed", "dtype", "device", "threads"}


@pytest.mark.parametrize(
    ("main", "arguments", "said"),
    [
        *[
            (main, ["--port", "1"], "unknown flag --port")
            for main in (burst.main, engine.main, long_prompt.main, gpu.main)
        ],
        (engine.main, ["--order", "fcfs"], "unknown flag --order"),
        (engine.main, ["--prefix-caching"], "unknown flag --prefix-caching"),
        (long_prompt.main, ["--prefix-caching"], "unknown flag --prefix-caching"),
        (agreement.main, ["--request-timeout-s", "3"], "unknown flag --request-timeout-s"),
        (agreement.main, ["--loop-interval-ms", "3"], "unknown flag --loop-interval-ms"),
        (engine.main, ["--max-waiting", "3"], "unknown flag --max-waiting"),
        (burst.main, ["--tokenizer", "bytes"], "unknown flag --tokenizer"),
        (huggingface.main, ["--token-budget", "9"], "unknown flag --token-budget"),
        (
            burst.main,
            ["--batch-size-target", "3"],
            "--batch-size-target has no meaning in mode dynamic",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(
    main: Callable[[], None],
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["benchmark", "--model", "demo", "--device", "cpu", *arguments]
    )
    with pytest.raises(SystemExit) as caught:
        run(main)
    assert caught.value.code == 2 and said in capsys.readouterr().err


def test_every_part_of_the_gpus_command_gets_the_settings_that_it_knows() -> None:
    settings = {
        "model": "gpt2",
        "tokenizer": "bytes",
        "max_batch_size": "16",
        "loop_interval_ms": "1",
    }
    options = type(
        "Options", (), {"rows": "1", "context": "9", "prompts": "9", "n": 3, "numsamples": 5}
    )
    flags = {
        name: [
            word
            for word in command
            if word in ("--tokenizer", "--max-batch-size", "--loop-interval-ms")
        ]
        for name, command in gpu.commands(options, settings, True, Path("out")).items()
    }
    assert flags == {
        "agreement": ["--max-batch-size"],
        "steps": ["--max-batch-size"],
        "steps_eager": ["--max-batch-size"],
        "burst": ["--max-batch-size", "--loop-interval-ms"],
        "burst_huggingface": [],
        "comparison": ["--tokenizer", "--max-batch-size", "--loop-interval-ms"],
    }
    assert set(ONLY_OVER_HTTP) <= NO_HTTP <= set(Config.model_fields)
