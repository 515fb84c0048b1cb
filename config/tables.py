"""Settings that come from the tables of modes and orders: a policy's fields are settings of its
modes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, Field, create_model

from scheduling import user_policies
from scheduling.policies import MODES, ORDERS, Order, Policy

# before the tables are read: fields of users' policies are settings, too
user_policies.load(user_policies.words(sys.argv[1:], os.environ), os.environ)
KINDS: list[type[Policy] | type[Order]] = [*MODES.values(), *ORDERS.values()]


def _having(table: Mapping[str, type[Policy] | type[Order]]) -> dict[str, tuple[str, ...]]:
    """Return for each field of a table's classes the names of the rows that have it."""
    names = {each.name for kind in table.values() for each in fields(kind)}
    return {
        name: tuple(row for row, kind in table.items() if name in kind.__dataclass_fields__)
        for name in names
    }


# the modes that have each setting that is a field of policies
ONLY_IN = _having(MODES)
# of each setting that has a meaning only with some values of another one, that one and the values
NEEDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    **{
        each.name: (each.metadata["needs"][0], (each.metadata["needs"][1],))
        for kind in KINDS
        for each in fields(kind)
        if each.metadata["needs"]
    },
    "fake_slowdown": ("model", ("fake",)),
    **dict.fromkeys(("padded_prefill", "padded_compact"), ("generator", ("padded",))),
    **{name: ("order", orders) for name, orders in _having(ORDERS).items()},
}


def flag(name: str) -> str:
    """Return a setting's name on a command line."""
    return "--" + name.replace("_", "-")


def setting(default: Any, meaning: str, shown: str | None = None, **checks: Any) -> Any:
    """A field of Config. shown: the default in words."""
    return Field(
        default, description=meaning, json_schema_extra={"shown": shown or str(default)}, **checks
    )


def of_tables() -> type[BaseModel]:
    """Return a model of the settings in the tables: a mode, an order, and the fields of all."""
    *most, last = MODES
    settings: dict[str, Any] = {
        "mode": (
            Literal[tuple(MODES)],
            Field(description=f"batching mode: {', '.join(most)} or {last}"),
        ),
        "order": (
            Literal[tuple(ORDERS)],
            setting("fcfs", f"order of the waiting requests: {', '.join(ORDERS)}"),
        ),
    }
    for kind in KINDS:
        types = get_type_hints(kind)
        for each in fields(kind):
            about, modes = each.metadata, ONLY_IN.get(each.name, tuple(MODES))
            scope = f"{', '.join(modes)}: " if len(modes) < len(MODES) else ""
            if (needs := NEEDS.get(each.name)) and needs[0] == "order":
                scope = f"with --order {' or '.join(needs[1])}: "
            settings[each.name] = (
                types[each.name],
                setting(each.default, scope + about["meaning"], about["shown"], **about["limits"]),
            )
    return create_model("OfTables", **settings)


def meaningful(name: str, mode: str) -> bool:
    """Return whether a setting has a meaning in a mode."""
    return name not in ONLY_IN or mode in ONLY_IN[name]


def bounds_skipping(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a setting is the limit of `--lora-policy`, which holds in every order."""
    return name == "max_wait_s" and config.get("lora_policy") in ("skip", "drain")


def has_effect(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a setting has a meaning beside the others of a config."""
    other, values = NEEDS.get(name, ("mode", (config["mode"],)))
    needed = config.get(other, values[0]) in values or bounds_skipping(name, config)
    return needed and meaningful(name, config["mode"])
