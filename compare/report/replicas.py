"""Replicas of a run: number and requests of simulated ones over time; measures of real ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compare.deployments import OF_EACH
from compare.quoting import escape
from compare.report.tables import markdown
from compare.runs import Run

Changes = list[tuple[float, int, int]]  # seconds, replicas that take requests, other replicas


def simulated(run: Run) -> dict[str, Mapping[str, Any]]:
    """Return the simulated replicas of each variant in the first seed, but for variants with a
    single one all the time.
    """
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


def simulated_part(run: Run, figure: Sequence[str]) -> list[str]:
    """Return the section on simulated replicas; empty for a run with one all the time."""
    rows = [["variant", "replicas", "paid for, replica-seconds", "requests of one, least to most"]]
    sentences = []
    for name, replicas in simulated(run).items():
        up = [up for _, up, _ in _changes(replicas)]
        requests = replicas["requests"].values()
        rows.append(
            [
                escape(name),
                f"{min(up)} to {max(up)}" if len(up) > 1 else f"{up[0]}",
                f"{replicas['replica_s']:,.0f}",
                f"{min(requests, default=0):,} to {max(requests, default=0):,}",
            ]
        )
        sentences += [
            f"In {escape(name)} the failure of replica {number} at {at_s:g} s hit nobody: it was "
            f"not up, or nothing was left to do."
            for number, at_s in replicas["missed"]
        ]
    return ["## Replicas", markdown(rows), *sentences, *figure] if rows[1:] else []


def measured_part(run: Run) -> list[str]:
    """Return the section on real replicas, and how numbers of all are made from theirs; empty for a
    run whose servers were alone.
    """
    rows = [["variant", "replica", *(heading for heading, _, _ in OF_EACH.values() if heading)]]
    for name, result in run.results[0].items():
        for replica, numbers in result.get("server", {}).get("by_replica", {}).items():
            cells = [
                form.format(scale * numbers[key])
                for key, (heading, form, scale) in OF_EACH.items()
                if heading
            ]
            rows.append([escape(name), escape(replica), *cells])
    text = (
        "Rows, tokens and KV blocks of a variant are sums over its replicas, and its largest "
        "batch is the largest of any. Its occupancy is of the rows of those that compute: each "
        "replica's own, weighted by the time that it was busy. How many useful rows theory expects "
        "is left out, since batches of two replicas may begin at one instant, and so is what they "
        "complete while requests are always waiting, which is of a single queue."
    )
    seed = [] if len(run.results) == 1 else [f"By replica, seed {run.first['seed']}:"]
    return ["## Replicas", text, *seed, markdown(rows)] if rows[1:] else []
