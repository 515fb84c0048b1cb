"""The size of the KV cache, a setting with a unit: 4GB, 2048blocks, or 90% (of a GPU's memory)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from config.left import LEFT

UNITS = {"gb": "GB", "blocks": "blocks", "%": "%"}
# earlier settings of the same, of which the first that is given holds, and the unit of each
EARLIER = {"kv_blocks": "blocks", "kv_cache_gb": "GB", "gpu_memory_utilization": "%"}


class PoolSize(NamedTuple):
    amount: float
    unit: str

    def __str__(self) -> str:
        return f"{self.amount:.15g}{self.unit}"


def read_size(text: str) -> PoolSize:
    """Return what a text such as 4GB stands for. Raises ValueError."""
    words = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?) ?(gb|blocks|%)", str(text).strip().lower())
    if words is None:
        raise ValueError(
            "must be a size with its unit: 4GB, 2048blocks, or 90% (of a GPU's memory)"
        )
    size = PoolSize(float(words[1]), UNITS[words[2]])
    if size.amount <= 0 or (size.unit == "blocks" and size.amount % 1):
        raise ValueError("must be above 0, in whole blocks")
    if size.unit == "%" and size.amount > 100:
        raise ValueError("is more than all of a GPU's memory; give 100% or less")
    return size


def as_size(earlier: str, value: Any) -> str:
    """Return the value of an earlier setting as one of kv_cache."""
    unit = EARLIER[earlier]
    try:
        return str(PoolSize(float(value) * (100 if unit == "%" else 1), unit))
    except ValueError:
        return f"{value}{unit}"  # which is refused with a sentence


def in_todays_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings, among which may be those of an older run, in today's names."""
    renamed = {name: value for name, value in settings.items() if name not in {*EARLIER, *LEFT}}
    given = [name for name in EARLIER if settings.get(name) not in (None, "")]
    if given and "kv_cache" not in renamed:
        renamed["kv_cache"] = as_size(given[0], settings[given[0]])
    return renamed
