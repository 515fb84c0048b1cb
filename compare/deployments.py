"""Several of our servers on Ray Serve: their flags, their start, and their joint report.

All run on this machine, so that they share one clock.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from client.analysis import occupancy_over_time
from client.calls import ServerError, get
from client.measure import BINS, ServerReport, Target, stats_of
from client.results import Json, Key, keys
from config.flags import add_flags, check_replicas
from config.settings import ConfigError
from scheduling.routers import ON_RAY
from stats import ROW_KINDS

OF_EACH = [  # numbers of each replica
    Key("completed", "answered"),
    Key("failed", "failed"),
    Key("total_output_tokens", "tokens"),
    *keys("useful_fraction occupancy largest_batch"),
    Key("kv_blocks", "KV blocks"),
    Key("busy_s", "busy, s", form="{:.2f}"),
]


@dataclass(frozen=True, slots=True)
class Deployment:
    """A number of replicas on Ray Serve."""

    replicas: int
    router: str = ON_RAY[0]

    @property
    def start(self) -> list[str]:
        """Python's arguments that start it, before the mode and its settings."""
        replicas = str(self.replicas)
        return ["-m", "server.replicas.serve", "--replicas", replicas, "--router", self.router]


def names_of(url: str, key: str | None = None) -> list[str]:
    """Return the replicas' names, each of which is at /replicas/NAME. Raises ServerError."""
    return sorted(get(f"{url}/stats", key=key)["replicas"])


def add_deployment(parser: argparse.ArgumentParser) -> None:
    add_flags(parser.add_argument_group("several servers of each variant"), {
        "--replicas": {"type": int, "metavar": "N", "help":
            "start each variant as N replicas on Ray Serve"},
        "--router": {"metavar": "NAME", "help":
            "with --replicas: policy that chooses a replica for each request, "
            f"{', '.join(ON_RAY)} (default: {ON_RAY[0]})"},
    })  # fmt: skip


def deployment_of(known: argparse.Namespace) -> Deployment | None:
    """Return the deployment that the flags name, if any. Raises ConfigError."""
    if known.replicas is None:
        if known.router is not None:
            raise ConfigError("--router applies to several servers; add --replicas N")
        return None
    if known.router not in (None, *ON_RAY):
        raise ConfigError(f"--router {known.router!r}: on Ray Serve there are {', '.join(ON_RAY)}")
    check_replicas(known.replicas)
    return Deployment(known.replicas, known.router or ON_RAY[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed(Target):
    """Replicas behind the ingress, which gets the requests; each gives its own report."""

    replicas: Sequence[str]  # their names

    @property
    def servers(self) -> list[str]:
        return [f"{self.url}/replicas/{name}" for name in self.replicas]

    @property
    def are_several(self) -> bool:
        return len(self.replicas) > 1

    def report(self) -> ServerReport:
        """Return the sum of all reports. Raises ServerError, also if a replica was replaced."""
        engine = get(f"{self.url}/stats", key=self.key)
        if sorted(engine.pop("replicas")) != [*self.replicas]:
            raise ServerError("a replica was replaced, and what it had counted went with it")
        each = {name: stats_of(url, self.key) for name, url in zip(self.replicas, self.servers)}
        engine["by_replica"] = {
            name: {key.name: stats[key.name] for key in OF_EACH}
            for name, (stats, _) in each.items()
        }
        over_time = added_over_time(iterations for _, iterations in each.values())
        return engine, over_time, get(self.url, key=self.key)["config"]


def added_over_time(iterations: Iterable[Sequence[Sequence[float]]]) -> Json:
    """Return the rows over time of all servers, from the iterations of each."""
    busy = [rows for rows in iterations if rows]
    if not busy:
        return occupancy_over_time([])
    started = min(rows[0][0] for rows in busy)
    ended = max(rows[-1][0] + rows[-1][1] for rows in busy)
    parts = [occupancy_over_time(rows, BINS, (started, ended)) for rows in busy]
    sums = {kind: np.sum([part[kind] for part in parts], axis=0).tolist() for kind in ROW_KINDS}
    return {**parts[0], **sums}
