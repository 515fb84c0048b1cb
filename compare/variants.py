"""Variants that are compared: modes with settings of their own, and servers that run already."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from client.addresses import base_url
from client.users import NAME, missing
from config.config import Config
from config.flags import Parser, add_settings, refuse_unknown
from config.settings import ConfigError, flag
from scheduling.policies import MODES

BASIC = ("nobatch", "static", "windowed", "dynamic")  # compared by default


@dataclass(frozen=True, slots=True)
class Variant:
    """A mode with settings of its own, compared under a name; a bare mode is one, too."""

    mode: str
    flags: dict[str, Any]


def settings(known: argparse.Namespace) -> dict[str, Any]:
    """Return the server settings of a command line. Raises ConfigError."""
    flags = {
        name: value
        for name, value in vars(known).items()
        if name in Config.model_fields and name != "mode"
    }
    for name in ("host", "port"):
        if name in flags:
            raise ConfigError(
                f"{flag(name)} has no meaning here: every variant gets a free port on this machine"
            )
    return flags


def parse_modes(text: str | None) -> dict[str, Variant]:
    """Return {"static": …} for "static", {"Mine": …} for "mine.py:Mine". Raises ConfigError."""
    modes = text.split(",") if text else list(BASIC)
    if len(set(modes)) < len(modes):
        raise ConfigError("--modes names a mode twice")
    named: dict[str, Variant] = {}
    for mode in modes:
        if why := unfit(name := mode.rpartition(":")[2], named):
            raise ConfigError(f"--modes {text}: {why}; give it a name with --variant")
        named[name] = Variant(mode, {})
    return named


def unfit(name: str, others: Iterable[str]) -> str:
    """Return why no variant can have a name, if so: its file would be another one's too, on systems
    that ignore case, or tables would lose it.
    """
    taken = name.casefold() in {"summary", *(other.casefold() for other in others)}
    return f"{name} is taken" if taken else missing(name)


def parse_variants(texts: Sequence[str], mode: str | None = None) -> dict[str, Variant]:
    """{"small": Variant(…)} from ["small=dynamic --token-budget 32"]. mode: theirs that name none.
    Raises ConfigError.
    """
    variants: dict[str, Variant] = {}
    for text in texts:
        name, _, words = text.partition("=")
        if "--api-key" in words:
            raise ConfigError(
                "--variant has a key, which would be saved and shown; give --api-key for all "
                "variants beside it, or EB_API_KEY"
            )
        parser = Parser(prog="--variant", add_help=False)
        parser.add_argument("mode", nargs="?", default=mode)
        add_settings(parser)
        try:
            known, unknown = parser.parse_known_args(shlex.split(words))
            if not NAME.fullmatch(name) or known.mode is None:
                raise ConfigError(
                    "give NAME='MODE --setting …', such as small='dynamic --token-budget 32'"
                )
            refuse_unknown(parser, unknown)
            others = [*variants, *(mode for mode in MODES if mode == name != known.mode)]
            if why := unfit(name, others):
                raise ConfigError(f"{why}; choose another name")
            variants[name] = Variant(known.mode, settings(known))
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"--variant {text!r}: {error}") from None
    return variants


def parse_also(texts: Sequence[str], variants: Collection[str] = ()) -> dict[str, str]:
    """{"vllm": "http://host:8000"} from ["vllm=http://host:8000"]. Raises ConfigError."""
    also: dict[str, str] = {}
    for text in texts:
        name, _, url = base_url(text, "--also").partition("=")
        if not NAME.fullmatch(name) or not url.startswith(("http://", "https://")):
            raise ConfigError(f"--also {text!r}: give NAME=URL, such as vllm=http://localhost:8000")
        if why := unfit(name, (*MODES, *variants, *also)):
            raise ConfigError(f"--also {text!r}: {why}; choose another name")
        also[name] = base_url(url, "--also")
    return also
