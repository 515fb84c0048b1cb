"""The command line of compare.sh, checked before any server starts."""

from __future__ import annotations

import argparse
import functools
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from client import arguments
from client.bounds import UNBOUNDED, Bounds
from client.draws import ARRIVALS, WorkloadError
from client.runs import files, refuse_overwriting
from client.trace_file import Context, TraceFile
from client.wire import OTHERS, Asked
from compare import variants
from compare.check import JUDGED, LIMIT, Check
from compare.deployments import Deployment, add_deployment, deployment_of
from compare.foreign import settings
from compare.servers import ROOT
from compare.variants import BASIC, Variant
from config.config import Config
from config.flags import Flags, Parser, add_flags, add_settings, from_environment, refuse_unknown
from config.settings import ConfigError, flag, meaningful
from generate.auto import build

LOAD = 0.85  # a part of dynamic's capacity: beyond what static can deliver, within what dynamic can
SWEEP_GOODPUT = ["e2el:2000"]
REQUESTS = 300
MOST = 12  # variants that can be distinguished in a figure
MEANINGLESS = (  # settings, with this client and servers that start here
    *("host", "port", "api_keys", "allowed_hosts"),
    *("header_timeout_s", "body_timeout_s", "drain_timeout_s"),
)
MOST_USED = (
    "--modes --variant --numsamples --arrival --lengths --trace --sweep --repeats --goodput "
    "--price --out"
)
WHAT: Flags = {
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
HOW: Flags = {
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
    "--price": {"type": float, "metavar": "PER_HOUR", "help":
        "price of a machine per hour, in any currency: adds the cost of a million tokens, and "
        "of 1,000 requests within --goodput"},
    "--stream": {"action": "store_true", "help":
        "ask for streamed answers; others come when their batch is done"},
    "--out": {"type": arguments.folder, "help":
        "folder for the results (default: runs/DATE-TIME)"},
    "--overwrite": {"action": "store_true", "help":
        "replace an earlier run in --out (else it is refused)"},
    "--resume": {"type": Path, "metavar": "FOLDER", "help":
        "go on with a run that was stopped, by its own flags: measure the variants and seeds that "
        "are missing"},
    "--check": {"type": Path, "metavar": "RUN", "help":
        "run a saved run's traces and variants again, and say whether a measure got worse or more "
        "requests failed: exit code 1; settings of servers may follow"},
    "--limit": {"nargs": "+", "default": [], "metavar": "NAME:PERCENT", "help":
        f"with --check: measures to judge, and by how much each may get worse (default: "
        f"{LIMIT:.0%}% of {', '.join(JUDGED)})"},
    "--junit": {"type": arguments.file, "metavar": "FILE", "help":
        "with --check: write the answers as JUnit XML, too"},
}  # fmt: skip
OF_RUN = WHAT | arguments.WORKLOAD | HOW
OF_SERVERS: Flags = {  # without a meaning in virtual time
    "--also": {"action": "append", "default": [], "metavar": "NAME=URL", "help":
        "compare with this server too: one that runs already and speaks OpenAI's API; implies "
        "--stream"},
    "--api": {"choices": OTHERS, "help":
        "how the servers of --also are asked, openai: completions, chat: messages (default: "
        "openai)"},
    **arguments.ASKED,
    **arguments.SENDING,
    "--skip-calibration": {"action": "store_true", "help":
        "do not measure first how fast this client can send (else once on each machine)"},
    "--runs": {"type": Path, "nargs": "+", "metavar": "RUN", "help":
        "start nothing, and compare saved runs: folders of compare.sh, JSON files of guidellm, "
        "aiperf and vllm bench serve; only --out and --overwrite go with it"},
    "--slowest": {"nargs": 2, "metavar": ("N", "FOLDER"), "help":
        "start nothing, and show of a saved run where the time of the N slowest requests went, and "
        "what ran beside them; no other flag goes with it"},
}  # fmt: skip


@functools.cache
def _encoder(tokenizer: str) -> Callable[[str], Sequence[int]]:
    from generate import tokenizer as tokens  # texts of traces alone need it

    try:
        return tokens.load_tokenizer(tokenizer).encode_ordinary
    except tokens.TokenizerUnavailable as error:
        raise WorkloadError(str(error)) from None


def most_tokens(tokenizers: Collection[str], text: str) -> int:
    """Return the tokens of a text, by the tokenizer that makes most."""
    return max(len(_encoder(name)(text)) for name in tokenizers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The settings of a comparison."""

    variants: dict[str, Variant]
    baseline: str  # with which the others are compared
    numsamples: int | None  # None: as many as users send in their seconds
    arrival: str
    workload: dict[str, Any]  # fields of Workload; None: as it has it by default
    trace: TraceFile | None
    seed: int
    repeats: int
    sweep: bool
    seconds: float | None  # time of sending, at each rate of a sweep; None: as long as numbers need
    goodput: dict[str, float]
    price: float | None  # a machine's, per hour
    stream: bool
    out: Path
    overwrite: bool
    flags: dict[str, Any]  # server settings of all variants, as given
    bounds: Bounds = UNBOUNDED
    svg: bool = False
    resume: Path | None = None  # the run to go on with, in `out`
    also: dict[str, str] = field(default_factory=dict)  # {name: URL} of servers that run already
    asked: Asked = field(default_factory=Asked)  # how these are asked
    deployment: Deployment | None = None  # each variant's; None: a server alone
    calibration: bool = False
    client_processes: int | None = None  # which send the load; None: as many as it needs
    check: Check | None = None

    @property
    def seeds(self) -> list[int]:
        return list(range(self.seed, self.seed + self.repeats))

    @property
    def names(self) -> list[str]:
        return [*self.variants, *self.also]

    @property
    def model(self) -> str:
        """The model of each variant."""
        return ", ".join(dict.fromkeys(self.config(name).model for name in self.variants))

    @property
    def key(self) -> str | None:
        """The API key of the servers that are started; those that run already do not get it."""
        secret = self.config(next(iter(self.variants))).api_key
        return secret.get_secret_value() if secret else None

    @property
    def context(self) -> Context:
        """The longest request that every variant takes."""
        configs = [self.config(name) for name in self.variants]
        count = functools.partial(most_tokens, {config.tokenizer for config in configs})
        return Context(min(config.max_model_len for config in configs), count)

    @property
    def reference(self) -> str:
        """The variant that `auto` arrivals go by: a plain `dynamic`, else the baseline."""
        for name, variant in self.variants.items():
            if variant == Variant("dynamic", {}):
                return name
        return self.baseline if self.baseline in self.variants else next(iter(self.variants))

    def settings(self, name: str) -> dict[str, Any]:
        """Return a variant's settings: its own, and those for all that its mode has."""
        variant = self.variants[name]
        of_all = {k: v for k, v in self.flags.items() if meaningful(k, variant.mode)}
        return of_all | variant.flags

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
    add_flags(parser, WHAT | arguments.WORKLOAD | HOW | arguments.BOUNDS | arguments.SVG)
    return parser


def new_folder() -> Path:
    """Return the folder of a run that begins now; to the millisecond, as two begin in a second.
    Raises ConfigError where it cannot be made.
    """
    try:
        return arguments.folder(f"{ROOT}/runs/{datetime.now():%Y%m%d-%H%M%S-%f}"[:-3])
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{error} with --out FOLDER") from None


def parse_alone(argv: Sequence[str], *names: str) -> argparse.Namespace:
    """Parse the first of these flags, with which only the others go. Raises ConfigError."""
    parser, flags = Parser(prog="./compare.sh", add_help=False), HOW | OF_SERVERS
    add_flags(parser, {name: flags[name] for name in names})
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        others = f", so that only {' and '.join(names[1:])} go with it" if names[1:] else ""
        first = unknown[0].partition("=")[0]
        raise ConfigError(f"{names[0]} starts nothing{others}; leave out {first}")
    return known


def parse_runs(argv: Sequence[str]) -> tuple[list[Path], Path]:
    """Return the runs of --runs, and the folder of --out. Raises ConfigError."""
    known = parse_alone(argv, "--runs", "--out", "--overwrite")
    runs = [each for path in known.runs for each in settings(path)]
    if len(runs) < 2:
        raise ConfigError("--runs compares two runs or more; name another one")
    out = known.out or new_folder()
    refuse_overwriting(files(out), known.overwrite)
    return runs, out


def parse_slowest(argv: Sequence[str]) -> tuple[int, Path]:
    """Return the number and the folder of --slowest. Raises ConfigError."""
    n, folder = parse_alone(argv, "--slowest").slowest
    if not re.fullmatch("[1-9][0-9]{0,5}", n):
        raise ConfigError(f"--slowest needs a number of requests and a folder, and not {n} first")
    return int(n), Path(folder)


def parse(argv: Sequence[str]) -> Options:
    """Parse compare.sh's command line. Raises ConfigError; exits 0 after --help."""
    what = "Replay one trace against every batching mode."
    parser = parser_of("./compare.sh", what, "--also", "--runs", "--model")
    add_flags(parser, OF_SERVERS)
    add_deployment(parser)
    add_settings(parser, hidden=MEANINGLESS)
    known = read(parser, argv)
    given = chosen(known) | {"deployment": deployment_of(known)}
    given["also"] = variants.parse_also(known.also, given["variants"])
    given["asked"] = arguments.asked_of(known)
    if not known.also and (known.api or known.header or known.extra_body):
        raise ConfigError("--api, --header and --extra-body say how servers of --also are asked")
    given["stream"] = known.stream or bool(known.also)
    options = Options(**given, calibration=not known.skip_calibration)
    check(options)
    return options


def read(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; exits 0 after --help. Raises ConfigError for unfit flags."""
    known, unknown = parser.parse_known_args(argv)
    refuse_unknown(parser, unknown)
    arguments.check_numbers(known)
    finds = vars(known).get("find") is not None
    sweep, sessions, repeats = known.sweep, known.sessions, known.repeats > 1 and not finds
    # fmt: off
    for refused, sentence in (
        (known.modes and known.variant,
         "--modes and --variant both say what is compared; name the modes as variants, "
         "--variant base=dynamic"),
        (wrong := arguments.contradiction(known), wrong),
        (known.trace and (sweep or repeats),
         "--sweep and --repeats draw traces of their own; leave out --trace"),
        (sweep and (known.users or sessions),
         "--sweep sends at rates of its own, and --users have theirs, as turns of --sessions do; "
         "leave out one of them"),
        (sessions and (known.arrival or "auto") == "auto",
         "--sessions needs an --arrival, such as poisson:2 (conversations per second): auto goes "
         "by what a server can do with single requests, and later turns have longer prompts"),
        ((sweep or finds) and arguments.bounds_of(known) != UNBOUNDED,
         "--max-seconds, --max-failures and --warm-up apply to one replay of each variant; leave "
         "them out of --sweep and --find, which judge whole ones"),
        (known.seconds is not None and not sweep, "--seconds applies to a sweep; add --sweep"),
        (known.limit or known.junit, "--limit and --junit belong to --check; add it"),
    ):
        if refused:
            raise ConfigError(sentence)
    # fmt: on
    return known


def chosen(known: argparse.Namespace, mode: str | None = None) -> dict[str, Any]:
    """Return the fields of Options that `parser_of` knows. mode: the variants' that name none.
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
        "trace": arguments.trace_file(known),
        "baseline": known.baseline or next(iter(compared)),
        "numsamples": numsamples,
        "arrival": known.arrival or "auto",
        "goodput": arguments.parse_goodput(goodput),
        "out": known.out or new_folder(),
        "flags": variants.settings(known),
        "bounds": arguments.bounds_of(known),
    }


def check(options: Options) -> None:
    """Raise ConfigError for what cannot be compared."""
    if any("api_keys" in options.settings(name) for name in options.variants):
        raise ConfigError("--api-keys names several users, and this client is one; use --api-key")
    configs = {}
    for name, variant in options.variants.items():
        try:
            configs[name] = options.config(name)
        except ConfigError as error:
            of = "" if variant == Variant(name, {}) else f"variant {name}: "
            raise ConfigError(f"{of}{error}") from None
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
        n = len(options.names)
        raise ConfigError(
            f"a figure shows at most {MOST} variants, and {n} are compared; name fewer"
        )
    if options.baseline not in options.names:
        names = ", ".join(options.names)
        raise ConfigError(f"--baseline {options.baseline!r} is not compared; name one of {names}")
