"""From flags, EB_* in the environment and .env to a Config, in this order; the launcher does it
once.

`build` resolves `auto` and what was left out. Flags are strict: one that has no meaning in the
chosen mode is refused. The environment and a .env file may be shared between modes, so there only
unknown names are.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dotenv import dotenv_values
from pydantic import ValidationError

from config import orders
from config.config import Config
from config.groups import GROUPS, meaning
from config.help import Parser
from config.left import LEFT
from config.pool import EARLIER, as_size, in_todays_names
from config.resolve import OPERATIONS, resolve
from config.settings import ConfigError
from config.tables import NEEDS, ONLY_IN, bounds_skipping, flag, meaningful
from scheduling.policies import MODES, ORDERS
from scheduling.user_policies import PROBLEMS

# settings without a meaning with engines but the cached one, and with none at all
UNUSED = {
    ("generator", "naive"): ("kernels", *OPERATIONS),
    ("generator", "padded"): ("attention",),
    ("model", "fake"): ("kernels", *OPERATIONS, "kv_dtype"),
}
FillIn = Callable[[Mapping[str, Any]], dict[str, Any]]
DOTENV = Path(__file__).resolve().parents[1] / ".env"


MOST_USED = (
    "--max-batch-size", "--token-budget", "--order", "--kv-cache", "--prefix-caching",
    "--max-model-len", "--model", "--weights", "--device", "--speculate", "--port", "--api-key",
)  # fmt: skip


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
    unseen: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for name in EARLIER if "kv_cache" not in unused else ():
        parser.add_argument(flag(name), dest="kv_cache", type=partial(_as_size, name), **unseen)


def _as_size(earlier: str, value: str) -> str:
    """Return the value of an earlier setting as one of kv_cache, with a warning."""
    size = as_size(earlier, value)
    print(f"warning: {flag(earlier)} is now --kv-cache {size}", file=sys.stderr)
    return size


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
            if not key.startswith("EB_") or value is None:
                continue
            name = key[3:].lower()
            if name in LEFT:
                raise ConfigError(f"{key} is no longer a setting: {LEFT[name]}")
            if name not in {*Config.model_fields, *EARLIER} or key != key.upper():
                known = [f"EB_{field.upper()}" for field in Config.model_fields]
                raise ConfigError(
                    f"unknown variable {key}{_suggest(key, known)}; valid ones are "
                    f"{', '.join(known)}"
                )
            if name in EARLIER:
                name, value = "kv_cache", _as_size(name, value)
            values[name] = value
    return values


def build(
    mode: str | None, flags: Mapping[str, Any], values: Mapping[str, str], fill_in: FillIn = resolve
) -> Config:
    """Return a mode's Config; fill_in resolves what is `auto`. Raises ConfigError."""
    mode = mode or values.get("mode")
    order = flags.get("order", values.get("order"))
    for name in (mode, order):
        if name in PROBLEMS:
            raise ConfigError(PROBLEMS[name])
    if mode in ORDERS:
        raise ConfigError(f"{mode} is an order, not a mode; write dynamic --order {mode}")
    if order in MODES:
        raise ConfigError(f"{order} is a mode, not an order; write it without --order")
    if mode not in MODES:
        what = f"unknown mode {mode!r}{_suggest(mode, MODES)}" if mode else "no mode given"
        more = "" if mode else "; --help explains them"
        raise ConfigError(f"{what}; valid modes are {', '.join(MODES)}{more}")
    flags = in_todays_names(flags)
    chosen = in_todays_names(values) | flags
    try:
        for reason in _meaningless(mode, flags, chosen):
            raise ValueError(reason)
        config = Config(**fill_in({**chosen, "mode": mode}))
        for reason in itertools.chain(
            _meaningless_here(config, flags), orders.contradictions(config, flags)
        ):
            raise ValueError(reason)
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


def _meaningless(mode: str, flags: Mapping[str, Any], chosen: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each flag that has no meaning beside the other settings."""
    for name in flags:
        if not meaningful(name, mode):
            modes = " and ".join(ONLY_IN[name])
            yield f"{flag(name)} has no meaning in mode {mode}; it belongs to {modes}"
    for name in flags.keys() & NEEDS.keys():
        other, values = NEEDS[name]
        if chosen.get(other) not in values and not bounds_skipping(name, chosen):
            yield (
                f"{flag(name)} has no meaning without {flag(other)} {' or '.join(values)}; add "
                "that, or leave it out"
            )
    for (other, value), names in UNUSED.items():
        for name in names:
            if name in flags and chosen.get(other) == value:
                yield (
                    f"{flag(name)} has no meaning with {flag(other)} {value}; leave one of them out"
                )
    for name in flags.keys() & {"max_loras", "lora_policy"}:
        if not (chosen.get("lora") or chosen.get("lora_random")):
            yield (
                f"{flag(name)} has no meaning without --lora or --lora-random; add one of them, or "
                "leave it out"
            )
    for name, what in (("api_key", "a key"), ("api_keys", "a file of keys")):
        if chosen.get(name) == "":  # left out it would be open to everyone
            yield f"{flag(name)} is empty; give {what}, or none"


def _meaningless_here(config: Config, flags: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each flag that has no meaning on this machine."""
    if config.device == "cpu":
        if "enforce_eager" in flags:
            yield "--enforce-eager has no meaning on a CPU; leave it out"
        if "batch_invariant" in flags:
            yield (
                "--batch-invariant has no meaning on a CPU, where our kernels add in one order "
                "already; leave it out"
            )
        if str(flags.get("kv_cache")).endswith("%"):
            yield (
                f"--kv-cache {flags['kv_cache']} is a share of a GPU's memory; on a CPU give a "
                "size such as 4GB or 2048blocks"
            )
    elif flags.get("enforce_eager") and (
        config.attention != "triton" or config.generator != "cached"
    ):
        yield (
            "--enforce-eager has no meaning without attention triton, which alone is captured; "
            "leave it out"
        )


def parse(
    argv: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    dotenv: Path | None = DOTENV,
    fill_in: FillIn = resolve,
) -> Config:
    """Parse a server's command line. Raises ConfigError; exits 0 after --help."""
    parser = Parser(
        prog="./server.sh", usage="%(prog)s MODE [--setting X …]",
        description="Serve GPT-2 in one batching mode; with --replicas N [--router NAME] "
        "[--autoscale NAME=VALUE …] as N replicas on Ray Serve.", most_used=MOST_USED,
        examples=["./server.sh dynamic --max-batch-size 16"],
    )  # fmt: skip
    parser.add_argument("mode", nargs="?", metavar="MODE", help=meaning("mode")[0])
    add_settings(parser)
    known, unknown = parser.parse_known_args(argv)
    refuse_unknown(parser, unknown)
    flags = vars(known)
    return build(flags.pop("mode"), flags, from_environment(environ, dotenv), fill_in)


def refuse_unknown(parser: Parser, unknown: Sequence[str]) -> None:
    """Raise ConfigError, naming the nearest flag, if argparse left anything over."""
    if unknown:
        valid = [
            option
            for option, action in parser._option_string_actions.items()
            if option.startswith("--") and action.help != argparse.SUPPRESS
        ]
        name = unknown[0].split("=")[0]
        if instead := LEFT.get(name.removeprefix("--").removeprefix("no-").replace("-", "_")):
            raise ConfigError(f"{name} is no longer a flag: {instead}")
        kind = "flag" if name.startswith("-") else "argument"
        raise ConfigError(
            f"unknown {kind} {name}{_suggest(name, valid)}; {parser.help_flag} shows all flags, "
            f"and docs/settings.md what other systems call them"
        )


def _suggest(word: str | None, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(word or "", valid, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
