"""Command lines of a server on a machine without a GPU, unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from config.config import Config
from config.flags import parse
from config.settings import ConfigError
from generate import auto


def serve(argv: list[str]) -> Config:
    return parse(argv, auto.resolve)


def parsed(line: str, environ: Mapping[str, str] = {}, dotenv: Path | None = None) -> Config:
    return parse(line.split(), auto.resolve, environ, dotenv)


def refused(line: str, environ: Mapping[str, str] = {}, dotenv: Path | None = None) -> str:
    """Return the sentence with which it is refused."""
    with pytest.raises(ConfigError) as caught:
        parsed(line, environ, dotenv)
    assert "\n" not in str(caught.value)
    return str(caught.value)
