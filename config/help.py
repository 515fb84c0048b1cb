"""Parsers of command lines: errors are sentences, and --help is as wide as the terminal. Of a
program with many flags it shows those most used, and all of them with `--help all`.
"""

from __future__ import annotations

import argparse
import itertools
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from config.settings import ConfigError


class Formatter(argparse.HelpFormatter):
    """Breaks lines between words alone; indented lines, such as commands, stay lines."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30)

    def start_section(self, heading: str | None) -> None:
        margin = " " * self._current_indent
        super().start_section(heading and _wrapped(heading, self._width - 1, "", margin))

    def _format_usage(self, *arguments: Any) -> str:
        usage = super()._format_usage(*arguments)
        return self._fill_text(usage.strip(), self._width, "") + "\n\n"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = []
        for stays, lines in itertools.groupby(text.splitlines(), lambda line: line[:1] in " "):
            for line in lines if stays else [" ".join(lines)]:
                margin = indent + " " * (len(line) - len(line.lstrip()))
                filled.append(_wrapped(line.strip(), width, margin, margin + "  " * stays))
        return "\n".join(filled)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        invocation, margin = super()._format_action_invocation(action), self._current_indent
        return _wrapped(invocation, self._width - margin, "", " " * (margin + 2))


def _wrapped(text: str, width: int, first: str, others: str) -> str:
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False
    )


class Parser(argparse.ArgumentParser):
    """Raises ConfigError. most_used: the flags that --help shows, with `examples`, if not all."""

    def __init__(
        self, *, most_used: Sequence[str] = (), examples: Sequence[str] = (),
        add_help: bool = True, **settings: Any,
    ):  # fmt: skip
        self._most_used, self._examples = most_used, examples
        super().__init__(
            formatter_class=Formatter, allow_abbrev=False, add_help=add_help and not most_used,
            **settings,
        )  # fmt: skip
        self.help_flag = "--help all" if most_used else "--help"
        if most_used:
            text = "show the flags most used, or all of them"
            self.add_argument("-h", "--help", action=_Help, nargs="?", metavar="all", help=text)

    def error(self, message: str) -> NoReturn:
        if ";" not in message:  # a sentence of ours says what to do after it
            message += f"; {self.help_flag} explains each flag"
        raise ConfigError(message)

    def format_most_used(self) -> str:
        flags = [each for each in self._actions if each.option_strings]
        n_flags = sum(each.help != argparse.SUPPRESS for each in flags)
        shown = [self._option_string_actions[name] for name in ("--help", *self._most_used)]
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        formatter.start_section("flags most used")
        formatter.add_arguments(self._get_positional_actions() + shown)
        formatter.end_section()
        if self._examples:
            formatter.add_text("\n  ".join(["examples:", *self._examples]))
        formatter.add_text(f"{self.help_flag} shows all {n_flags} flags")
        return formatter.format_help()


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> None:
        assert isinstance(parser, Parser)
        _, words, _ = arguments
        print(parser.format_help() if words == "all" else parser.format_most_used(), end="")
        parser.exit()
