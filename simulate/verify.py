"""--verify: the best and the default on real servers, beside what was predicted of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from client.calls import ServerError
from client.progress import Progress
from compare.analysis import estimate
from compare.comparison import Comparison
from compare.deployments import Deployment
from compare.options import Options
from compare.program import compare
from compare.variants import Variant
from config import ConfigError, check_replicas
from simulate.find import Search
from simulate.find_page import key_of
from simulate.simulation import Simulation
from simulate.space import Candidate, command, settings_of

FOUND, DEFAULT = "found", "default"


def check(options: Simulation) -> None:
    """Raise ConfigError for what no server here can verify."""
    if options.own:
        raise ConfigError(
            "--verify starts servers of ours, and --vllm is of yours; start it as the answer says, "
            "and measure it with ./compare.sh --also"
        )
    if options.costs.source.get("estimate") or options.costs.name == "second":
        raise ConfigError(
            f"--verify needs costs of an engine that is here, and {options.costs.name} are none; "
            "leave it out"
        )


def verified(options: Simulation, search: Search, runs: int, progress: Progress) -> Iterator[str]:
    """Run both so many times; yield in words whether the prediction held. Raises ConfigError."""
    best, default = search.best, search.space.default
    assert best
    pairs = {FOUND: best}
    if not search.space.replicas and default.config != best.config:
        pairs[DEFAULT] = default
    same = {f.name: getattr(options, f.name) for f in fields(Options)}
    changed: dict[str, Any] = {
        "variants": {k: Variant(c.variant.mode, settings_of(options, c)) for k, c in pairs.items()},
        "baseline": next(reversed(pairs)),
        "numsamples": search.question.requests,
        "repeats": runs,
        "goodput": search.question.of_requests,
        "out": options.out / "verified",
        "flags": {},
        "deployment": None,
    }
    if best.replicas > 1:
        check_replicas(best.replicas)
        changed["deployment"] = Deployment(best.replicas, options.layout.router)
    run, stopped = compare(Comparison(Options(**same | changed), progress))
    if run is None or stopped:
        raise stopped or ServerError("no server was measured")
    from compare.report import report  # matplotlib takes 0.6 s to load

    report.write(run)
    for name, results in run.variants.items():
        yield f"{name}, {command(options, pairs[name])}: {held(search, pairs[name], results)}"


def held(search: Search, one: Candidate, results: list[dict[str, Any]]) -> str:
    """Return in words whether the mean of real runs lies where that of as many is expected."""
    key, question, n = key_of(search), search.question, len(results)
    measure = question.measure
    if measure == "goodput" and not question.of_requests:
        measure = "request_throughput"
    live, values = statistics.fmean(result[measure] for result in results), search.values(one)

    def said(value: float) -> str:
        return key.form.format(key.scale * value)

    predicted = estimate(values)
    mean, half = predicted.mean, predicted.half
    text = f"{key.heading}: {said(live)} in {n} real run{'s' * (n > 1)}, {said(mean)} predicted"
    if half is not None:
        half *= math.sqrt(1 + len(values) / n)  # of the mean of n more
        text += f" ({said(mean - half)} to {said(mean + half)})"
        if abs(live - mean) <= half:
            return f"{text}: held"
    return f"{text}: {100 * (live / mean - 1):+.1f}%" if mean else text
