"""The pages' commands of studies and benchmarks."""

from __future__ import annotations

import re

from config.settings import ConfigError
from tests.programs import ran
from tests.test_readme import COMMANDS


def test_each_command_of_the_pages_is_understood() -> None:
    of_python = [command[2:] for command in COMMANDS if command[0] == "python"]
    commands = [each for each in of_python if each[0].startswith("lab.")]
    assert commands
    for module, *arguments in commands:
        # it knows all of its arguments if it complains of one more alone
        try:
            message = ran(module, *arguments, "--qqqqqqqq").stderr
        except ConfigError as error:
            message = str(error)
        assert re.search(r"(unknown flag|unrecognized arguments:) --qqqqqqqq(;|\n|$)", message)
