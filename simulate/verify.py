"""--verify: the best and the default on real servers, beside what was predicted of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from client.calls import ServerError
from client.progress import Progress
from client.results import Result
from compare.analysis import estimate
from compare.comparison import Comparison
from compare.deployments import Deployment
from compare.options import Options
from compare.program import compare
from compare.started import Started
from compare.variants import Variant
from config.flags import check_replicas
from config.settings import ConfigError
from simulate.find import Search
from simulate.find_page import key_of
from simulate.simulation import Simulation
from simulate.space import Candidate, command, settings_of

FOUND, DEFAULT = "found", "default"
CLOSE = 0.1  # half the interval of real ÷ predicted, beyond which it says nothing


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
    real = Options(**same | changed)
    run, stopped = compare(Comparison(real, progress, Started(real, progress)))
    if run is None or stopped:
        raise stopped or ServerError("no server was measured")
    from compare.report import report  # matplotlib takes 0.6 s to load

    report.write(run, options.svg)
    for name in run.names:
        results = {s["seed"]: s["variants"][name] for s in run.summaries if name in s["variants"]}
        yield f"{name}, {command(options, pairs[name])}: {held(search, pairs[name], results)}"


def held(search: Search, one: Candidate, results: Mapping[int, Result]) -> str:
    """Return in words whether real runs, by seed, are as predicted of the same seeds' traces."""
    key, question = key_of(search), search.question
    measure = question.measure
    if measure == "goodput" and not question.of_requests:
        measure = "request_throughput"
    predicted = search.results[one.name]
    pairs = [
        (result.number(measure) or 0.0, predicted[seed].values[""])
        for seed, result in results.items()
        if seed in predicted
    ]
    live, mean = (key.form.format(key.scale * statistics.fmean(values)) for values in zip(*pairs))
    n = len(pairs)
    text = f"{key.heading}: {live} in {n} real run{'s' * (n > 1)}, {mean} predicted"
    if not all(value > 0 for pair in pairs for value in pair):
        return text
    # what a trace does to both cancels in their ratio
    ratio = estimate([math.log(real / foreseen) for real, foreseen in pairs])
    off = f"{100 * math.expm1(ratio.mean):+.1f}%"
    if ratio.half is None:
        return f"{text}: {off}"
    low, high = (100 * math.expm1(ratio.mean + sign * ratio.half) for sign in (-1, 1))
    same = "held" if ratio.half <= CLOSE else "cannot tell, more runs would"
    return f"{text}: {off} ({low:+.1f} to {high:+.1f}%), {'off' if ratio.shown else same}"
