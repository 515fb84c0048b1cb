"""The frame of every benchmark: its command line, and how results are written.

Each result carries its machine, commit, date and command, in one JSON line at the end or in a file
beside its page. Knows no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client.arguments import folder
from client.calls import ServerError
from client.machine import command_line, stamp
from client.saving import write
from client.stopping import end_as_on_ctrl_c
from config.config import Config
from config.flags import Parser, add_settings, from_environment, refuse_unknown
from config.settings import ONLY_OVER_HTTP, ConfigError, has_effect, meaningful
from generate.auto import build
from generate.kernels import KernelUnavailable
from generate.memory import OutOfMemory
from generate.weights import WeightsUnavailable

# settings without effect where prompts are ids, no client is connected and no thread plans ahead
NO_HTTP = frozenset({*ONLY_OVER_HTTP, "tokenizer", "ahead"})


@dataclass(frozen=True)
class Benchmark:
    """The command line of `python -m lab.benchmarks.NAME`, and the writer of its results.

    description: the module's docstring. options: its own flags, each with its default (or its type,
    if it has none) and help. unused: settings of a server without effect here, which are neither
    offered nor recorded. of_engine: it measures the engine, and refuses a model or a generator
    without one.
    """

    name: str
    description: str | None
    options: Mapping[str, tuple[Any, str]]
    unused: Collection[str] = ()
    of_engine: bool = False

    def parser(self) -> Parser:
        about: dict[str, Any] = {"description": self.description, "usage": argparse.SUPPRESS}
        parser = Parser(**about, most_used=[*self.options])
        for flag, (default, text) in self.options.items():
            if default == []:
                parser.add_argument(flag, action="append", default=default, help=text)
            elif callable(default):
                parser.add_argument(flag, type=default, help=f"{text} (default: none)")
            else:
                text = f"{text} (default: {default})"
                kind = folder if isinstance(default, Path) else type(default)
                parser.add_argument(flag, type=kind, default=default, help=text)
        add_settings(parser, self.unused)
        return parser

    def configs(
        self, modes: Sequence[str] = ("dynamic",), **defaults: Any
    ) -> tuple[argparse.Namespace, list[Config]]:
        """Parse options and settings; return the options, and a Config for each mode.

        defaults: values of settings, or functions of the options. Raises ConfigError.
        """
        parser = self.parser()
        options, unknown = parser.parse_known_args()
        refuse_unknown(parser, unknown)
        values = {
            name: str(value(options) if callable(value) else value)
            for name, value in defaults.items()
        } | from_environment(os.environ)
        values = {name: value for name, value in values.items() if name not in self.unused}
        if "tokenizer" in self.unused:
            values["tokenizer"] = "bytes"  # which fits every vocabulary
        chosen, configs = chosen_settings(options), []
        for mode in modes:
            # a flag that no mode knows stays, so that `build` refuses it
            elsewhere = {name for name in chosen if any(meaningful(name, other) for other in modes)}
            flags = {k: v for k, v in chosen.items() if meaningful(k, mode) or k not in elsewhere}
            configs.append(build(mode, flags, values))
        if self.of_engine and any(c.model == "fake" or c.generator != "cached" for c in configs):
            raise ConfigError(
                "this benchmark measures the cached engine: leave out --model fake and --generator"
            )
        return options, configs

    def record(self, configs: Sequence[Config] = ()) -> dict[str, Any]:
        """Machine, commit, date, command, and of the settings those that had an effect."""
        program = ["-m", f"lab.benchmarks.{self.name}"]
        command = command_line("python", [*program, *sys.argv[1:]])
        if not configs:
            return stamp() | {"command": command}
        # where a model's folder lies on this machine means nothing elsewhere
        model = Path(configs[0].model).name
        settings = [config.model_dump() for config in configs]
        used = {
            name for name in Config.model_fields if any(has_effect(name, each) for each in settings)
        } - {*self.unused}
        return {
            "config": configs[0].model_dump(include=used) | {"model": model},
            "command": command.replace(configs[0].model, model),
        } | stamp()

    def write(
        self, folder: Path, title: str, setup: str, body: str, result: Mapping[str, Any]
    ) -> None:
        """Write NAME.md and NAME.json, the numbers with their record; print the page."""
        page = (
            f"# {title}\n\n{setup}; `{result['command']}`, commit {result['commit']}, "
            f"{result['date']}.\n\n{body}\n"
        )
        print(page)  # first, lest it is lost where no file can be written
        write(folder / f"{self.name}.md", page)
        write(folder / f"{self.name}.json", json.dumps(result, indent=1) + "\n")
        print(f"{self.name}.md and {self.name}.json: {folder}")


def chosen_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings among the options that a user has typed."""
    return {name: value for name, value in vars(options).items() if name in Config.model_fields}


def run(main: Callable[[], None]) -> None:
    """Call a benchmark's main; an error that a user can mend ends with a sentence and exit 2."""
    end_as_on_ctrl_c()  # a server that was started is stopped, too
    try:
        main()
    except (ConfigError, KernelUnavailable, OutOfMemory, ServerError, WeightsUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell reports it; what was printed by then says how far it came
