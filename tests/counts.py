"""How many examples a property is tried on, and which cases are left to --all."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings

from scheduling.policies import MODES

ALL = "ALL_TESTS" in os.environ  # set by tests/plugin.py for `./test.sh --all`


def tenth(n: int) -> int:
    """n with `./test.sh --all`, else a tenth of them."""
    return n if ALL else -(-n // 10)


def examples(n: int) -> Callable[[Any], Any]:
    """Marks a test of hypothesis as a property, which is tried on `tenth(n)` examples."""

    def decorate(test: Any) -> Any:
        return pytest.mark.property(settings(max_examples=tenth(n))(test))

    return decorate


def nightly(*parameters: Any) -> Any:
    """Return a case of a test, which --all alone tries."""
    return pytest.param(*parameters, marks=pytest.mark.nightly)


def nightly_but(kept: Collection[Any], every: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which `./test.sh` tries those that are kept, and --all every one."""
    return [
        each if each in kept else nightly(*(each if isinstance(each, tuple) else [each]))
        for each in every
    ]


SOME_MODES = nightly_but(("static", "dynamic"), MODES)
