"""Several of our servers behind one front end: their flags, their start, and their joint report.

All run on this machine, so that they share one clock.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from client.calls import ServerError, get
from compare.analysis import occupancy_over_time
from compare.measure import BINS, ServerReport, Target, stats_of
from config import ConfigError
from deploy.kinds import KINDS, Kind
from observers.run import Run, added
from observers.tallies import Tallies
from stats import ROW_KINDS, throughputs

REPLICAS = 2
# parts of /stats that need every answer, or its instant
LOST = ("total-elapsed-time", "throughput", *Tallies._fields, *throughputs(0, 0, 0, 0.0))
OF_EACH = {  # of each replica: heading in a report, form, and what it is multiplied with
    "completed": ("answered", "{:,}", 1),
    "failed": ("failed", "{:,}", 1),
    "total_output_tokens": ("tokens", "{:,}", 1),
    "useful_fraction": ("useful rows, %", "{:.0f}", 100),
    "occupancy": ("occupancy, %", "{:.0f}", 100),
    "largest_batch": ("largest batch, rows", "{:,}", 1),
    "kv_blocks": ("KV blocks", "{:,}", 1),
    "busy_s": ("busy, s", "{:.2f}", 1),
}


@dataclass(frozen=True, slots=True)
class Deployment:
    """A front end of KINDS, with a number of servers behind it."""

    front: str
    replicas: int
    router: str

    @property
    def kind(self) -> Kind:
        return KINDS[self.front]

    @property
    def start(self) -> list[str]:
        """Python's arguments that start it, before the mode and its settings."""
        words = ["-m", self.kind.module, "--replicas", str(self.replicas)]
        return words + (["--router", self.router] if len(self.kind.routers) > 1 else [])

    def names(self, url: str, key: str | None = None) -> list[str]:
        """Return the servers' names, each of which is at /replicas/NAME. Raises ServerError."""
        if self.kind.merges:
            return sorted(get(f"{url}/stats", key=key)["replicas"])
        return [str(k + 1) for k in range(self.replicas)]


def add_deployment(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("several servers of each variant").add_argument
    deploy = "start each variant as replicas behind this front end"
    add("--deploy", choices=list(KINDS), help=deploy)
    add("--replicas", type=int, metavar="N", help=f"with --deploy: how many (default: {REPLICAS})")
    routers = KINDS["ray"].routers
    router = "with --deploy ray: policy that chooses a replica for each request, "
    router += f"{', '.join(routers)} (default: {routers[0]})"
    add("--router", metavar="NAME", help=router)


def deployment_of(known: argparse.Namespace) -> Deployment | None:
    """Return the deployment that the flags name, if any. Raises ConfigError."""
    if known.deploy is None:
        for name in ("replicas", "router"):
            if getattr(known, name) is not None:
                raise ConfigError(
                    f"--{name} applies to servers behind a front end; add --deploy "
                    f"{' or '.join(KINDS)}, or simulate them with ./simulate.sh"
                )
        return None
    kind = KINDS[known.deploy]
    replicas = REPLICAS if known.replicas is None else known.replicas
    if replicas < 1:
        raise ConfigError(f"--replicas {replicas}: give 1 or more")
    if known.router not in (None, *kind.routers):
        raise ConfigError(
            f"--router {known.router!r}: --deploy {known.deploy} has {', '.join(kind.routers)}"
        )
    if kind.package and importlib.util.find_spec(kind.package) is None:
        raise ConfigError(f"--deploy {known.deploy} needs a package; run {kind.install}")
    return Deployment(known.deploy, replicas, known.router or kind.routers[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed(Target):
    """Servers behind a front end, which gets the requests; each gives its own report."""

    deployment: Deployment
    replicas: Sequence[str]  # their names

    @property
    def servers(self) -> list[str]:
        return [f"{self.url}/replicas/{name}" for name in self.replicas]

    @property
    def are_several(self) -> bool:
        return self.deployment.replicas > 1

    def report(self) -> ServerReport:
        """Return the report of all: counts are sums. Raises ServerError, also if one was
        replaced.
        """
        if self.deployment.names(self.url, self.key) != [*self.replicas]:
            raise ServerError("a replica was replaced, and what it had counted went with it")
        each = {name: stats_of(url, self.key) for name, url in zip(self.replicas, self.servers)}
        if self.deployment.kind.merges:
            engine = get(f"{self.url}/stats", key=self.key)
            del engine["replicas"]
        else:
            engine = together([stats for stats, _ in each.values()])
        engine["by_replica"] = {
            name: {key: stats[key] for key in OF_EACH} for name, (stats, _) in each.items()
        }
        over_time = added_over_time(iterations for _, iterations in each.values())
        return engine, over_time, get(self.url, key=self.key)["config"]


def together(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the /stats of servers that know their own alone. Percentiles and rates are left out,
    since they cannot be merged without their values.
    """
    merged = added([Run.of_report(report) for report in reports]).report()
    head = {key: reports[0][key] for key in ("mode", "model")}
    head["kv_blocks"] = sum(report["kv_blocks"] for report in reports)
    return head | {key: value for key, value in merged.items() if key not in LOST}


def added_over_time(iterations: Iterable[Sequence[Sequence[float]]]) -> dict[str, Any]:
    """Return the rows over time of all servers, from the iterations of each."""
    busy = [rows for rows in iterations if rows]
    if not busy:
        return occupancy_over_time([])
    started = min(rows[0][0] for rows in busy)
    ended = max(rows[-1][0] + rows[-1][1] for rows in busy)
    parts = [occupancy_over_time(rows, BINS, (started, ended)) for rows in busy]
    sums = {kind: np.sum([part[kind] for part in parts], axis=0).tolist() for kind in ROW_KINDS}
    return parts[0] | sums
