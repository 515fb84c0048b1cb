"""deploy/serve.sh: words that it refuses before it starts anything."""

from __future__ import annotations

import sys

import pytest

from config import ConfigError
from deploy import serve


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--replicas 0", "give 1 or more"),
        ("--router rr", "invalid choice: 'rr'"),
        ("--autoscale replicas=3", "name one of min_replicas, max_replicas"),
        ("--autoscale max_replicas=many", "--autoscale max_replicas: Input should be a valid int"),
        ("--autoscale max_replicas=0", "max_replicas must be at least min_replicas, 1"),
        ("--record x", "file of one server"),
        ("--max-batch-size 0", "--max-batch-size"),
    ],
)
def test_a_wrong_word_is_a_sentence(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve.read(["dynamic", "--model", "fake", *flags.split()])
    assert sentence in str(caught.value)


def test_without_ray_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install -r requirements-ray\.txt"):
        serve.serve(["dynamic", "--model", "fake"])


def test_an_earlier_setting_is_warned_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The settings were parsed twice: once more for the threads."""
    serve.read(["dynamic", "--model", "fake", "--replicas", "2", "--kv-blocks", "99"])
    assert capsys.readouterr().err.count("warning: ") == 1
