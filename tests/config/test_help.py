"""What --help shows: lines that fit the terminal, and of a hundred flags those most used."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

import pytest

from client import client
from compare import options
from config.config import Config
from config.flags import GROUPS
from config.settings import ConfigError
from server import launch
from simulate import program
from tests.config import serve

PARSERS: dict[str, Callable[[list[str]], object]] = {
    "./server.sh": serve,
    "./compare.sh": options.parse,
    "./simulate.sh": program.parse,
    "client/client.py": client.parse,
}
Shown = Callable[..., str]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    """Returns what a program prints in a terminal of so many columns."""

    def of(parser: Callable[[list[str]], object], words: str, columns: int) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as ended:
            parser(words.split())
        assert not ended.value.code
        return capsys.readouterr().out

    return of


HELPS = [(parser, words) for parser in PARSERS.values() for words in ("--help", "--help all")]


@pytest.mark.parametrize(("parser", "words"), HELPS)
def test_help_fits_a_width(parser: Callable[[list[str]], object], words: str, shown: Shown) -> None:
    """It was 110 columns wide in each terminal, so that one of 80 broke words in two lines."""
    whole = {*shown(parser, words, 10_000).split()}
    for columns in (50, 51, 63, 79, 80, 81, 120, 200):
        text = shown(parser, words, columns)
        assert max(map(len, text.splitlines())) <= columns
        assert {word for word in whole if len(word) <= columns - 32} <= {*text.split()}
    assert len(shown(parser, words, 1)) > len(text), "it ended with a traceback"


@pytest.mark.parametrize("program", PARSERS)
def test_help_shows_the_flags_most_used_and_all_on_demand(program: str, shown: Shown) -> None:
    parser = PARSERS[program]
    few, whole = (
        re.findall(r"^  (?:-h \[all\], )?(--[\w-]+)", shown(parser, words, 80), re.MULTILINE)
        for words in ("--help", "--help all")
    )
    assert len(few) <= 16 and {*few} < {*whole} and len({*whole}) == len(whole) >= 25
    assert f"--help all shows all {len(whole)} flags" in shown(parser, "--help", 80)


def test_help_shows_every_setting_once_with_its_default_in_a_group(shown: Shown) -> None:
    text = shown(serve, "--help all", 80)
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(Config.model_fields)
    assert all(title in text for title in GROUPS) and text.count("(default:") == len(grouped)
    for words in ("--help", "--help all"):  # beside the settings, of which MODE shows no default
        _, _, group = shown(serve, words, 80).partition("\nseveral servers:\n")
        flags = re.findall("^  (--[a-z]+)", group.partition("\n\n")[0], re.MULTILINE)
        assert (*flags,) == launch.OF_REPLICAS


@pytest.mark.parametrize("program", PARSERS)
def test_the_examples_of_help_are_understood(program: str, shown: Shown) -> None:
    _, _, text = shown(PARSERS[program], "--help", 200).partition("\nexamples:\n")
    for line in text.partition("\n\n")[0].splitlines():
        first, *argv = shlex.split(line)
        assert first == program
        PARSERS[program](argv)


@pytest.mark.parametrize(("program", "words"), [
    ("./server.sh", ""),
    ("./server.sh", "dynamic --max-batch-size"),
    ("./server.sh", "dynamic --max-batch-siz 8"),
    ("./compare.sh", "--seed many"),
    ("./simulate.sh", "--jobs"),
    ("client/client.py", ""),
    ("client/client.py", "--numsamples many"),
])  # fmt: skip
def test_an_error_of_usage_leads_to_help(program: str, words: str) -> None:
    """client.py printed the usage of all its flags before the error."""
    with pytest.raises(ConfigError, match=r"; --help( all)? (explains|shows)"):
        PARSERS[program](words.split())
