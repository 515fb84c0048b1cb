"""From flags, EB_* in the environment and .env to a Config, in this order; the launcher does it
once.

`build` resolves `auto` and what was left out. Flags are strict: one that has no meaning in the
chosen mode is refused. The environment and a .env file may be shared between modes, so there only
unknown names are.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dotenv import dotenv_values
from pydantic import ValidationError

from config import orders
from config.resolve import resolve
from config.settings import ONLY_ON_GPU, POOL_SIZES, Config, ConfigError
from config.tables import NEEDS, ONLY_IN, flag, meaningful
from scheduling.policies import MODES

OPERATIONS = ("attention", "linear", "sampler", "norms")
# what has no meaning with an engine without a KV cache, and with none at all
UNUSED = {
    ("generator", "naive"): (*OPERATIONS, "kv_dtype", "prefix_caching"),
    ("model", "fake"): (*OPERATIONS, "kv_dtype"),
}
DOTENV = Path(__file__).resolve().parents[1] / ".env"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def add_settings(parser: argparse.ArgumentParser, unused: Collection[str] = ()) -> None:
    """Add a flag for every setting but the mode and those `unused`. Values stay strings: Config
    checks them.
    """
    group = parser.add_argument_group("settings (flag, or EB_NAME in the environment or in .env)")
    for name, field in Config.model_fields.items():
        if name == "mode" or name in unused:
            continue
        assert isinstance(field.json_schema_extra, dict)
        text = f"{field.description} (default: {field.json_schema_extra['shown']})"
        kind: dict[str, Any] = (
            {"action": argparse.BooleanOptionalAction}
            if field.annotation is bool
            else {"metavar": "X"}
        )
        group.add_argument(
            flag(name), dest=name, default=argparse.SUPPRESS, help=text.replace("%", "%%"), **kind
        )


def from_environment(environ: Mapping[str, str], dotenv: Path | None = DOTENV) -> dict[str, str]:
    """Return the settings of .env, overridden by EB_* variables. Raises ConfigError for an unknown
    EB_* name.
    """
    values: dict[str, str] = {}
    try:
        in_file = dotenv_values(dotenv) if dotenv and dotenv.is_file() else {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{dotenv} cannot be read ({error}); it must be a text file of NAME=value lines"
        ) from None
    for source in (in_file, environ):
        for key, value in source.items():
            if not key.startswith("EB_") or value is None:
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


def build(
    mode: str | None,
    flags: Mapping[str, Any],
    values: Mapping[str, str],
    fill_in: Callable[[Mapping[str, Any]], dict[str, Any]] = resolve,
) -> Config:
    """Return the Config of a mode from flags over environment values. Raises ConfigError.

    fill_in: what is `auto` or left out, if not by what this machine is.
    """
    mode = mode or values.get("mode")
    if mode not in MODES:
        what = f"unknown mode {mode!r}{_suggest(mode, MODES)}" if mode else "no mode given"
        raise ConfigError(f"{what}; valid modes are {', '.join(MODES)}")
    for name in flags:
        if not meaningful(name, mode):
            raise ConfigError(
                f"{flag(name)} has no meaning in mode {mode}; it belongs to "
                f"{' and '.join(ONLY_IN[name])}"
            )
    chosen = {**values, **flags}
    for name in flags.keys() & NEEDS.keys():
        other, of_which = NEEDS[name]
        if chosen.get(other) not in of_which:
            raise ConfigError(
                f"{flag(name)} has no meaning without {flag(other)} {' or '.join(of_which)}; add "
                "that, or leave it out"
            )
    for (name, value), settings in UNUSED.items():
        if chosen.get(name) == value and (unused := [each for each in settings if each in flags]):
            raise ConfigError(
                f"{flag(unused[0])} has no meaning with {flag(name)} {value}; leave one of them out"
            )
    for name, what in (("api_key", "a key"), ("api_keys", "a file of keys")):
        if flags.get(name, values.get(name)) == "":  # left out it would be open to everyone
            raise ConfigError(f"{flag(name)} is empty; give {what}, or none")
    try:
        config = Config(**fill_in({**values, **flags, "mode": mode}))
        if config.device == "cpu" and (unused := [name for name in flags if name in ONLY_ON_GPU]):
            raise ConfigError(f"{flag(unused[0])} has no meaning on a CPU; leave it out")
        orders.refuse(config, flags)
        if flags.get("enforce_eager") and (
            config.attention != "triton" or config.generator != "cached"
        ):
            raise ConfigError(
                "--enforce-eager has no meaning without attention triton, which alone is captured; "
                "leave it out"
            )
        if len(sizes := [name for name in POOL_SIZES if name in flags]) > 1:
            raise ConfigError(
                f"{flag(sizes[0])} and {flag(sizes[1])} both size the KV cache; leave one of them "
                f"out"
            )
        return config
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


def parse(
    argv: Sequence[str], environ: Mapping[str, str] = os.environ, dotenv: Path | None = DOTENV
) -> Config:
    """Parse a server's command line. Raises ConfigError; exits 0 after --help."""
    parser = Parser(
        prog="./server.sh", description="Serve GPT-2 in one batching mode.", allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=110),
    )  # fmt: skip
    parser.add_argument(
        "mode", nargs="?", metavar="MODE", help=Config.model_fields["mode"].description
    )
    add_settings(parser)
    known, unknown = parser.parse_known_args(argv)
    refuse_unknown(parser, unknown)
    flags = vars(known)
    return build(flags.pop("mode"), flags, from_environment(environ, dotenv))


def refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """Raise ConfigError, naming the valid flags, if argparse left anything over."""
    if unknown:
        valid = [option for option in parser._option_string_actions if option.startswith("--")]
        name = unknown[0].split("=")[0]
        kind = "flag" if name.startswith("-") else "argument"
        raise ConfigError(
            f"unknown {kind} {name}{_suggest(name, valid)}; valid flags are {', '.join(valid)}"
        )


def _suggest(word: str | None, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(word or "", valid, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def table() -> str:
    """Every setting as a row of Markdown: its flag, default and meaning."""
    rows = ["| flag | default | |", "|---|---|---|"]
    for name, field in Config.model_fields.items():
        assert isinstance(field.json_schema_extra, dict) or name == "mode"
        shown = (
            field.json_schema_extra["shown"] if isinstance(field.json_schema_extra, dict) else ""
        )
        rows.append(
            f"| `{'MODE' if name == 'mode' else flag(name)}` | {shown} | {field.description} |"
        )
    return "\n".join(rows)
