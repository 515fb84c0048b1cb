"""Requests with limits on their latency: classes of them, and the order by what is due first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from scheduling.inference import Inference, Slo
from scheduling.policies.base import Order

EXAMPLE = "interactive=ttft:200,tpot:50 batch=ttft:10000"


def read_slo_classes(text: str) -> dict[str, Slo]:
    """Read `NAME=ttft:MS,tpot:MS …`, or none. Raises ValueError with a sentence."""
    classes: dict[str, Slo] = {}
    for part in text.split() if text != "none" else ():
        name, _, limits = part.partition("=")
        if name in classes:
            raise ValueError(f"class {name} is defined twice; define it once")
        classes[name] = _read_slo(part, name, limits)
    return classes


def _read_slo(part: str, name: str, limits: str) -> Slo:
    """Read one class's limits. part: the whole text of the class, for messages."""
    values: dict[str, float] = {}
    for pair in limits.split(","):
        measure, _, value = pair.partition(":")
        key = f"{measure}_ms"
        try:
            known = key in ("ttft_ms", "tpot_ms") and key not in values
            if not name or not known or not 0 < float(value) < math.inf:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"{part!r} is no class; write NAME=ttft:MS, NAME=tpot:MS or both, in milliseconds "
                f"above 0, as in {EXAMPLE!r}"
            ) from None
        values[key] = float(value)
    return Slo(values.get("ttft_ms"), values.get("tpot_ms"))


def due_at(inference: Inference) -> float:
    """Return when its next token is due; never: infinity.

    The first is due at arrival + the limit of its TTFT, and the k-th after it at first token + k ·
    the limit of its TPOT: with each in time, so is their mean, which TPOT is.
    """
    if (times := inference.token_times) and inference.slo.tpot_ms is not None:
        return times[0] + len(times) * inference.slo.tpot_ms / 1e3
    if not times and inference.slo.ttft_ms is not None:
        return inference.arrived_at + inference.slo.ttft_ms / 1e3
    return math.inf


@dataclass(frozen=True)
class Edf(Order):
    """The earliest deadline first, of requests and rows (Liu & Layland, 1973, section 7, where it
    is preemptive, too); those without one go last, as they came.

    A deadline is that of the next token. So a row that is ahead of its limit, or has none, is
    paused for a prompt that is due, and a late one is computed before all others.
    """

    in_order: ClassVar[bool] = False
    preemptive: ClassVar[bool] = True

    def key(self, inference: Inference) -> tuple[float, float]:
        return due_at(inference), inference.arrived_at
