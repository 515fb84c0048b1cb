"""A real server whose engine has faults, to test clients, /ready and the launcher.

    python -m lab.benchmarks.faulty MODE --fault raise:20 [any server setting]

Every 20th iteration then raises; `oom:20` runs out of memory, and `hang:20` never ends. A number of
1 is every iteration. `clock:3600` has the wall clock jump by so many seconds, there and back, once
a second. The engine is the fake one unless another --model is named.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from flask import Flask

import app
from config import Config, ConfigError, Parser
from generate import load_generator
from generate.fake import FAULTS, FaultyGenerator
from scheduling.inference import Generator
from server import launch

CLOCK = "clock"
HANDOFF = "EFFECTIVE_BATCHING_FAULT"  # from the launcher to gunicorn's worker, as the Config goes


def serve() -> Flask:
    """gunicorn's entry point."""
    fault, number = os.environ[HANDOFF].split(":")
    if fault == CLOCK:
        right = time.time
        time.time = lambda: right() + int(number) * (int(right()) % 2)
        return app.serve()

    def load(config: Config, path: Path | None, n_vocab: int) -> Generator:
        return FaultyGenerator(load_generator(config, path, n_vocab), fault, int(number))

    return app.serve(load)


def main() -> None:
    parser = Parser(description=__doc__, usage=argparse.SUPPRESS)
    parser.add_argument("--fault", default="", help=f"{', '.join((*FAULTS, CLOCK))}, and a number")
    options, rest = parser.parse_known_args(sys.argv[1:])
    fault, _, number = options.fault.partition(":")
    if fault not in (*FAULTS, CLOCK) or not number.isdigit() or not int(number):
        known = ", ".join((*FAULTS, CLOCK))
        raise ConfigError(f"--fault {options.fault!r}: name one such as raise:20, of {known}")
    os.environ[HANDOFF] = options.fault
    os.environ.setdefault("EB_MODEL", "fake")
    launch.main(rest, "lab.benchmarks.faulty:serve()")


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
