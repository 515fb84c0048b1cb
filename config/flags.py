"""From flags, EB_* in the environment and .env to a Config, in this order; the launcher does it
once. And parsers of command lines: errors are sentences, and --help is as wide as the terminal.

`build` is handed what `auto` means on this machine (generate/auto.py). Flags are strict: one that
has no meaning in the chosen mode is refused. The environment and a .env file may be shared between
modes, so there only unknown names are.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import itertools
import os
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from dotenv import dotenv_values
from pydantic import ValidationError

from config.checks import refusals
from config.config import Config
from config.settings import KINDS, ConfigError, flag
from scheduling import user_policies
from scheduling.policies import MODES, ORDERS
from scheduling.routers import ON_RAY

FillIn = Callable[[Mapping[str, Any]], dict[str, Any]]  # resolves `auto`, and what was left out
DOTENV = Path(__file__).resolve().parents[1] / ".env"
SETTING = re.compile(  # and none of those in each pod beside a Kubernetes service named eb or eb-…
    r"EB_(?!(\w+_)?(SERVICE_HOST=|SERVICE_PORT(_\w+)?=\d+$|"
    r"PORT(_\d+_[A-Z]+)?=[a-z]+://|PORT_\d+_[A-Z]+_(PROTO|PORT|ADDR)=))"
)
MOST_USED = (
    *("--max-batch-size", "--token-budget", "--order", "--kv-cache", "--prefix-caching"),
    *("--max-model-len", "--model", "--weights", "--device", "--speculate", "--port", "--api-key"),
)
Flags = dict[str, dict[str, Any]]  # by flag, the options of argparse's `add_argument`
SEVERAL = "several servers"  # title of the flags that are no settings; the short --help has them
REPLICAS: Flags = {
    "--replicas": {"type": int, "metavar": "N", "help": "serve as N replicas on Ray Serve"},
    "--router": {"choices": ON_RAY, "default": ON_RAY[0], "help":
        "policy that chooses a replica for each request (default: %(default)s)"},
    "--autoscale": {"nargs": "+", "metavar": "NAME=VALUE", "help":
        "begin with --replicas and let Ray Serve follow the load: settings of its "
        "autoscaling_config, such as max_replicas=4 target_ongoing_requests=24"},
}  # fmt: skip
# settings by what a user wants to do: the order of --help and of docs/settings.md
GROUPS = {
    title: tuple(names.split())
    for title, names in {
        "How batches form": "mode max_batch_size token_budget budget_counts prefill "
        "compact_batches max_batch_delay_ms batch_size_target preferred_batch_sizes bins "
        "loop_interval_ms ahead",
        "Order of the waiting requests": "order max_wait_s priority_levels default_priority_level "
        "queue_policy length_predictor prefill_weight aging user_weights mlfq_quantum slo_classes "
        "shed preserve_ordering",
        "Memory": "kv_cache kv_dtype kv_reservation row_order victim watermark prefix_caching "
        "max_model_len block_size",
        "Model and engine": "model weights tokenizer device dtype threads kernels generator "
        "padded_prefill fake_slowdown",
        "Speculative decoding": "speculate draft",
        "LoRA adapters": "lora lora_random max_loras lora_policy",
        "HTTP and limits": "host port http_processes api_key api_keys allowed_hosts max_waiting "
        "user_requests_per_minute user_tokens_per_minute request_timeout_s header_timeout_s "
        "body_timeout_s drain_timeout_s",
        "Observing": "live request_log record",
        "For experts: parts of the engine, each before --kernels": "attention linear "
        "decoder_batch_sizes",
    }.items()
}
_GROUPED = {name for names in GROUPS.values() for name in names}
# settings of policies and orders that a user added
GROUPS["How batches form"] += tuple(
    dict.fromkeys(each.name for kind in KINDS for each in fields(kind) if each.name not in _GROUPED)
)

# ---- a Config of flags and of the environment


def parse(
    argv: Sequence[str],
    fill_in: FillIn,
    environ: Mapping[str, str] = os.environ,
    dotenv: Path | None = DOTENV,
) -> Config:
    """Parse a server's command line. Raises ConfigError; exits 0 after --help."""
    parser = Parser(
        prog="./server.sh",
        usage="%(prog)s MODE [--setting X …]",
        description="Serve GPT-2 in one batching mode.",
        most_used=MOST_USED,
        examples=["./server.sh dynamic --max-batch-size 16"],
    )
    parser.add_argument("mode", nargs="?", metavar="MODE", help=meaning("mode")[0])
    # for --help and suggestions: server.replicas.serve takes them out
    add_flags(parser.add_argument_group(SEVERAL), REPLICAS)
    add_settings(parser)
    known, unknown = parser.parse_known_args(argv)
    refuse_unknown(parser, unknown)
    flags = {name: value for name, value in vars(known).items() if name in Config.model_fields}
    return build(flags.pop("mode"), flags, from_environment(environ, dotenv), fill_in)


def build(
    mode: str | None, flags: Mapping[str, Any], values: Mapping[str, str], fill_in: FillIn
) -> Config:
    """Return a mode's Config. values: settings of the environment. Raises ConfigError."""
    mode = mode or values.get("mode")
    order, victim = (flags.get(name, values.get(name)) for name in ("order", "victim"))
    for name in (mode, order, victim):
        if why := user_policies.problem(name):
            raise ConfigError(why)
    if mode in ORDERS:
        raise ConfigError(f"{mode} is an order, not a mode; write dynamic --order {mode}")
    if order in MODES:
        raise ConfigError(f"{order} is a mode, not an order; write it without --order")
    if mode not in MODES:
        what = f"unknown mode {mode!r}{_suggest(mode, MODES)}" if mode else "no mode given"
        more = "" if mode else "; --help explains them"
        raise ConfigError(f"{what}; valid modes are {', '.join(MODES)}{more}")
    chosen = {**values, **flags, "mode": mode}
    for name, what in ("api_key", "a key"), ("api_keys", "a file of keys"):
        if chosen.get(name) == "":  # left out it would be open to everyone
            raise ConfigError(f"{flag(name)} is empty; give {what}, or none")
    try:
        config = Config(**fill_in(chosen))
        for sentence in refusals(config, flags):
            raise ConfigError(sentence)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if first["loc"]:
            name = str(first["loc"][0])
            given = "" if name == "api_key" else f" {first['input']!r}"
            message = f"{flag(name)}{given}: {message[0].lower()}{message[1:]}"
        raise ConfigError(message) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config


def from_environment(environ: Mapping[str, str], dotenv: Path | None = DOTENV) -> dict[str, str]:
    """Return the settings of EB_* variables over .env. Raises ConfigError for unknown ones."""
    values: dict[str, str] = {}
    try:
        in_file = dotenv_values(dotenv) if dotenv and dotenv.is_file() else {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{dotenv} cannot be read ({error}); it must be a text file of NAME=value lines"
        ) from None
    for source in (in_file, environ):
        for key, value in source.items():
            if value is None or not SETTING.match(f"{key}={value}"):
                continue
            name = key[3:].lower()
            if name not in Config.model_fields or key != key.upper():
                known = [f"EB_{field.upper()}" for field in Config.model_fields]
                raise ConfigError(
                    f"unknown variable {key}{_suggest(key, known)}; valid ones are "
                    f"{', '.join(known)}"
                )
            values[name] = value
    return values


# ---- parsers of command lines


def meaning(name: str) -> tuple[str, str]:
    """Return what a setting means, and its default in words."""
    field = Config.model_fields[name]
    known = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    default = str(known.get("shown", field.default))
    names = {"False": "off", "None": "none", "": "none", "PydanticUndefined": ""}
    return " ".join(str(field.description).split()), names.get(default, default)


def add_settings(
    parser: argparse.ArgumentParser, unused: Collection[str] = (), hidden: Collection[str] = ()
) -> None:
    """Add a flag for each setting but the mode and `unused`; Config checks their strings. hidden:
    settings that --help leaves out.
    """
    about: str | None = "settings are flags, or EB_NAME in the environment or in .env"
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title, about)
        about = None
        for name in names:
            if name == "mode" or name in unused:
                continue
            text, default = meaning(name)
            kind: dict[str, Any] = (
                {"action": argparse.BooleanOptionalAction}
                if Config.model_fields[name].annotation is bool
                else {"metavar": "X"}
            )
            help = f"{text} (default: {default})".replace("%", "%%")
            if name in hidden:
                help = argparse.SUPPRESS
            group.add_argument(flag(name), dest=name, default=argparse.SUPPRESS, help=help, **kind)


def add_flags(parser: argparse._ActionsContainer, flags: Flags) -> None:
    """Add flags to a parser, or to a group of one. Lists that are given twice are joined."""
    for name, options in flags.items():
        several: dict[str, Any] = {"action": "extend"} if options.get("nargs") in ("+", "*") else {}
        parser.add_argument(name, **several | options)


def check_replicas(replicas: int) -> None:
    """Raise ConfigError if there are none, or if Ray is missing."""
    if replicas < 1:
        raise ConfigError(f"--replicas {replicas}: give 1 or more")
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--replicas needs Ray; install it: .venv/bin/python -m pip install -r "
            "requirements-ray.txt, or simulate replicas with ./simulate.sh"
        )


def refuse_unknown(parser: Parser, unknown: Sequence[str]) -> None:
    """Raise ConfigError, naming the nearest flag, if argparse left anything over."""
    if unknown:
        valid = [
            option
            for option, action in parser._option_string_actions.items()
            if option.startswith("--") and action.help != argparse.SUPPRESS
        ]
        name = unknown[0].split("=")[0]
        kind = "flag" if name.startswith("-") else "argument"
        raise ConfigError(
            f"unknown {kind} {name}{_suggest(name, valid)}; {parser.help_flag} shows all flags, "
            f"and docs/settings.md what other systems call them"
        )


def refuse_unknown_settings(what: str, settings: Iterable[str]) -> None:
    """Raise ConfigError, naming the nearest setting, if this version does not know one of those
    that `what`, which was saved, was made with.
    """
    for name in settings:
        if name not in Config.model_fields and not hasattr(Config, name):
            raise ConfigError(
                f"{what} has the setting {name}, which this version does not know"
                f"{_suggest(name, Config.model_fields)}"
            )


def _suggest(word: str | None, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(word or "", valid, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


class Formatter(argparse.HelpFormatter):
    """Breaks lines between words alone; indented lines, such as commands, stay lines."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30)
        self._width = max(self._width, 20)  # a terminal can have a column

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
        for group in self._action_groups:
            if group.title == SEVERAL:
                formatter.start_section(SEVERAL)
                formatter.add_arguments(group._group_actions)
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
