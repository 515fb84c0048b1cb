"""Start replicas on Ray Serve, on this machine or on the cluster that RAY_ADDRESS names, and end
them.

    ./server.sh MODE --replicas N [--router NAME] [--autoscale NAME=VALUE …] [settings]
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from config.checks import beyond_memory
from config.config import Config, check_port
from config.flags import REPLICAS, SEVERAL, Parser, add_flags, check_replicas, parse
from config.settings import ConfigError, flag
from generate import auto
from generate.tokenizer import TokenizerUnavailable, load_tokenizer
from generate.weights import WeightsUnavailable, locate
from server.replicas.replica import needs

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingConfig

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = {  # environment of all processes on Ray
    "PYTHONPATH": str(ROOT),
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # a replica that hangs finishes nothing, however long Ray waits
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "server.replicas.ingress:middlewares",
}
USAGE = "%(prog)s MODE --replicas N [--setting X …]"
FAULTS = (ConfigError, TokenizerUnavailable, WeightsUnavailable)


def main(argv: Sequence[str]) -> None:
    try:
        serve(argv)
    except (*FAULTS, ConnectionError) as error:  # that one is Ray's, of RAY_ADDRESS
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


class Fleet(NamedTuple):
    """Replicas to start, and the settings of Ray Serve's autoscaling, if any."""

    config: Config
    replicas: int
    router: str
    rule: AutoscalingConfig | None

    @property
    def most(self) -> int:
        """Replicas at most."""
        return self.rule.max_replicas if self.rule else self.replicas


def read(argv: Sequence[str]) -> Fleet:
    """Read the settings. Raises ConfigError, TokenizerUnavailable and WeightsUnavailable."""
    parser = Parser(prog="./server.sh", usage=USAGE, description=__doc__)
    add_flags(parser.add_argument_group(SEVERAL), REPLICAS)
    known, settings = parser.parse_known_args(argv)
    if known.replicas is None:
        raise ConfigError("--router and --autoscale apply to several servers; add --replicas N")
    check_replicas(known.replicas)
    if {*sys.executable} & {*"'\\"}:
        message = "Ray starts nothing in a folder whose path has a ' or a \\; rename the folder of"
        raise ConfigError(f"{message} {sys.executable}")
    rule = autoscaling(known.autoscale, known.replicas) if known.autoscale else None
    most = rule.max_replicas if rule else known.replicas
    given = {word.partition("=")[0] for word in settings}
    if "--header-timeout-s" in given:
        raise ConfigError("Ray's proxy has no --header-timeout-s; leave it out")
    if "--http-processes" in given:
        raise ConfigError("each of several servers has one process; leave --http-processes out")
    config = parse(settings, fill_in=sharing_cores(most))
    load_tokenizer(config.tokenizer)
    locate(config)
    for name in ("request_log", "record"):
        if getattr(config, name):
            raise ConfigError(f"{flag(name)} is a file of one server; leave it out")
    return Fleet(config, known.replicas, known.router, rule)


def reread(argv: Sequence[str], address: str) -> Fleet:
    """Read the settings of servers that are up at an address. Raises what `read` does."""
    fleet = read(argv)
    if fleet.config.address != address:
        raise ConfigError(f"--host and --port stay {address} until the servers are started anew")
    return fleet


def autoscaling(texts: Sequence[str], replicas: int) -> AutoscalingConfig:
    """Return the AutoscalingConfig that ["max_replicas=8", …] describes, which begins with so many
    replicas. Raises ConfigError.
    """
    with warnings.catch_warnings(action="ignore"):  # Ray's own, about pydantic
        from ray.serve.config import AutoscalingConfig

    given = {name: value for name, _, value in (text.partition("=") for text in texts)}
    names = AutoscalingConfig.model_fields
    if unknown := given.keys() - names.keys():
        raise ConfigError(f"--autoscale {min(unknown)}: name one of {', '.join(names)}")
    try:
        with warnings.catch_warnings(action="ignore"):  # names that a later Ray lacks
            return AutoscalingConfig(**{"initial_replicas": replicas, **given})
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{name}: " for name in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"--autoscale {where}{reason}") from None


def sharing_cores(servers: int) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return `auto.resolve` for servers that share a machine's cores, unless --threads is set."""

    def fill_in(settings: Mapping[str, Any]) -> dict[str, Any]:
        resolved = auto.resolve(settings)
        if settings.get("threads") in (None, "", "auto"):
            resolved["threads"] = max(1, resolved["threads"] // servers)
        return resolved

    return fill_in


def serve(argv: Sequence[str]) -> None:
    """Run a fleet until a signal ends it. Raises ConfigError.

    SIGTERM and Ctrl-C finish the requests in flight, and end; SIGHUP reads the settings again and
    replaces one replica after another, at the same address.
    """
    fleet = read(argv)
    config = fleet.config
    check_port(config)
    import ray
    from ray import serve as ray_serve

    from server.replicas.ray_serve import APP, application

    with contextlib.chdir(ROOT):  # in replicas the current folder's modules come before all others
        ray.init(
            os.environ.get("RAY_ADDRESS", "local"), namespace=APP, include_dashboard=False,
            logging_level=logging.ERROR, log_to_driver=False,
            # Ray puts the interpreter's path into a line of bash as it is
            runtime_env={"py_executable": shlex.quote(sys.executable), "env_vars": VARIABLES},
        )  # fmt: skip
    signals: SimpleQueue[int] = SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # ray.init has set its own
        signal.signal(number, lambda number, frame: signals.put(number))

    def run(fleet: Fleet) -> None:
        for warning in auto.warnings(fleet.config):
            print(f"warning: {warning}", file=sys.stderr)
        check_resources(fleet)
        try:
            made = application(*fleet, os.getpid())
            ray_serve.run(made, name=APP, blocking=False)
        except RuntimeError as error:
            raise ConfigError(f"the replicas did not start: {error}") from None
        print(
            f"ready: {fleet.replicas} replicas in {fleet.config.mode} mode behind {fleet.router} "
            f"on http://{config.address}; GET /stats names them, and each is at "
            "/replicas/NAME/",
            file=sys.stderr,
        )

    try:
        ray_serve.start(http_options={"host": config.host, "port": config.port})
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        run(fleet)
        while signals.get() == signal.SIGHUP:
            try:
                run(reread(argv, config.address))
            except FAULTS as error:
                print(f"error: {error}; nothing was changed", file=sys.stderr)
        ray_serve.delete(APP)  # replicas finish their requests while the proxy still runs
    finally:
        ray_serve.shutdown()
        ray.shutdown()


def check_resources(fleet: Fleet) -> None:
    """Raise ConfigError if the cluster has too few CPUs or GPUs, or this machine too little memory
    for its share of the replicas: Ray does not say yet where each will run.
    """
    import ray

    machines = sum(node["Alive"] for node in ray.nodes())
    if why := beyond_memory(fleet.config, ceil(fleet.most / machines)):
        share = f"with {fleet.most} replicas spread evenly over {machines} machines, "
        raise ConfigError(f"{share if machines > 1 else ''}{why}")
    available = ray.cluster_resources()
    for what, each in needs(fleet.config).items():
        needed, known = fleet.most * each, available.get(what, 0)
        if needed > known:
            lower = "--replicas or --threads" if what == "CPU" else "--replicas"
            raise ConfigError(
                f"{fleet.most} replicas of {each:g} {what}s need {needed:g}, and Ray has "
                f"{known:g}; lower {lower}"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
