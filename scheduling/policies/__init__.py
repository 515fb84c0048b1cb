"""Batching policies: which inferences run in the next iteration, and which may join.

A policy is one file here and one row of MODES; an order is one class and one row of ORDERS, and a
victim of VICTIMS. Their fields are the server's settings: flags, --help, what is refused in which
mode, the tables of the documentation, the colours of figures and the contract tests derive from the
three tables.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from scheduling.policies.base import Limits, Order, Plan, Policy, Rule, Victim, View, setting
from scheduling.policies.deadlines import Edf
from scheduling.policies.dynamic import Dynamic
from scheduling.policies.fair import Fair
from scheduling.policies.multibin import MultiBin
from scheduling.policies.nobatch import NoBatching
from scheduling.policies.orders import Fcfs, Hrrn, Prefix, Sjf
from scheduling.policies.preemptive import Mlfq, Srpt
from scheduling.policies.priority import Priority
from scheduling.policies.static import Static
from scheduling.policies.victims import LeastComputed, MostComputed, Newest
from scheduling.policies.windowed import Windowed

__all__ = ["MODES", "ORDERS", "VICTIMS", "Dynamic", "MultiBin", "NoBatching", "Static", "Windowed"]
__all__ += ["Edf", "Fair", "Fcfs", "Hrrn", "Mlfq", "Prefix", "Priority", "Sjf", "Srpt"]
__all__ += ["Limits", "Order", "Plan", "Policy", "Rule", "Victim", "View", "chosen", "setting"]

MODES: dict[str, type[Policy]] = {
    "nobatch": NoBatching,
    "static": Static,
    "windowed": Windowed,
    "dynamic": Dynamic,
    "multibin": MultiBin,
}
ORDERS: dict[str, type[Order]] = {
    "fcfs": Fcfs,
    "priority": Priority,
    "sjf": Sjf,
    "hrrn": Hrrn,
    "prefix": Prefix,
    "fair": Fair,
    "srpt": Srpt,
    "mlfq": Mlfq,
    "edf": Edf,
}
VICTIMS: dict[str, type[Victim]] = {
    "newest": Newest,
    "least_computed": LeastComputed,
    "most_computed": MostComputed,
}
Choice = TypeVar("Choice", Policy, Order, Victim)


def chosen(table: dict[str, type[Choice]], name: str, settings: Any) -> Choice:
    """Return the table's rule of this name; its fields are attributes of settings."""
    kind = table[name]
    return kind(**{field.name: getattr(settings, field.name) for field in fields(kind)})
