"""The command line of compare.sh, checked before any server starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from client.draws import ARRIVALS
from client.workloads import add_workload, contradiction, seconds_say_how_many
from compare.deployments import Deployment, add_deployment, deployment_of
from compare.servers import ROOT
from compare.variants import BASIC, Variant, parse_also, parse_modes, parse_variants, settings
from config import (
    Config,
    ConfigError,
    Parser,
    add_settings,
    build,
    flag,
    from_environment,
    meaningful,
    refuse_unknown,
)
from stats import LIMITED

LOAD = 0.85  # of the capacity of dynamic: beyond what static can deliver, within what dynamic can
SWEEP_GOODPUT = ["e2el:2000"]
REQUESTS = 300
MOST = 12  # that are told apart in a figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    variants: dict[str, Variant]
    baseline: str  # with which the others are compared
    numsamples: int | None  # None: as many as users send in their seconds
    arrival: str
    lengths: str | None  # of a workload what was given, here and below
    selection: str | None
    prompts: str | None
    prefixes: str | None
    sessions: str | None
    users: list[str] | None
    priorities: list[str] | None
    trace: Path | None
    scale: int | None
    seed: int
    repeats: int
    sweep: bool
    seconds: float | None  # of sending at each rate of a sweep; None: as long as its numbers need
    goodput: dict[str, float]
    stream: bool
    out: Path
    flags: dict[str, Any]  # server settings of all variants, as given
    also: dict[str, str] = field(default_factory=dict)  # {name: URL} of servers that run already
    deployment: Deployment | None = None  # of each variant; None: a server alone
    timeout: float = 3600.0
    calibration: bool = False

    @property
    def names(self) -> list[str]:
        return [*self.variants, *self.also]

    @property
    def key(self) -> str | None:
        """The API key of the servers that are started; those that run already do not get it."""
        secret = self.config(next(iter(self.variants))).api_key
        return secret.get_secret_value() if secret else None

    @property
    def reference(self) -> str:
        """The variant whose capacity `auto` arrivals go by: a plain `dynamic` if there is one, else
        the baseline.
        """
        plain = [
            name for name, variant in self.variants.items() if variant == Variant("dynamic", {})
        ]
        return next(
            iter(
                [
                    *plain,
                    *([self.baseline] if self.baseline in self.variants else []),
                    *self.variants,
                ]
            )
        )

    def settings(self, name: str) -> dict[str, Any]:
        """What a variant's server is started with: its own settings, and those of all that have a
        meaning in its mode.
        """
        variant = self.variants[name]
        return {
            key: value for key, value in self.flags.items() if meaningful(key, variant.mode)
        } | variant.flags

    def config(self, name: str) -> Config:
        """All settings of a variant. Raises ConfigError."""
        return build(self.variants[name].mode, self.settings(name), from_environment(os.environ))


def parser_of(program: str, description: str) -> Parser:
    """What compare.sh and simulate.sh both understand, but for server settings."""
    parser = Parser(
        prog=program,
        description=description,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=110),
    )
    add = parser.add_argument
    add("--modes", help=f"modes to compare, separated by commas (default: {','.join(BASIC)})")
    add(
        "--variant",
        action="append",
        default=[],
        metavar="NAME='MODE --setting …'",
        help="compare a mode with settings of its own, instead of --modes; again for each",
    )
    add(
        "--baseline",
        metavar="NAME",
        help="what the others are compared with in pairs (default: the first)",
    )
    add("--numsamples", type=int, help=f"requests (default: {REQUESTS})")
    add("--arrival", help=f"{ARRIVALS}, or auto: Poisson at {LOAD} of the capacity "
                                          f"of dynamic, or of the "
        "baseline where no plain dynamic is compared (default: auto)")  # fmt: skip
    add_workload(parser)
    add("--seed", type=int, default=0, help="of the trace (default: 0)")
    add(
        "--sweep",
        action="store_true",
        help="then run every variant at rates from light to beyond its capacity",
    )
    add("--seconds", type=float, help="of sending at each rate of a sweep (default: as long as 200 "
                                      "requests need, "
        "and slow rows to fill twice, from 10 to 300)")  # fmt: skip
    add(
        "--repeats",
        type=int,
        default=1,
        metavar="R",
        help="run R seeds, and give intervals over them (default: 1)",
    )
    add(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help=f"limits on ttft, tpot, e2el (default: none; of a sweep {' '.join(SWEEP_GOODPUT)})",
    )
    add(
        "--stream",
        action="store_true",
        help="ask for streams; plain answers come when their batch is done",
    )
    add("--out", type=Path, help="folder for the results (default: runs/DATE-TIME)")
    return parser


def parse(argv: Sequence[str]) -> Options:
    """Parse compare.sh's command line. Raises ConfigError; exits 0 after --help."""
    parser = parser_of("./compare.sh", "Replay one trace against every batching mode.")
    add = parser.add_argument
    add(
        "--also",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="compare with this server too: one that runs already and speaks OpenAI's API; implies "
        "--stream",
    )
    add(
        "--timeout",
        type=float,
        default=3600,
        help="seconds that an answer may take (default: 3600)",
    )
    add(
        "--skip-calibration",
        action="store_true",
        help="do not measure first, once a machine, how fast this client can send",
    )
    add_deployment(parser)
    add_settings(parser)
    known = read(parser, argv)
    given = chosen(known) | {"deployment": deployment_of(known)}
    also = parse_also(known.also, given["variants"])
    given |= {"also": also, "stream": known.stream or bool(also), "timeout": known.timeout}
    options = Options(**given, calibration=not known.skip_calibration)
    check(options)
    return options


def read(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """What a command line says. Raises ConfigError; exits 0 after --help."""
    known, unknown = parser.parse_known_args(argv)
    refuse_unknown(parser, unknown)
    if known.modes and known.variant:
        raise ConfigError(
            "--modes and --variant both say what is compared; name the modes as variants, "
            "--variant base=dynamic"
        )
    if wrong := contradiction(known):
        raise ConfigError(wrong)
    repeats = known.repeats > 1 and not vars(known).get("plan")  # of one trace, too
    if known.trace and (known.sweep or repeats):
        raise ConfigError("--sweep and --repeats draw traces of their own; leave out --trace")
    if known.sessions and known.sweep:
        raise ConfigError(
            "--sweep sends at rates of its own, and in conversations answers say when requests are "
            "sent; leave out --sweep or --sessions"
        )
    if known.users and known.sweep:
        raise ConfigError(
            "--sweep sends at rates of its own, and --users have theirs; leave out one of them"
        )
    if known.sessions and (known.arrival or "auto") == "auto":
        raise ConfigError(
            "--sessions needs an --arrival, such as poisson:2 (conversations a second): auto goes "
            "by what a server can do with single requests, and later turns have longer prompts"
        )
    if known.seconds is not None and not known.sweep:
        raise ConfigError("--seconds is of a sweep; add --sweep")
    return known


def chosen(known: argparse.Namespace) -> dict[str, Any]:
    """What `parser_of` understands, as options. Raises ConfigError."""
    goodput = known.goodput if known.goodput is not None else SWEEP_GOODPUT if known.sweep else []
    flags = settings(known)
    variants = parse_variants(known.variant) if known.variant else parse_modes(known.modes)
    return {
        "variants": variants,
        "baseline": known.baseline or next(iter(variants)),
        "numsamples": REQUESTS
        if known.numsamples is None and not seconds_say_how_many(known)
        else known.numsamples,
        "arrival": known.arrival or "auto",
        "lengths": known.lengths,
        "selection": known.selection,
        "prompts": known.prompts,
        "prefixes": known.prefixes,
        "sessions": known.sessions,
        "users": known.users,
        "priorities": known.priorities,
        "trace": known.trace,
        "scale": known.scale,
        "seed": known.seed,
        "repeats": known.repeats,
        "sweep": known.sweep,
        "seconds": known.seconds,
        "goodput": parse_goodput(goodput),
        "stream": known.stream,
        "out": known.out or ROOT / "runs" / f"{datetime.now():%Y%m%d-%H%M%S}",
        "flags": flags,
    }


def check(options: Options) -> None:
    """Raises ConfigError for what cannot be compared."""
    if any("api_keys" in options.settings(name) for name in options.variants):
        raise ConfigError(
            "--api-keys is of a server with several users, and here one client asks; use --api-key"
        )
    for name in options.variants:
        options.config(name)
    modes = dict.fromkeys(variant.mode for variant in options.variants.values())
    for name in options.flags:
        if not any(meaningful(name, mode) for mode in modes):
            raise ConfigError(f"{flag(name)} has no meaning in any of the modes {', '.join(modes)}")
    if len(options.names) > MOST:
        raise ConfigError(
            f"{len(options.names)} are compared, and at most {MOST} can be told apart in a figure; "
            f"name fewer"
        )
    if options.baseline not in options.names:
        raise ConfigError(
            f"--baseline {options.baseline!r} is not compared; name one of "
            f"{', '.join(options.names)}"
        )
    for name, value in (("numsamples", options.numsamples), ("repeats", options.repeats)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag(name)} must be at least 1")
    if options.seed < 0:
        raise ConfigError("--seed must be 0 or more")
    for name, seconds in (("seconds", options.seconds), ("timeout", options.timeout)):
        if seconds is not None and not 0 < seconds < float("inf"):
            raise ConfigError(f"{flag(name)} must be a number of seconds above 0")


def parse_goodput(texts: Sequence[str], name_of: str = "--goodput") -> dict[str, float]:
    """{"ttft": 200.0} from ["ttft:200"]. Raises ConfigError."""
    limits = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            if name not in LIMITED or not 0 < float(value) < float("inf"):
                raise ValueError
            limits[name] = float(value)
        except ValueError:
            raise ConfigError(f"{name_of} {text!r}: give ttft:MS, tpot:MS or e2el:MS") from None
    return limits
