"""What the peers' scripts share: their command line, how a burst is timed and what is said of it.
Knows no peer.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from benchmarks.workload import LARGEST, Asked, draw

THREADS = 2


def fail(sentence: str) -> NoReturn:
    """End as bad input does."""
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


def options(script: str, dtypes: Sequence[str]) -> argparse.Namespace:
    """Of a script's command line: `model`, `n` and `dtype`."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.peers.{script}")
    parser.add_argument("--model", type=Path, required=True, help="of benchmarks.peers.checkpoint")
    parser.add_argument("--n", type=int, default=LARGEST, help=f"requests (default: {LARGEST})")
    parser.add_argument("--dtype", choices=dtypes, default=dtypes[0], help=f"default: {dtypes[0]}")
    known = parser.parse_args()
    if not 1 <= known.n <= LARGEST:
        fail(f"--n must be from 1 to {LARGEST}")
    return known


def form(folder: Path, name: str) -> Path:
    """Where checkpoint.py has put a peer's form of the model."""
    if not (folder / name).is_dir():
        fail(f"{folder} has no {name}; make it by python -m benchmarks.peers.checkpoint")
    return folder / name


def tell(name: str, n: int, serve: Callable[[Sequence[Asked]], Sequence[int]]) -> None:
    """Time the burst as benchmarks.pairs reads it. `serve` returns how many tokens each got.

    It is served twice, and the second time counts: by then a peer has compiled, or laid out, what
    it needs for each number of rows.
    """
    requests = draw(n)
    serve(requests)
    start = time.perf_counter()
    got = serve(requests)
    seconds = time.perf_counter() - start
    if list(got) != [tokens for _, tokens in requests]:
        fail(f"{name} made {sum(got):,} tokens and not each request's number of them")
    print(
        f"{name}: {n} requests, {sum(got):,} tokens in {seconds:.1f} s, "
        f"{sum(got) / seconds:.1f} tok/s"
    )
