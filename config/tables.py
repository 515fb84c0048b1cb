"""The settings that the tables of modes and orders say: a policy's fields are settings of its
modes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, Field, create_model

from scheduling.policies import MODES, ORDERS, Order, Policy

KINDS: list[type[Policy] | type[Order]] = [*MODES.values(), *ORDERS.values()]
# of each setting that is a field of policies, the modes that have it
ONLY_IN = {
    each.name: tuple(
        mode for mode, kind in MODES.items() if each.name in {its.name for its in fields(kind)}
    )
    for policy in MODES.values()
    for each in fields(policy)
}

# of each setting that has a meaning only with some values of another one, that one and the values
NEEDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    each.name: (each.metadata["needs"][0], (each.metadata["needs"][1],))
    for kind in KINDS
    for each in fields(kind)
    if each.metadata["needs"]
}
NEEDS["fake_slowdown"] = ("model", ("fake",))
for order in ORDERS.values():  # a field of orders, those orders
    for each in fields(order):
        having = (name for name, its in ORDERS.items() if each.name in its.__dataclass_fields__)
        NEEDS[each.name] = ("order", tuple(having))


def flag(name: str) -> str:
    """How a setting is named on a command line."""
    return "--" + name.replace("_", "-")


def setting(default: Any, meaning: str, shown: str | None = None, **checks: Any) -> Any:
    return Field(
        default, description=meaning, json_schema_extra={"shown": shown or str(default)}, **checks
    )


def of_tables() -> type[BaseModel]:
    """What the tables of policies and orders say: a mode, an order, and the fields of all of them,
    which are settings.
    """
    *most, last = MODES
    found: dict[str, Any] = {
        "mode": (
            Literal[tuple(MODES)],
            Field(description=f"batching mode: {', '.join(most)} or {last}"),
        ),
        "order": (
            Literal[tuple(ORDERS)],
            setting("fcfs", f"who goes first among those that wait: {', '.join(ORDERS)}"),
        ),
    }
    for kind in KINDS:
        types = get_type_hints(kind)
        for each in fields(kind):
            told, modes = each.metadata, ONLY_IN.get(each.name, tuple(MODES))
            whose = f"{', '.join(modes)}: " if len(modes) < len(MODES) else ""
            if (needs := NEEDS.get(each.name)) and needs[0] == "order":
                whose = f"with --order {' or '.join(needs[1])}: "
            found[each.name] = (
                types[each.name],
                setting(each.default, whose + told["meaning"], told["shown"], **told["limits"]),
            )
    return create_model("OfTables", **found)


def meaningful(name: str, mode: str) -> bool:
    """Whether a setting has a meaning in a mode."""
    return mode in ONLY_IN.get(name, MODES)


def has_effect(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a setting has a meaning beside the others of a config."""
    other, values = NEEDS.get(name, ("mode", (config["mode"],)))
    return meaningful(name, config["mode"]) and config.get(other, values[0]) in values
