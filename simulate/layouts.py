"""Flags for the replicas of a simulation."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from config.flags import Flags
from config.settings import ConfigError, flag
from scheduling.routers import ROUTERS
from simulate.fleet import Failure, Layout

REPLICAS: Flags = {
    "--replicas": {"type": int, "metavar": "N", "help":
        "servers that share the load (default: 1)"},
    "--prefill-replicas": {"type": int, "metavar": "N", "help":
        "instead: servers that compute prompts and first tokens alone, and send keys and values to "
        "--decode-replicas"},
    "--decode-replicas": {"type": int, "metavar": "N", "help":
        "servers that compute all other tokens"},
    "--kv-gbps": {"type": float, "metavar": "GBPS", "help":
        "gigabits per second at which each prefill replica sends keys and values"},
    "--router": {"metavar": "NAME", "help":
        f"policy that chooses a replica for each request: {', '.join(ROUTERS)} (default: "
        f"{Layout.router})"},
    "--stale-s": {"type": float, "metavar": "S", "help":
        "seconds that the router's knowledge of the replicas may be old (default: 0)"},
    "--start-s": {"type": float, "metavar": "S", "help":
        "with --fail: seconds until the new replica takes requests (default: 0)"},
    "--slow": {"nargs": "+", "metavar": "K:TIMES", "help":
        "iterations of replica K (from 0) take TIMES as long"},
    "--fail": {"nargs": "+", "metavar": "K:AT", "help":
        "replica K fails at second AT with all its requests; another one starts in its place"},
    "--counts-own": {"action": argparse.BooleanOptionalAction, "help":
        "with --stale-s: the router adds what it has sent since (default: it does)"},
}  # fmt: skip


def layout_of(known: argparse.Namespace) -> Layout:
    """Return the layout that the flags give. Raises ConfigError."""
    for name in ("stale_s", "start_s"):
        if not 0 <= (getattr(known, name) or 0) < float("inf"):
            raise ConfigError(f"{flag(name)} must be a number of seconds from 0 on")
    disaggregated = _disaggregated(known)
    are_several = disaggregated or (known.replicas or 1) > 1 or known.find is not None
    if (known.router or known.stale_s) and not are_several:
        raise ConfigError("--router and --stale-s apply to several replicas; add --replicas N")
    if known.counts_own is not None and not known.stale_s:
        raise ConfigError("--counts-own has no meaning without old reports; add --stale-s")
    if known.start_s and not known.fail:
        raise ConfigError("--start-s has no meaning without a failure; add --fail K:AT")
    names = ("replicas", "router", "stale_s", "counts_own", "start_s")
    given = {name: value for name in names if (value := getattr(known, name)) is not None}
    slow = dict(_pairs("--slow", known.slow, "2:1.5"))
    if known.find is not None:  # which tries numbers of its own
        given["replicas"] = 1 + max(slow, default=0)
    failures = [Failure(*pair) for pair in _pairs("--fail", known.fail, "0:30")]
    try:
        return Layout(**given | disaggregated, slow=slow, failures=failures, seed=known.seed)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _disaggregated(known: argparse.Namespace) -> dict[str, Any]:
    """Return what a layout has of disaggregated prefill, if anything. Raises ConfigError."""
    given = known.prefill_replicas, known.decode_replicas, known.kv_gbps
    if given == (None, None, None):
        return {}
    if None in given or not (min(given) > 0 and known.kv_gbps < float("inf")):
        raise ConfigError(
            "--prefill-replicas, --decode-replicas and --kv-gbps belong together, and are above "
            "0, as in --prefill-replicas 1 --decode-replicas 3 --kv-gbps 100"
        )
    if known.replicas or known.fail or known.start_s or known.find is not None:
        raise ConfigError(
            "--prefill-replicas and --decode-replicas stay as many as they are; leave out "
            "--replicas, --fail, --start-s and --find"
        )
    prefill, decode, kv_gbps = given
    return {"replicas": prefill + decode, "prefill_replicas": prefill, "kv_gbps": kv_gbps}


def _pairs(name: str, texts: Sequence[str] | None, example: str) -> Iterator[tuple[int, float]]:
    """Read (2, 1.5) from "2:1.5". Raises ConfigError."""
    for text in texts or ():
        number, _, value = text.partition(":")
        try:
            if not 0 < float(value) < float("inf"):
                raise ValueError
            yield int(number), float(value)
        except ValueError:
            raise ConfigError(
                f"{name} {text!r}: give a replica and a number above 0, such as {example}"
            ) from None


def described(layout: Layout) -> str:
    """Return the layout in words; of one replica that is like others nothing."""
    words = []
    if n := layout.prefill_replicas:
        words += [
            f"{n} prefill and {layout.replicas - n} decode replicas, each kind behind the router "
            f"{layout.router}",
            f"{layout.kv_gbps:g} Gbit/s for keys and values",
        ]
    elif layout.is_several:
        words.append(f"{layout.replicas} replicas behind the router {layout.router}")
    if layout.stale_s:
        own = "" if layout.counts_own else ", its own requests uncounted"
        words.append(f"knowledge up to {layout.stale_s:g} s old{own}")
    if layout.start_s:
        words.append(f"{layout.start_s:g} s to start one")
    slow = layout.slow.items()
    words += [f"iterations of replica {k} take {times:g} times as long" for k, times in slow]
    words += [f"replica {replica} fails at {at_s:g} s" for replica, at_s in layout.failures]
    return ", ".join(words)
