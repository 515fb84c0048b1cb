"""A generator without a model: deterministic ids at a stated cost. Needs no torch.

It serves tests, virtual time and `--model fake`, where everything but the engine is real. Its cost
is linear in rows and prompt tokens, fitted by eye to `demo` on two CPU cores.
"""

from __future__ import annotations

import functools
import sys
import time
import zlib
from array import array
from collections.abc import Callable

from scheduling.inference import Drafter, Generator, Iteration

ITERATION_S = 1e-3
ROW_S = 6e-5
PREFILL_TOKEN_S = 1e-5
LETTERS = b"etaoin shrdlu"
MOST_ROWS = 1024  # requests whose checksums are kept; with more the ids are right, too


def cost_s(iteration: Iteration) -> float:
    """Return the seconds that an iteration takes."""
    rows = iteration.rows
    prefill = sum(len(row.drafts) if row.decodes else row.n_tokens for row in rows)
    n_rows = len(rows) + iteration.padding
    return ITERATION_S + ROW_S * n_rows + PREFILL_TOKEN_S * prefill


def token(prompt_ids: list[int], seed: int, index: int) -> int:
    """Return the completion id at `index`: a letter that depends on prompt, seed and index."""
    return _letter(_checksum(prompt_ids, seed), index)


def _checksum(prompt_ids: list[int], seed: int) -> int:
    return zlib.crc32(array("q", [*prompt_ids, seed]).tobytes())


def _letter(checksum: int, index: int) -> int:
    return LETTERS[zlib.crc32(index.to_bytes(8, sys.byteorder), checksum) % len(LETTERS)]


class FakeGenerator(Generator):
    """Takes the stated cost of each iteration, times `slowdown`, and returns letters."""

    def __init__(
        self,
        sleep: Callable[[float], None] = time.sleep,
        slowdown: float = 1.0,
        drafter: Drafter | None = None,
    ):
        self._sleep, self._slowdown, self.drafter = sleep, slowdown, drafter
        self._free_at = 0.0
        # once a request: a checksum of its whole prompt for every token would be a cost of its own
        self._checksum = functools.lru_cache(MOST_ROWS)(
            lambda inference: _checksum(inference.prompt_ids, inference.sampling.seed)
        )

    def generate(self, iteration: Iteration) -> list[int]:
        self._sleep(self._slowdown * cost_s(iteration))
        return self._ids(iteration)

    def launch(self, iteration: Iteration) -> Callable[[], list[int]]:
        """Compute beside the caller, as a GPU does, one iteration after another."""
        begun = max(time.perf_counter(), self._free_at)
        due = self._free_at = begun + self._slowdown * cost_s(iteration)
        ids = self._ids(iteration)

        def wait() -> list[int]:
            self._sleep(max(0.0, due - time.perf_counter()))
            return ids

        return wait

    def _ids(self, iteration: Iteration) -> list[int]:
        return [
            _letter(self._checksum(row.inference), len(row.inference.tokens) + n)
            for row in iteration.rows
            if row.samples
            for n in range(1 + len(row.drafts))
        ]
