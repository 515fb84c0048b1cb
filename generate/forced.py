"""Draft tokens that are accepted at a stated rate, to measure the worth of speculation at that
rate: with random weights, which no drafter can guess, with the fake engine, and in virtual time.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Sequence

from scheduling.inference import Drafter, Generator, Inference, Iteration

DRAFT, OTHER = 0, 1  # ids: of a draft token, and of the token that comes where it is rejected


class ForcedAcceptance(Generator, Drafter):
    """An engine whose draft tokens are accepted with stated chances, and which proposes them.

    rates: chance of a row's first draft token, its second, … if those before it are accepted; the
    last one holds for all that follow. generate: of the engine, whose ids are replaced by the draft
    tokens that are accepted: texts mean nothing. Draws depend on a request's seed and the token's
    index alone.
    """

    def __init__(
        self,
        generate: Callable[[Iteration], Iterable[int]],
        rates: Sequence[float],
        n_blocks: int | None = None,
    ):
        self.n_blocks, self.drafter = n_blocks, self
        self._generate, self._rates = generate, rates

    def propose(self, wanted: Sequence[tuple[Inference, int]]) -> list[list[int]]:
        return [[DRAFT] * k for _, k in wanted]

    def generate(self, iteration: Iteration) -> list[int]:
        sampled, ids = iter(self._generate(iteration)), list[int]()
        for row in iteration.rows:
            index = len(row.inference.tokens)
            for place in range(len(row.drafts)):
                next(sampled)
                ids.append(DRAFT if self._accepts(row.inference, index, place) else OTHER)
            if row.samples:
                ids.append(next(sampled))
        return ids

    def _accepts(self, inference: Inference, index: int, place: int) -> bool:
        draw = zlib.crc32(struct.pack("<Qq", inference.sampling.seed, index + place))
        return draw < self._rates[min(place, len(self._rates) - 1)] * 2**32
