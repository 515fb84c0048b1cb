"""Flags for the replicas of a simulation."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from config import ConfigError, flag
from scheduling.routers import ROUTERS
from simulate.fleet import Failure, Layout


def add_replicas(parser: argparse.ArgumentParser) -> None:
    default = Layout()
    add = parser.add_argument_group("replicas").add_argument
    routers = "policy that chooses a replica for each request: "
    routers += f"{', '.join(ROUTERS)} (default: {default.router})"
    # fmt: off
    add("--replicas", type=int, metavar="N", help="servers that share the load (default: 1)")
    add("--prefill-replicas", type=int, metavar="N",
        help="instead: servers that compute prompts and first tokens alone, and send keys and "
        "values to --decode-replicas")
    add("--decode-replicas", type=int, metavar="N", help="servers that compute all other tokens")
    add("--kv-gbps", type=float, metavar="GBPS",
        help="gigabits a second at which each of --prefill-replicas sends keys and values")
    add("--router", metavar="NAME", help=routers)
    add("--stale-s", type=float, metavar="S",
        help="seconds that the router's knowledge of the replicas may be old (default: 0)")
    add("--counts-own", action=argparse.BooleanOptionalAction, default=None,
        help="with --stale-s: the router adds what it has sent since (default: it does)")
    add("--start-s", type=float, metavar="S",
        help="with --fail: seconds until the new replica takes requests (default: 0)")
    add("--slow", nargs="+", metavar="K:TIMES",
        help="iterations of replica K (from 0) take TIMES as long")
    add("--fail", nargs="+", metavar="K:AT",
        help="replica K fails at second AT with all its requests; another one starts in its place")
    # fmt: on


def layout_of(known: argparse.Namespace) -> Layout:
    """Return the layout that the flags give. Raises ConfigError."""
    for name in ("stale_s", "start_s"):
        if not 0 <= (getattr(known, name) or 0) < float("inf"):
            raise ConfigError(f"{flag(name)} must be a number of seconds from 0 on")
    apart = _apart(known)
    are_several = apart or (known.replicas or 1) > 1 or known.plan
    if (known.router or known.stale_s) and not are_several:
        raise ConfigError("--router and --stale-s apply to several replicas; add --replicas N")
    if known.counts_own is not None and not known.stale_s:
        raise ConfigError("--counts-own has no meaning without old reports; add --stale-s")
    names = ("replicas", "router", "stale_s", "counts_own", "start_s")
    try:
        return Layout(
            **{name: value for name in names if (value := getattr(known, name)) is not None},
            **apart,
            slow=dict(_pairs("--slow", known.slow, "2:1.5")),
            failures=[Failure(*pair) for pair in _pairs("--fail", known.fail, "0:30")],
            seed=known.seed,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _apart(known: argparse.Namespace) -> dict[str, Any]:
    """Return what a layout has of disaggregated prefill, if anything. Raises ConfigError."""
    given = known.prefill_replicas, known.decode_replicas, known.kv_gbps
    if given == (None, None, None):
        return {}
    if None in given or not (min(given) > 0 and known.kv_gbps < float("inf")):
        raise ConfigError(
            "--prefill-replicas, --decode-replicas and --kv-gbps belong together, and are above "
            "0, as in --prefill-replicas 1 --decode-replicas 3 --kv-gbps 100"
        )
    if known.replicas or known.fail or known.start_s or known.plan:
        raise ConfigError(
            "--prefill-replicas and --decode-replicas stay as many as they are; leave out "
            "--replicas, --fail, --start-s and --plan"
        )
    prefill, decode, kv_gbps = given
    return {"replicas": prefill + decode, "prefill_replicas": prefill, "kv_gbps": kv_gbps}


def _pairs(name: str, texts: Sequence[str] | None, example: str) -> Iterator[tuple[int, float]]:
    """Read (2, 1.5) from "2:1.5"."""
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
    words += [
        f"iterations of replica {k} take {times:g} times as long"
        for k, times in layout.slow.items()
    ]
    words += [f"replica {replica} fails at {at_s:g} s" for replica, at_s in layout.failures]
    return ", ".join(words)
