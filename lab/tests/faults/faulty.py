"""A real server whose engine, or whose clock, has a fault.

    python -m lab.tests.faults.faulty raise:20 MODE [any server setting]

Every 20th iteration then raises; `oom:20` runs out of memory, and `hang:20` never ends. A number of
1 is every iteration. `clock:3600` has the wall clock jump by so many seconds, there and back, once
a second.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from config.config import Config
from generate.loading import load_generator
from generate.memory import OutOfMemory
from scheduling.inference import Generator, Iteration
from server import launch

HANDOFF = "EFFECTIVE_BATCHING_FAULT"  # to the engine's process, as the Config goes


def _raise(error: Exception) -> NoReturn:
    raise error


FAULTS: dict[str, Callable[[], object]] = {
    "raise": lambda: _raise(RuntimeError("a fault that was asked for")),
    "oom": lambda: _raise(OutOfMemory("this GPU's memory is full, as was asked for")),
    "hang": lambda: threading.Event().wait(),
}


class FaultyGenerator(Generator):
    """Another generator, with a fault in place of a result in every `every`-th iteration."""

    def __init__(self, generator: Generator, fault: str, every: int):
        self.n_blocks, self.drafter = generator.n_blocks, generator.drafter
        self.adapters = generator.adapters
        self._generator = generator
        self._fault = FAULTS[fault]
        self._every = every
        self._n = 0

    def generate(self, iteration: Iteration) -> list[int]:
        self._n += 1
        if self._n % self._every == 0:
            self._fault()
        return self._generator.generate(iteration)


def load(config: Config, path: Path | None, n_vocab: int) -> Generator:
    """Load an engine with the fault that was asked for."""
    fault, number = os.environ[HANDOFF].split(":")
    generator = load_generator(config, path, n_vocab)
    if fault != "clock":
        return FaultyGenerator(generator, fault, int(number))
    right = time.time
    time.time = lambda: right() + int(number) * (int(right()) % 2)
    return generator


if __name__ == "__main__":
    os.environ[HANDOFF] = sys.argv[1]
    launch.main(sys.argv[2:], "lab.tests.faults.faulty:load")
