"""The command line of compare.sh, checked before any server starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from client.data import ARRIVALS, LENGTHS, SELECTIONS
from client.quoting import NAME
from client.servers import ROOT
from config import MODES, Config, ConfigError, Parser, add_settings, build, flag, from_environment, meaningful, refuse_unknown

LOAD = 0.85  # of the capacity of dynamic: beyond what static can deliver, within what dynamic can
SWEEP_GOODPUT = ["e2el:2000"]


@dataclass(frozen=True, slots=True)
class Options:
    modes: list[str]
    also: dict[str, str]  # {name: URL} of servers that run already
    numsamples: int
    lengths: str
    arrival: str
    selection: str
    trace: Path | None
    seed: int
    repeats: int
    sweep: bool
    seconds: float | None  # of sending at each rate of a sweep; None: as long as its numbers need
    goodput: dict[str, float]
    stream: bool
    timeout: float
    calibration: bool
    out: Path
    flags: dict[str, Any]  # server settings, as given

    @property
    def names(self) -> list[str]:
        return [*self.modes, *self.also]

    @property
    def key(self) -> str | None:
        """The API key of the servers that are started; those that run already do not get it."""
        secret = self.config(self.modes[0]).api_key
        return secret.get_secret_value() if secret else None

    def config(self, mode: str) -> Config:
        """A mode's settings: one that belongs to other modes alone is left out."""
        flags = {name: value for name, value in self.flags.items() if meaningful(name, mode)}
        return build(mode, flags, from_environment(os.environ))


def parse(argv: Sequence[str]) -> Options:
    """Parse compare.sh's command line. Raises ConfigError; exits 0 after --help."""
    parser = Parser(
        prog="./compare.sh", description="Replay one trace against every batching mode.", allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=110),
    )  # fmt: skip
    add = parser.add_argument
    add("--modes", default=",".join(MODES), help="modes to compare, separated by commas (default: all)")
    add("--also", action="append", default=[], metavar="NAME=URL",
        help="compare with this server too: one that runs already and speaks OpenAI's API; implies --stream")  # fmt: skip
    add("--numsamples", type=int, help="requests (default: 300)")
    add("--lengths", help=f"completion lengths: {LENGTHS} (default: normal)")
    add("--arrival", default="auto", help=f"{ARRIVALS}, or auto: Poisson at {LOAD} of dynamic's capacity (default: auto)")
    add("--selection", choices=SELECTIONS, help="of lengths: random, or descend (longest first; default: random)")
    add("--trace", type=Path, help="replay this trace.jsonl, at its own times unless --arrival says others")
    add("--sweep", action="store_true", help="then run every mode at rates from light to beyond its capacity")
    add("--seconds", type=float, help="of sending at each rate of a sweep (default: as long as 200 requests need, "
        "and slow rows to fill twice, from 10 to 300)")  # fmt: skip
    add("--repeats", type=int, default=1, metavar="R", help="run R seeds, and give intervals over them (default: 1)")
    add("--goodput", nargs="+", metavar="NAME:MS",
        help=f"limits on ttft, tpot, e2el (default: none; of a sweep {' '.join(SWEEP_GOODPUT)})")  # fmt: skip
    add("--stream", action="store_true", help="ask for streams; plain answers come when their batch is done")
    add("--timeout", type=float, default=3600, help="seconds that an answer may take (default: 3600)")
    add("--skip-calibration", action="store_true", help="do not measure first, once a machine, how fast this client can send")
    add("--out", type=Path, help="folder for the results (default: runs/DATE-TIME)")
    add_settings(parser)
    known, unknown = parser.parse_known_args(argv)
    refuse_unknown(parser, unknown)
    flags = {name: value for name, value in vars(known).items() if name in Config.model_fields}
    for name in ("host", "port"):
        if name in flags:
            raise ConfigError(f"{flag(name)} has no meaning here: every mode gets a free port on this machine")
    if known.trace and (known.numsamples or known.lengths or known.selection):
        raise ConfigError("--trace holds the requests; leave out --numsamples, --lengths and --selection")
    if known.trace and (known.sweep or known.repeats > 1):
        raise ConfigError("--sweep and --repeats draw traces of their own; leave out --trace")
    if known.seconds is not None and not known.sweep:
        raise ConfigError("--seconds is of a sweep; add --sweep")
    goodput = known.goodput if known.goodput is not None else SWEEP_GOODPUT if known.sweep else []
    numsamples = 300 if known.numsamples is None else known.numsamples
    options = Options(
        known.modes.split(","), parse_also(known.also), numsamples, known.lengths or "normal", known.arrival,
        known.selection or "random", known.trace, int(flags.get("seed", 0)), known.repeats, known.sweep,
        known.seconds, parse_goodput(goodput),
        known.stream or bool(known.also), known.timeout,
        not known.skip_calibration, known.out or ROOT / "runs" / f"{datetime.now():%Y%m%d-%H%M%S}", flags,
    )  # fmt: skip
    _check(options)
    return options


def _check(options: Options) -> None:
    if len(set(options.modes)) < len(options.modes):
        raise ConfigError("--modes names a mode twice")
    for mode in options.modes:
        options.config(mode)
    for name in options.flags:
        if not any(meaningful(name, mode) for mode in options.modes):
            raise ConfigError(f"{flag(name)} has no meaning in any of the modes {', '.join(options.modes)}")
    for name, value in (("numsamples", options.numsamples), ("repeats", options.repeats)):
        if value < 1:
            raise ConfigError(f"{flag(name)} must be at least 1")
    for name, seconds in (("seconds", options.seconds), ("timeout", options.timeout)):
        if seconds is not None and not 0 < seconds < float("inf"):
            raise ConfigError(f"{flag(name)} must be a number of seconds above 0")


def parse_also(texts: Sequence[str]) -> dict[str, str]:
    """{"vllm": "http://host:8000"} from ["vllm=http://host:8000"]. Raises ConfigError."""
    also: dict[str, str] = {}
    for text in texts:
        name, _, url = text.partition("=")
        if not NAME.fullmatch(name) or not url.startswith(("http://", "https://")):
            raise ConfigError(f"--also {text!r}: give NAME=URL, such as vllm=http://localhost:8000")
        if name in (*MODES, "summary") or name in also:
            raise ConfigError(f"--also {text!r}: {name} is taken; choose another name")
        also[name] = base_url(url)
    return also


def base_url(url: str) -> str:
    """Where a server's routes begin: OpenAI's clients write /v1 after it."""
    return url.rstrip("/").removesuffix("/v1")


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """{"ttft": 200.0} from ["ttft:200"]. Raises ConfigError."""
    limits = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            if name not in ("ttft", "tpot", "e2el") or not 0 < float(value) < float("inf"):
                raise ValueError
            limits[name] = float(value)
        except ValueError:
            raise ConfigError(f"--goodput {text!r}: give ttft:MS, tpot:MS or e2el:MS") from None
    return limits
