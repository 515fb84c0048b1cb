"""Needs and contradictions of the order of the waiting requests."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from config.settings import Settings
from config.tables import flag, meaningful
from scheduling.policies import MODES, ORDERS, chosen
from scheduling.policies.priority import read_queue_policies

SHEDDING = ("fcfs", "priority", "edf")  # a request has its place when it comes


def contradictions(config: Settings, given: Collection[str]) -> Iterator[str]:
    """Yield sentences for settings of the order that contradict each other or `given` ones."""
    order = ORDERS[config.order]
    if order.preemptive and config.mode != "dynamic":
        others = ", ".join(name for name, each in ORDERS.items() if not each.preemptive)
        yield (
            f"--order {config.order} pauses rows, and in mode {config.mode} a batch runs to its "
            f"end; use mode dynamic, or one of the orders {others}"
        )
    if config.order == "prefix" and not config.prefix_caching:
        yield "--order prefix goes by what the prefix cache holds; add --prefix-caching"
    multibin = config.mode == "multibin"
    if "length_predictor" in given and not (order.by_length or multibin):
        names = [name for name, each in ORDERS.items() if each.by_length]
        yield (
            f"--length-predictor has no meaning without --order {' or '.join(names)} or mode "
            "multibin, which go by lengths; add one of them, or leave it out"
        )
    if config.length_predictor == "constant" and (config.order == "sjf" or multibin):
        what = "mode multibin" if multibin else "--order sjf"
        yield (
            f"{what} tells requests apart by predicted lengths, and --length-predictor constant "
            "gives all the same; use exact, noisy:SIGMA or prompt"
        )
    if config.preferred_batch_sizes and "batch_size_target" in given:
        yield (
            "--preferred-batch-sizes and --batch-size-target both say when a batch is large "
            "enough; leave one of them out"
        )
    if meaningful("preferred_batch_sizes", config.mode):
        most = chosen(MODES, config.mode, config).max_rows(config.max_batch_size)
        for size in config.preferred_batch_sizes:
            if not 1 <= size <= most:
                yield (
                    f"--preferred-batch-sizes {size} is no batch size: a batch has 1 … {most} "
                    "rows; leave it out, or raise --max-batch-size and --batch-size-limit"
                )
    if config.order == "priority":
        yield from _unknown_levels(config)
    if config.shed and (config.mode != "dynamic" or config.order not in SHEDDING):
        yield (
            f"--shed can estimate a request's first token only in mode dynamic with --order "
            f"{', '.join(SHEDDING)}; use one of these, or leave it out"
        )
    if config.preserve_ordering and (what := _overtaking(config)):
        yield (
            f"{what} lets later requests be answered first, and --preserve-ordering holds their "
            "answers until those before them are done; leave one of them out"
        )


def _overtaking(config: Settings) -> str:
    """The setting by which a later request is answered first, if there is one (Triton refuses
    several levels, and delays, with preserve_ordering).
    """
    if ORDERS[config.order].preemptive:
        return f"--order {config.order}"
    if config.order == "priority":
        if config.priority_levels > 1:
            return "--order priority with several levels"
        policies = chosen(ORDERS, config.order, config).queue_policies.values()
        if any(policy.action == "delay" for policy in policies):
            return "--queue-policy with action=delay"
    return ""


def _unknown_levels(config: Settings) -> Iterator[str]:
    levels, default = config.priority_levels, config.default_priority_level
    if default is not None and default > levels:
        yield (
            f"{flag('default_priority_level')} {default} is beyond the {levels} levels; lower it, "
            f"or raise {flag('priority_levels')}"
        )
    for level in read_queue_policies(config.queue_policy):
        if not 1 <= level <= levels:
            yield (
                f"--queue-policy names level {level}, and there are levels 1 … {levels}; name one "
                "of them, or raise --priority-levels"
            )
