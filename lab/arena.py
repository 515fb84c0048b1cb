"""The arena: every order and every proposal for vLLM's scheduler on the same traces.

    python -m lab.arena [--policy FILE.py:NAME …] [--trace NAME …] [--load SHARE …]
    python -m lab.arena --vllm FILE --policy FILE.py:NAME …

Each policy is compared with vLLM's own default, which serves the same requests. A policy is an
order, a mode or a victim, ours or of a file, with settings where it needs some: --policy 'sjf
--aging 30'. "all" stands for ours and all proposals of lab/proposals/, which is the default. Other
options are those of python -m lab.studies arena, such as --seeds, --out and --from.

With --vllm, policies are compared on the requests and costs of a recording of your own vLLM; other
options are then those of ./simulate.sh --vllm.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from config import environment  # noqa: F401 - where a package is missing
from scheduling import user_policies

# constants that a text does not give, tried at two values besides the default
TRIED = {
    "preflow.py:Preflow": ("--preflow-half-s 0.3", "--preflow-half-s 3"),
    "laps.py:Laps": (
        "--laps-rate 0.1", "--laps-rate 0.5",
        "--laps-short-tokens 32 --laps-long-tokens 256",
        "--laps-short-tokens 128 --laps-long-tokens 900",
    ),
}  # fmt: skip
PROPOSALS = Path(__file__).resolve().parent / "proposals"


def proposals() -> list[str]:
    """Return FILE.py:NAME of each proposal in lab/proposals/: small_chunks.py has SmallChunks."""
    names = {file.name: file.stem.title().replace("_", "") for file in PROPOSALS.glob("*.py")}
    return [f"lab/proposals/{file}:{name}" for file, name in sorted(names.items())]


def on_recording(path: str, policies: Sequence[str], others: Sequence[str]) -> None:
    """Run ./simulate.sh --vllm with a variant for each policy."""
    user_policies.load(user_policies.words(policies, {}), os.environ)
    from lab.studies import arena  # only now: settings are made of what is loaded
    from simulate import program

    variants = []
    for policy in policies:
        name = policy.split()[0].rpartition(":")[2]
        variants += ["--variant", f"{name}={arena.words_of(policy)}"]
    sys.argv = ["simulate", "--vllm", path, *variants, *others]
    program.main()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--policy", action="append", help="compare this policy (repeat for several)")
    add("--trace", action="append", default=[], help="compare on this trace (repeat for several)")
    add("--load", action="append", default=[], help="compare at this load (repeat for several)")
    add("--vllm", metavar="FILE", help="compare on a recording of your own vLLM")
    known, others = parser.parse_known_args()
    if known.vllm:
        if not known.policy or "all" in known.policy:
            parser.error("--vllm compares eleven policies at most; name each by --policy")
        return on_recording(known.vllm, known.policy, others)
    named = proposals()
    more = [f"lab/proposals/{name} {flags}" for name, tried in TRIED.items() for flags in tried]
    every = ",".join(["ours", *named, *more])
    policies = [every if policy == "all" else policy for policy in known.policy or ["all"]]
    only = [f"trace={trace}" for trace in known.trace] + [f"load={load}" for load in known.load]
    conditions = [word for condition in only for word in ("--only", condition)]
    words = ["arena", *conditions, *others]
    kept = any(word.startswith("--from") for word in others)
    if kept and known.policy:
        parser.error("--from measures nothing anew; leave out --policy")
    if not kept:
        words += ["--policies", ",".join(policies)]
    user_policies.load(user_policies.words(words, {}), os.environ)
    from lab.studies import __main__, arena  # only now: settings are made of what is loaded

    if unknown := set(known.trace) - set(arena.TRACES):
        parser.error(f"unknown trace {min(unknown)}; name one of {', '.join(arena.TRACES)}")
    __main__.main(words, "lab.arena")


if __name__ == "__main__":
    main()
