"""The command line of compare.sh, checked before any server starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from client import arguments
from client.draws import ARRIVALS
from client.runs import files, refuse_overwriting
from compare import variants
from compare.deployments import Deployment, add_deployment, deployment_of
from compare.servers import ROOT
from compare.variants import BASIC, Variant
from config import (
    Config,
    ConfigError,
    Parser,
    add_settings,
    flag,
    from_environment,
    meaningful,
    refuse_unknown,
)
from generate.auto import build

LOAD = 0.85  # of the capacity of dynamic: beyond what static can deliver, within what dynamic can
SWEEP_GOODPUT = ["e2el:2000"]
REQUESTS = 300
MOST = 12  # variants that can be distinguished in a figure
MEANINGLESS = (  # settings, with this client and servers that start here
    *("host", "port", "api_keys", "allowed_hosts"),
    *("header_timeout_s", "body_timeout_s", "drain_timeout_s"),
)
MOST_USED = (
    "--modes --variant --numsamples --arrival --lengths --trace --sweep --repeats --goodput --out"
)
WHAT: arguments.Flags = {
    "--modes": {"help":
        f"modes to compare, separated by commas (default: {','.join(BASIC)})"},
    "--variant": {"action": "append", "default": [], "metavar": "NAME='MODE --setting …'", "help":
        "compare a mode with settings of its own, instead of --modes; repeat it for each"},
    "--baseline": {"metavar": "NAME", "help":
        "variant with which each other one is compared (default: the first)"},
    "--numsamples": {"type": int, "help": f"number of requests (default: {REQUESTS})"},
    "--arrival": {"help":
        f"{ARRIVALS}, or auto: Poisson at {LOAD} of the capacity of dynamic, or of the baseline "
        "where no plain dynamic is compared (default: auto)"},
}  # fmt: skip
HOW: arguments.Flags = {
    "--seed": {"type": int, "default": 0, "help": "seed of the trace (default: 0)"},
    "--sweep": {"action": "store_true", "help":
        "then run every variant at rates from light to beyond its capacity"},
    "--seconds": {"type": float, "help":
        "seconds of sending at each rate of a sweep (default: as long as 200 requests need, and "
        "slow rows need to fill twice, from 10 to 300)"},
    "--repeats": {"type": int, "default": 1, "metavar": "R", "help":
        "run R seeds, and give intervals over them (default: 1)"},
    "--goodput": {"nargs": "+", "metavar": "NAME:MS", "help":
        f"limits on ttft, tpot, e2el (default: none; in a sweep without --slo-mix "
        f"{' '.join(SWEEP_GOODPUT)})"},
    "--stream": {"action": "store_true", "help":
        "ask for streamed answers; others come when their batch is done"},
    "--out": {"type": arguments.folder, "help":
        "folder for the results (default: runs/DATE-TIME)"},
    "--overwrite": {"action": "store_true", "help":
        "replace an earlier run in --out (else it is refused)"},
}  # fmt: skip
OF_SERVERS: arguments.Flags = {  # without a meaning in virtual time
    "--also": {"action": "append", "default": [], "metavar": "NAME=URL", "help":
        "compare with this server too: one that runs already and speaks OpenAI's API; implies "
        "--stream"},
    "--skip-calibration": {"action": "store_true", "help":
        "do not measure first how fast this client can send (else once on each machine)"},
    "--runs": {"type": Path, "nargs": "+", "metavar": "RUN", "help":
        "start nothing, and compare saved runs: folders of compare.sh, JSON files of guidellm, "
        "aiperf and vllm bench serve; only --out and --overwrite go with it"},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The settings of a comparison."""

    variants: dict[str, Variant]
    baseline: str  # with which the others are compared
    numsamples: int | None  # None: as many as users send in their seconds
    arrival: str
    workload: dict[str, Any]  # fields of Workload; None: as it has it by default
    trace: Path | None
    scale: int | None
    seed: int
    repeats: int
    sweep: bool
    seconds: float | None  # of sending at each rate of a sweep; None: as long as its numbers need
    goodput: dict[str, float]
    stream: bool
    out: Path
    overwrite: bool
    flags: dict[str, Any]  # server settings of all variants, as given
    also: dict[str, str] = field(default_factory=dict)  # {name: URL} of servers that run already
    deployment: Deployment | None = None  # of each variant; None: a server alone
    calibration: bool = False

    @property
    def names(self) -> list[str]:
        return [*self.variants, *self.also]

    @property
    def model(self) -> str:
        return self.config(self.reference).model

    @property
    def key(self) -> str | None:
        """The API key of the servers that are started; those that run already do not get it."""
        secret = self.config(next(iter(self.variants))).api_key
        return secret.get_secret_value() if secret else None

    @property
    def reference(self) -> str:
        """The variant that `auto` arrivals go by: a plain `dynamic`, else the baseline."""
        for name, variant in self.variants.items():
            if variant == Variant("dynamic", {}):
                return name
        return self.baseline if self.baseline in self.variants else next(iter(self.variants))

    def settings(self, name: str) -> dict[str, Any]:
        """Return a variant's settings: its own, and those for all that its mode has."""
        mode, own = self.variants[name].mode, self.variants[name].flags
        return {k: value for k, value in self.flags.items() if meaningful(k, mode)} | own

    def config(self, name: str) -> Config:
        """Return all settings of a variant. Raises ConfigError."""
        return build(self.variants[name].mode, self.settings(name), from_environment(os.environ))


def parser_of(program: str, description: str, *most_used: str) -> Parser:
    """Return a parser of the flags that two programs share. most_used: those --help adds."""
    parser = Parser(
        prog=program,
        usage="%(prog)s [--flag X …]",
        description=description,
        most_used=[*MOST_USED.split(), *most_used],
        examples=[
            f"{program} --modes static,dynamic --sweep",
            f"{program} --variant a=dynamic --variant b='dynamic --order sjf'",
        ],
    )
    arguments.add(parser, WHAT | arguments.WORKLOAD | HOW)
    return parser


def new_folder() -> Path:
    """Return the folder of a run that begins now."""
    return ROOT / "runs" / f"{datetime.now():%Y%m%d-%H%M%S}"


def parse_runs(argv: Sequence[str]) -> tuple[list[Path], Path]:
    """Return the runs of --runs, and the folder of --out. Raises ConfigError."""
    parser, flags = Parser(prog="./compare.sh", add_help=False), HOW | OF_SERVERS
    arguments.add(parser, {name: flags[name] for name in ("--runs", "--out", "--overwrite")})
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ConfigError(
            f"--runs starts nothing, so that only --out and --overwrite go with it; leave out "
            f"{unknown[0]}"
        )
    if len(known.runs) < 2:
        raise ConfigError("--runs compares two runs or more; name another one")
    out = known.out or new_folder()
    refuse_overwriting(files(out), known.overwrite)
    return known.runs, out


def parse(argv: Sequence[str]) -> Options:
    """Parse compare.sh's command line. Raises ConfigError; exits 0 after --help."""
    what = "Replay one trace against every batching mode."
    parser = parser_of("./compare.sh", what, "--also", "--runs", "--model")
    arguments.add(parser, OF_SERVERS)
    add_deployment(parser)
    add_settings(parser, hidden=MEANINGLESS)
    known = read(parser, argv)
    given = chosen(known) | {"deployment": deployment_of(known)}
    given["also"] = variants.parse_also(known.also, given["variants"])
    given["stream"] = known.stream or bool(known.also)
    options = Options(**given, calibration=not known.skip_calibration)
    check(options)
    return options


def read(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; exits 0 after --help. Raises ConfigError for unfit flags."""
    known, unknown = parser.parse_known_args(argv)
    refuse_unknown(parser, unknown)
    arguments.check_numbers(known)
    repeats = known.repeats > 1 and vars(known).get("find") is None  # of one trace, too
    sweep, sessions = known.sweep, known.sessions
    # fmt: off
    for refused, sentence in (
        (known.modes and known.variant,
         "--modes and --variant both say what is compared; name the modes as variants, "
         "--variant base=dynamic"),
        (wrong := arguments.contradiction(known), wrong),
        (known.trace and (sweep or repeats),
         "--sweep and --repeats draw traces of their own; leave out --trace"),
        (sessions and sweep,
         "--sweep sends at rates of its own, and in conversations answers say when requests are "
         "sent; leave out --sweep or --sessions"),
        (known.users and sweep,
         "--sweep sends at rates of its own, and --users have theirs; leave out one of them"),
        (sessions and (known.arrival or "auto") == "auto",
         "--sessions needs an --arrival, such as poisson:2 (conversations per second): auto goes "
         "by what a server can do with single requests, and later turns have longer prompts"),
        (known.seconds is not None and not sweep, "--seconds applies to a sweep; add --sweep"),
    ):
        if refused:
            raise ConfigError(sentence)
    # fmt: on
    return known


def chosen(known: argparse.Namespace, mode: str | None = None) -> dict[str, Any]:
    """Return the fields of Options that `parser_of` knows. mode: of variants that name none.
    Raises ConfigError.
    """
    compared = variants.parse_modes(known.modes)
    if known.variant:
        compared = variants.parse_variants(known.variant, mode)
    goodput = known.goodput
    if goodput is None:
        goodput = SWEEP_GOODPUT if known.sweep and not known.slo_mix else []
    numsamples = known.numsamples
    if numsamples is None and not arguments.seconds_say_how_many(known):
        numsamples = REQUESTS
    as_given = {f.name: getattr(known, f.name) for f in fields(Options) if f.name in known}
    return as_given | {
        "variants": compared,
        "workload": arguments.given_workload(known),
        "baseline": known.baseline or next(iter(compared)),
        "numsamples": numsamples,
        "arrival": known.arrival or "auto",
        "goodput": arguments.parse_goodput(goodput),
        "out": known.out or new_folder(),
        "flags": variants.settings(known),
    }


def check(options: Options) -> None:
    """Raise ConfigError for what cannot be compared."""
    if any("api_keys" in options.settings(name) for name in options.variants):
        raise ConfigError(
            "--api-keys names several users, and this client sends as one; use --api-key"
        )
    configs = {name: options.config(name) for name in options.variants}
    shedding = [name for name, config in configs.items() if config.shed]
    if shedding and not (options.workload["slo_mix"] or options.trace):
        raise ConfigError(
            f"{shedding[0]} has --shed, which goes by limits, and no request has one; add "
            f"--slo-mix 0.3:interactive=ttft:200,tpot:50 0.7:batch=ttft:10000"
        )
    if options.workload["adapters"] and not all(each.adapters for each in configs.values()):
        raise ConfigError("requests name --adapters that a server lacks; add --lora-random N:RANK")
    modes = dict.fromkeys(config.mode for config in configs.values())
    for name in options.flags:
        if not any(meaningful(name, mode) for mode in modes):
            raise ConfigError(f"{flag(name)} has no meaning in any of the modes {', '.join(modes)}")
    if len(options.names) > MOST:
        raise ConfigError(
            f"{len(options.names)} variants are compared, and a figure shows at most {MOST}; "
            f"name fewer"
        )
    if options.baseline not in options.names:
        raise ConfigError(
            f"--baseline {options.baseline!r} is not compared; name one of "
            f"{', '.join(options.names)}"
        )
