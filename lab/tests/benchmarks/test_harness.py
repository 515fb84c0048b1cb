"""What all benchmarks share: options, settings with an effect, sentences, and pages."""

from __future__ import annotations

import re
import shlex
from unittest import mock

import pytest

from config.settings import ConfigError
from lab.benchmarks import harness
from tests.programs import ran


@pytest.mark.parametrize(("benchmark", "arguments", "sentence"), [
    ("burst", "--model demo --n 257", "--n must be from 1 to 256"),
    ("burst", "--model demo --max-model-len 128", "longest request has 217 tokens"),
    ("burst", "--model fake", "leave out --model fake"),
    ("burst", "--tokenizer bytes", "unknown flag --tokenizer"),
    ("burst", "--batch-size-target 3", "--batch-size-target has no meaning in mode dynamic"),
    ("engine", "--model demo --rows 1,x", "no list of positive numbers"),
    ("engine", "--model demo --rows ²", "no list of positive numbers"),
    ("engine", "--model demo --repeats 0", "--repeats must be 1 or more"),
    ("engine", "--model demo --contexts 2000", "at most 1024 tokens"),
    ("engine", "--model demo --rows 64 --kv-cache 0.02GB", "raise --kv-cache"),
    ("engine", "--model demo --rows 64 --max-batch-size 32", "raise --max-batch-size, 32"),
    ("engine", "--order fcfs", "unknown flag --order"),
    ("engine", "--ahead", "unknown flag --ahead"),  # plans are made by no thread
    ("agreement", "--model demo --n 33 --max-batch-size 32", "at most --max-batch-size"),
    ("agreement", "--loop-interval-ms 3", "unknown flag --loop-interval-ms"),
    ("gpu", "", "device cuda: no GPU is usable here; use --device cpu"),
    ("gpu", "--port 1", "unknown flag --port"),
])  # fmt: skip
def test_bad_input_ends_with_a_sentence(benchmark: str, arguments: str, sentence: str) -> None:
    """A setting that would have no effect is refused, so that none is recorded."""
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        ran(f"lab.benchmarks.{benchmark}", *shlex.split(arguments))


def test_an_error_is_a_sentence_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "end_as_on_ctrl_c", lambda: None)  # its handler would stay
    for error, code in ((ConfigError("mend it"), 2), (KeyboardInterrupt(), 130)):
        with pytest.raises(SystemExit) as ended:
            harness.run(mock.Mock(side_effect=error))
        assert ended.value.code == code
    assert capsys.readouterr().err == "error: mend it\n"
