"""Flags and settings that left: command lines and environments are refused with what to use in
their place, and saved runs, which may have them, are still read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAST = "7f5e74e"  # the commit that still has all of them

LEFT = {
    "sampling_seed": "every request has a seed of its own, the field `seed`; leave it out",
    "preemption": "what a preempted request has computed is computed again; leave it out",
    "host_kv_gb": "KV blocks are no longer copied to the host's memory; raise --kv-cache instead",
}


def used(settings: Mapping[str, Any]) -> str | None:
    """Return a sentence if a saved run cannot be served again, since it used what left."""
    if settings.get("preemption") == "swap" or settings.get("host_blocks"):
        return f"its server had --preemption swap, which has left; use the code of commit {LAST}"
    return None
