"""Merged reports of several replicas: /stats, /metrics and /ready of all together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from config.config import Config
from server.observers.run import Run, added
from server.replicas.replica import Report


def stats(
    config: Config, replicas: Sequence[Report], own: Run, report_ages_s: Sequence[float]
) -> dict[str, Any]:
    """Return /stats of all replicas and of each. own: counts of the ingress. report_ages_s: ages of
    the reports that a router used.
    """
    head = {"mode": config.mode, "model": config.model}
    run = added([own, *(each.run for each in replicas)])
    result = head | {"kv_blocks": sum(each.kv_blocks for each in replicas)} | run.report()
    result["replicas"] = {
        each.name: head | {"kv_blocks": each.kv_blocks} | each.run.report() for each in replicas
    }
    for each in result["replicas"].values():
        del each["definitions"]  # once is enough
    if report_ages_s:
        ages = 1e3 * np.percentile(report_ages_s, (50, 99, 100))
        result["report_age_ms"] = dict(zip(("p50", "p99", "max"), ages.tolist()))
    return result


def not_ready_because(replicas: Sequence[Report], wanted: int) -> str | None:
    """Return why not all of the `wanted` replicas can take requests; None if all can."""
    for each in replicas:
        if each.not_ready is not None:
            return f"replica {each.name}: {each.not_ready}"
    if len(replicas) < wanted:
        return f"{len(replicas)} of {wanted} replicas are up"
    return None


class Families(Collector):
    """Collector that joins texts for Prometheus of several servers, which differ in a label."""

    def __init__(self, texts: Iterable[bytes]):
        self._families: dict[str, Metric] = {}
        for text in texts:
            for family in text_string_to_metric_families(text.decode()):
                self._families.setdefault(family.name, family)
                if self._families[family.name] is not family:
                    self._families[family.name].samples += family.samples

    def collect(self) -> Iterable[Metric]:
        return self._families.values()


def metrics(texts: Iterable[bytes]) -> bytes:
    """Merge several answers of GET /metrics."""
    return generate_latest(Families(texts))
