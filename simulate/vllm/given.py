"""The options of `./simulate.sh --vllm FILE`."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from client import arguments
from client.arguments import OF_WORKLOAD
from client.runs import RunError, refuse_overwriting
from compare.options import chosen
from compare.variants import Variant
from config.settings import ConfigError
from scheduling.policies import ORDERS, Edf
from simulate.vllm.foreseen import own_server
from simulate.vllm.recording import Head

RECORDED = "recorded"  # the variant with the recorded settings
SEEDS = 8  # seeds for several variants, unless --repeats is given
AS_RECORDED = Variant("dynamic", {})
# flags that say which requests are sent, in place of the recorded ones
REQUESTS = ("trace", "numsamples", "sweep", *OF_WORKLOAD)


def options(
    known: argparse.Namespace, given: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of Options of a comparison with the recorded server, and the further ones
    of Simulation. Raises ConfigError.
    """
    client = vars(known)["with"]
    try:
        own = own_server(Path(known.vllm), Path(client) if client else None)
    except RunError as error:
        raise ConfigError(str(error)) from None
    drawn = [name for name in REQUESTS if getattr(known, name)]
    compared = chosen(known, AS_RECORDED.mode)
    asked = compared["variants"] if known.variant or known.modes else {}
    if AS_RECORDED not in asked.values():
        if RECORDED in asked:
            raise ConfigError(
                f"{RECORDED} is the name of the server as it was recorded; name others"
            )
        asked = {RECORDED: AS_RECORDED, **asked}
    for name, variant in asked.items():
        complete(name, variant, compared["flags"], own.recording.head, not drawn)
    base = next(name for name, each in asked.items() if each == AS_RECORDED)
    compared |= {"variants": asked, "baseline": known.baseline or base, "stream": True}
    if len(asked) > 1 and "--repeats" not in given and not known.trace:
        compared["repeats"] = SEEDS
    if known.save_costs and not known.save_costs.endswith(".json"):
        raise ConfigError(f"--save-costs {known.save_costs}: give a name that ends in .json")
    try:
        path = arguments.file(known.save_costs) if known.save_costs else None
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--save-costs {error}") from None
    refuse_overwriting([path] if path else [], known.overwrite)
    return compared, {"own": own, "replays": not drawn, "costs_file": path}


def complete(
    name: str, variant: Variant, of_all: Mapping[str, Any], head: Head, replays: bool
) -> None:
    """Give a variant with another block size as much memory as was recorded, and let orders pause
    rows that do nothing else. Raises ConfigError for
    one that would find prefixes of which nothing was recorded.
    """
    settings = {**of_all, **variant.flags}
    if settings.get("prefix_caching") and replays and not head.prefix_caching:
        raise ConfigError(
            f"{name} has --prefix-caching, and vLLM was recorded without, so that nothing is known "
            "of what its prompts share; record with prefix caching, or replay a --trace"
        )
    order = ORDERS.get(str(settings.get("order")))
    if order and order.preemptive and not issubclass(order, Edf) and "row_order" not in settings:
        variant.flags["row_order"] = "turn"  # vLLM pauses no rows, so that it cannot have this one
    size = str(settings.get("block_size", ""))
    if size.isdecimal() and int(size) and "kv_cache" not in settings:  # Config refuses others
        blocks = head.num_blocks * head.block_size // int(size)
        variant.flags["kv_cache"] = f"{max(1, blocks)}blocks"
