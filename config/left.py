"""Flags, settings and routes that left, and what to use instead; saved runs still have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from config.reading import PoolSize

LAST = "7f5e74e"  # the last commit that has all of them
ROUTES = {
    "/timeline": "GET /stats?iterations=1 has each iteration, and python -m "
    "simulate.saved_page RUN shows a run's",
}
LEFT = {
    "autoscale": "the number of simulated replicas is --replicas N, or what --find replicas finds; "
    "./server.sh --replicas N --autoscale hands its values to Ray Serve",
    "batch_invariant": "--linear triton has the same bits for any number of tokens",
    "batch_size_limit": "a batch has at most --max-batch-size rows",
    "decode_floor": "--prefill last:K computes prompts while fewer than K rows decode",
    "deploy": "./compare.sh --replicas N starts each variant as N replicas on Ray Serve, and "
    "./simulate.sh --replicas N simulates them; leave --deploy out",
    "enforce_eager": "--decoder-batch-sizes none makes no CUDA graphs",
    **dict.fromkeys(
        ("kv_blocks", "kv_cache_gb", "gpu_memory_utilization"),
        "--kv-cache takes a size with its unit: 70blocks, 4GB or 90%",
    ),
    "host_kv_gb": "KV blocks are no longer copied to the host's memory; raise --kv-cache instead",
    "live_prompts": "--live prompts shows the beginning of each prompt, too",
    "log_level": "the server's log has a line for each thing that a user should know; leave it out",
    "mlfq_levels": "there are 6 levels; --mlfq-quantum says how long each is",
    "noise": "reports of simulated runs say how far costs were off beside real servers; leave it "
    "out",
    "norms": "norms are ours where attention or linear layers are; use --kernels plain for "
    "PyTorch's",
    "numtokens_range": "--lengths choice:N,N draws completion tokens from these numbers",
    "padded_compact": "a rectangle is copied as soon as half of its keys and values would be "
    "saved; leave it out",
    "plan": "--find replicas looks for the fewest replicas that meet --slo",
    "preemption": "what a preempted request has computed is computed again; leave it out",
    **dict.fromkeys(
        ("prefill_only", "prefill_url"),
        "disaggregated prefill is simulated; use ./simulate.sh --prefill-replicas 1 "
        "--decode-replicas 1 --kv-gbps 25",
    ),
    "prefix_window": "--order prefix sorts the 128 oldest requests, as SGLang does; leave it out",
    "ray": "--jobs N shares simulations among N processes of this machine",
    "sampler": "tokens are drawn by our kernel where attention or linear layers are ours, on a GPU "
    "where linear layers are; use --kernels plain for PyTorch's operations",
    "scale": "--scale-tokens 0.125 multiplies all lengths of a --trace, as --scale 64 of 512 did",
    "selection": "lengths are in the order in which they are drawn; leave it out",
    "sampling_seed": "every request has a seed of its own, the field `seed`; leave it out",
    "tbt_ms": "--prefill adaptive:MS keeps gaps between tokens within MS milliseconds",
    "step": "a simulation jumps over equal iterations, with the results of one by one; leave it "
    "out",
    "timeout": "an answer may take an hour; client/client.py has --timeout",
    "save_trace": "client/client.py --out FOLDER saves the run, with its trace.jsonl",
    "temperature": "it is a field of a request; send one by POST /inference, or with --trace",
    "timeline": "python -m simulate.saved_page RUN shows a run's rows as a page; leave it out",
    "wait": "--arrival wait:S is the same",
    "weights_seed": "the seed of random weights is 0; leave it out",
}
# settings that a saved run may have used, and the only value of today
ONLY = {"batch_size_limit": None, "mlfq_levels": 6, "prefix_window": 128}
# settings that are part of another one today
UNITS_ONCE = {"kv_blocks": "blocks", "kv_cache_gb": "GB", "gpu_memory_utilization": "%"}
PREFILL_ONCE = {"last": "decode_floor", "adaptive": "tbt_ms"}


def used(settings: Mapping[str, Any]) -> str | None:
    """Return a sentence if a saved run cannot be served again, since it used what left."""
    speculate = str(settings.get("speculate", 0))
    beyond = [name for name, only in ONLY.items() if settings.get(name, only) != only]
    if settings.get("preemption") == "swap" or settings.get("host_blocks"):
        what = "--preemption swap"
    elif not speculate.isdecimal():
        what = f"--speculate {speculate}"
    elif beyond:
        what = f"--{beyond[0].replace('_', '-')} {settings[beyond[0]]}"
    else:
        return None
    return f"its server had {what}, which left; use the code of commit {LAST}"


def in_todays_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a saved run, which may be an older one, in today's names."""
    today = {name: value for name, value in settings.items() if name not in LEFT}
    for name, unit in UNITS_ONCE.items():
        if "kv_cache" not in today and settings.get(name) not in (None, ""):
            amount = float(settings[name]) * (100 if unit == "%" else 1)
            today["kv_cache"] = str(PoolSize(amount, unit))
    rule = str(settings.get("prefill"))
    if (part := settings.get(PREFILL_ONCE.get(rule, ""))) is not None:
        today["prefill"] = f"{rule}:{part}"
    return today
