"""Start replicas on Ray Serve, on this machine or on the cluster that RAY_ADDRESS names, and end
them.

    ./deploy/serve.sh MODE [--replicas N] [--router NAME] [--autoscale …] [settings of ./server.sh]
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from config import Config, ConfigError, Parser, flag, parse
from config.ports import check_port
from config.resolve import resolve
from deploy.autoscaling import Autoscaling, read_autoscaling
from deploy.replica import needs
from deploy.routers import ON_RAY
from tokenizer import TokenizerUnavailable, load_tokenizer
from weights import WeightsUnavailable, locate

ROOT = Path(__file__).resolve().parents[1]
FAULTS = (ConfigError, TokenizerUnavailable, WeightsUnavailable)


def main(argv: Sequence[str]) -> None:
    try:
        serve(argv)
    except FAULTS as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


class Fleet(NamedTuple):
    """Replicas to start, and the rule of autoscaling, if any."""

    config: Config
    replicas: int
    router: str
    rule: Autoscaling | None

    @property
    def most(self) -> int:
        """Replicas at most."""
        return self.rule.max_replicas if self.rule else self.replicas


def read(argv: Sequence[str]) -> Fleet:
    """Read the settings. Raises ConfigError, TokenizerUnavailable and WeightsUnavailable."""
    parser = Parser(prog="./deploy/serve.sh", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    # fmt: off
    add("--replicas", type=int, default=1, metavar="N", help="servers (default: 1)")
    add("--router", choices=ON_RAY, default=ON_RAY[0],
        help="policy that chooses a replica for each request (default: %(default)s)")
    add("--autoscale", nargs="+", metavar="NAME=VALUE",
        help="begin with --replicas and follow the load by Ray Serve's rule, such as "
        "max_replicas=4 target_ongoing_requests=24, or by tokens: target_tokens=4000")
    # fmt: on
    known, settings = parser.parse_known_args(argv)
    if known.replicas < 1:
        raise ConfigError(f"--replicas {known.replicas}: give 1 or more")
    try:
        rule = read_autoscaling(known.autoscale) if known.autoscale else None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    most = rule.max_replicas if rule else known.replicas
    config = parse(settings, fill_in=sharing_cores(most))
    load_tokenizer(config.tokenizer)
    locate(config)
    for name in ("request_log", "record"):
        if getattr(config, name):
            raise ConfigError(f"{flag(name)} is a file of one server; leave it out")
    return Fleet(config, known.replicas, known.router, rule)


def sharing_cores(servers: int) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return `resolve` for servers that share a machine's cores, unless --threads is set."""

    def fill_in(settings: Mapping[str, Any]) -> dict[str, Any]:
        resolved = resolve(settings)
        if settings.get("threads") in (None, "", "auto"):
            resolved["threads"] = max(1, resolved["threads"] // servers)
        return resolved

    return fill_in


def serve(argv: Sequence[str]) -> None:
    """Run a fleet until a signal ends it. Raises ConfigError.

    SIGTERM and Ctrl-C finish the requests in flight, and end; SIGHUP reads the settings again and
    replaces one replica after another.
    """
    try:
        import ray
        from ray import serve as ray_serve
    except ImportError:
        raise ConfigError(
            "Ray is missing; install it: .venv/bin/python -m pip install -r requirements-ray.txt"
        ) from None
    from deploy.ray_serve import APP, application

    fleet = read(argv)
    config = fleet.config
    check_port(config)
    # a replica that hangs finishes nothing, however long Ray waits; its controller inherits this
    os.environ["RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS"] = "1"
    ray.init(
        os.environ.get("RAY_ADDRESS", "local"), namespace=APP, include_dashboard=False,
        logging_level=logging.ERROR, log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "RAY_SERVE_LOG_TO_STDERR": "0"}},
    )  # fmt: skip
    signals: SimpleQueue[int] = SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # ray.init has set its own
        signal.signal(number, lambda number, frame: signals.put(number))

    def run(fleet: Fleet) -> None:
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
                run(read(argv))
            except FAULTS as error:
                print(f"error: {error}; nothing was changed", file=sys.stderr)
        ray_serve.delete(APP)  # replicas finish their requests while the proxy still runs
    finally:
        ray_serve.shutdown()
        ray.shutdown()


def check_resources(fleet: Fleet) -> None:
    """Raise ConfigError if the cluster has too few CPUs or GPUs."""
    import ray

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
    os.chdir(ROOT)
    main(sys.argv[1:])
