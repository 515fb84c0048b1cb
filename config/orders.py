"""Which order has a meaning in which mode, and what it needs."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from config.tables import flag, meaningful
from scheduling.door import read_queue_policies
from scheduling.policies import MODES, ORDERS, chosen

if TYPE_CHECKING:
    from config.settings import Config


def refuse(config: Config, given: Collection[str]) -> None:
    """Raise ValueError, with a sentence that names the fix, for settings of who goes first that
    contradict each other. given: the settings that were chosen, and not left at their defaults.
    """
    order = ORDERS[config.order]
    if order.preemptive and config.mode != "dynamic":
        others = ", ".join(name for name, each in ORDERS.items() if not each.preemptive)
        raise ValueError(
            f"--order {config.order} pauses rows, and in mode {config.mode} a batch runs to its "
            f"end; use mode dynamic, or one of the orders {others}"
        )
    if config.order == "prefix" and not config.prefix_caching:
        raise ValueError("--order prefix goes by what the prefix cache holds; add --prefix-caching")
    by_length = order.by_length or config.mode == "multibin"
    if "length_predictor" in given and not by_length:
        names = [name for name, each in ORDERS.items() if each.by_length]
        raise ValueError(
            f"--length-predictor has no meaning without --order {' or '.join(names)} or mode "
            "multibin, which go by lengths; add one of them, or leave it out"
        )
    if config.length_predictor == "constant" and (
        config.order == "sjf" or config.mode == "multibin"
    ):
        what = "mode multibin" if config.mode == "multibin" else "--order sjf"
        raise ValueError(
            f"{what} tells requests apart by predicted lengths, and --length-predictor constant "
            "gives all the same; use exact, noisy:SIGMA or prompt"
        )
    if config.preferred_batch_sizes and "batch_size_target" in given:
        raise ValueError(
            "--preferred-batch-sizes and --batch-size-target both say when a batch is large "
            "enough; leave one of them out"
        )
    if meaningful("preferred_batch_sizes", config.mode):
        most = chosen(MODES, config.mode, config).most_rows(config.max_batch_size)
        beyond = [size for size in config.preferred_batch_sizes if not 1 <= size <= most]
        if beyond:
            raise ValueError(
                f"--preferred-batch-sizes {beyond[0]} is no batch size: a batch has 1 … {most} "
                "rows; leave it out, or raise --max-batch-size and --batch-size-limit"
            )
    if config.order == "priority":
        _refuse_levels(config)
    if config.preserve_ordering:
        _refuse_to_preserve(config)


def _refuse_to_preserve(config: Config) -> None:
    """Answers that leave as their requests came annul an order that lets later ones go first
    (Triton refuses several levels, and delays).
    """
    chooses = f"--order {config.order}" if ORDERS[config.order].preemptive else ""
    if config.order == "priority":
        policies = chosen(ORDERS, config.order, config).queue_policies.values()
        if config.priority_levels > 1:
            chooses = "--order priority with several levels"
        elif any(policy.action == "delay" for policy in policies):
            chooses = "--queue-policy with action=delay"
    if chooses:
        raise ValueError(
            f"{chooses} lets later requests be answered first, and --preserve-ordering holds their "
            "answers until those before them are done; leave one of them out"
        )


def _refuse_levels(config: Config) -> None:
    levels = config.priority_levels
    default = config.default_priority_level
    if default is not None and default > levels:
        raise ValueError(
            f"{flag('default_priority_level')} {default} is beyond the {levels} levels; lower it, "
            f"or raise {flag('priority_levels')}"
        )
    unknown = [
        level for level in read_queue_policies(config.queue_policy) if not 1 <= level <= levels
    ]
    if unknown:
        raise ValueError(
            f"{flag('queue_policy')} names level {unknown[0]}, and there are levels 1 … {levels}; "
            f"name one of them, or raise {flag('priority_levels')}"
        )
