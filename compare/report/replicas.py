"""Replicas of a run: number and requests of simulated ones over time; measures of real ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from client.quoting import escape
from client.runs import Run
from compare.deployments import OF_EACH
from compare.report.tables import markdown

SUMS = (
    "Rows, tokens and KV blocks of a variant are sums over its replicas, and its largest batch is "
    "the largest of any. Its occupancy counts a replica only while it computes. The useful rows "
    "that theory expects are left out, and so is the throughput while requests always wait."
)
Changes = list[tuple[float, int, int]]  # seconds, replicas that take requests, other replicas


def simulated(run: Run) -> dict[str, Mapping[str, Any]]:
    """Return the first seed's simulated replicas, of variants with more than one steady one."""
    servers = {name: result.get("server", {}) for name, result in run.results[0].items()}
    return {
        name: replicas
        for name, server in servers.items()
        if (replicas := server.get("replicas"))
        and (len(replicas["requests"]) > 1 or len(_changes(replicas)) > 1 or replicas["missed"])
    }


def _changes(replicas: Mapping[str, Any]) -> Changes:
    """Return the changes of a variant, of several at one instant the last."""
    return list({change[0]: tuple(change) for change in replicas["changes"]}.values())


def changes(run: Run) -> dict[str, Changes]:
    """Return replicas of each variant over time; empty if no number ever changed."""
    by_variant = {name: _changes(replicas) for name, replicas in simulated(run).items()}
    return by_variant if any(len(replicas) > 1 for replicas in by_variant.values()) else {}


def number(result: Mapping[str, Any]) -> int:
    """Return the number of replicas: of simulated ones the most at once, of real ones all."""
    server = result["server"]
    at_once = [up + others for _, up, others in server.get("replicas", {}).get("changes", ())]
    return len(server.get("by_replica", {})) or max(at_once, default=1)


def simulated_part(run: Run, figure: Sequence[str]) -> list[str]:
    """Return the section on simulated replicas; empty for a run with one all the time."""
    rows = [["variant", "replicas", "paid for, replica-seconds", "requests each, least to most"]]
    sentences = []
    for name, replicas in simulated(run).items():
        up = [up for _, up, _ in _changes(replicas)]
        requests = replicas["requests"].values()
        served = f"{min(requests, default=0):,} to {max(requests, default=0):,}"
        counts = f"{min(up)} to {max(up)}" if len(up) > 1 else f"{up[0]}"
        rows.append([escape(name), counts, f"{replicas['replica_s']:,.0f}", served])
        sentences += [
            f"In {escape(name)} the failure of replica {number} at {at_s:g} s ended no request: it "
            f"was not up, or nothing was left to do."
            for number, at_s in replicas["missed"]
        ]
    return ["## Replicas", markdown(rows), *sentences, *figure] if rows[1:] else []


def measured_part(run: Run) -> list[str]:
    """Return the section on real replicas; empty where servers were alone."""
    rows = [["variant", "replica", *(heading for heading, _, _ in OF_EACH.values())]]
    for name, result in run.results[0].items():
        for replica, numbers in result.get("server", {}).get("by_replica", {}).items():
            cells = [form.format(scale * numbers[k]) for k, (_, form, scale) in OF_EACH.items()]
            rows.append([escape(name), escape(replica), *cells])
    seed = [] if len(run.results) == 1 else [f"By replica, seed {run.first['seed']}:"]
    return ["## Replicas", SUMS, *seed, markdown(rows)] if rows[1:] else []
