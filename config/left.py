"""Flags, settings and routes that left, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAST = "7f5e74e"  # the last commit that has all of them

ROUTES = {
    "/timeline": "GET /stats?iterations=1 has each iteration, and python -m "
    "simulate.saved_page RUN shows a run's",
}
LEFT = {
    "autoscale": "the number of simulated replicas is --replicas N, or what --plan finds; "
    "./server.sh --replicas N --autoscale hands its values to Ray Serve",
    "deploy": "./compare.sh --replicas N starts each variant as N replicas on Ray Serve, and "
    "./simulate.sh --replicas N simulates them; leave --deploy out",
    "sampling_seed": "every request has a seed of its own, the field `seed`; leave it out",
    "preemption": "what a preempted request has computed is computed again; leave it out",
    "host_kv_gb": "KV blocks are no longer copied to the host's memory; raise --kv-cache instead",
    **dict.fromkeys(
        ("prefill_only", "prefill_url"),
        "disaggregated prefill is simulated; use ./simulate.sh --prefill-replicas 1 "
        "--decode-replicas 1 --kv-gbps 25",
    ),
    "ray": "--jobs N shares simulations among N processes of this machine",
    "noise": "reports of simulated runs say how far costs were off beside real servers; leave it "
    "out",
    "step": "a simulation jumps over equal iterations, with the results of one by one; leave it "
    "out",
    "timeout": "an answer may take an hour; client/client.py has --timeout",
    "save_trace": "client/client.py --out FOLDER saves the run, with its trace.jsonl",
    "temperature": "it is a field of a request; send one by POST /inference, or with --trace",
    "timeline": "python -m simulate.saved_page RUN shows a run's rows as a page; leave it out",
}


def used(settings: Mapping[str, Any]) -> str | None:
    """Return a sentence if a saved run cannot be served again, since it used what left."""
    speculate = str(settings.get("speculate", 0))
    if settings.get("preemption") == "swap" or settings.get("host_blocks"):
        what = "--preemption swap"
    elif not speculate.isdecimal():
        what = f"--speculate {speculate}"
    else:
        return None
    return f"its server had {what}, which left; use the code of commit {LAST}"
