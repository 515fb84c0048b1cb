"""Preemption by swapping: the keys and values of a preempted request are copied to a pool in the
host's memory, and back when it is admitted again (Kwon et al., SOSP 2023, section 4.5).

All its KV blocks are copied, those too that it shares: it comes back with blocks of its own, and
depends on nothing that is evicted meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduling.extensions import Extension
from scheduling.inference import Inference
from scheduling.memory import BlockPool

Copies = list[tuple[int, int]]  # numbers of blocks: from, to


def give_up(inference: Inference, kept: int, now: float) -> None:
    """Count a preemption. kept: tokens that the host keeps; the others are recomputed."""
    interrupted = inference.interruptions
    interrupted.recompute_until = max(interrupted.recompute_until, inference.computed)
    interrupted.preempted_at = now
    interrupted.preemptions += 1
    inference.computed, inference.num_cached_blocks = kept, 0
    inference.decodes = False  # for policies it joins like a prompt, if of one token


class Swap(Extension):
    """The host pool, and which of its blocks keep which preempted inference.

    Copies wait for the next iteration, which makes those to the host first. A block of the host is
    free again after the iteration that copied it back.
    """

    def __init__(self, n_blocks: int, block_size: int):
        self.kept: dict[Inference, list[int]] = {}  # blocks of the host
        self._pool = BlockPool(n_blocks, block_size)
        self._out: dict[Inference, Copies] = {}
        self._back: dict[Inference, Copies] = {}

    @property
    def out(self) -> Copies:
        """Copies to the host that the next iteration makes."""
        return [copy for copies in self._out.values() for copy in copies]

    @property
    def back(self) -> Copies:
        """Copies from the host that the next iteration makes after those to it."""
        return [copy for copies in self._back.values() for copy in copies]

    def keep(self, inference: Inference) -> int:
        """Copy a preempted inference to the host, if that has room for all its computed tokens;
        return how many tokens the host keeps.
        """
        if self._back.pop(inference, None) is None:  # else the host has it still
            n = -(-inference.computed // self._pool.block_size)
            if not 0 < n <= self._pool.free_blocks:
                return 0
            self.kept[inference] = self._pool.allocate(n)
            self._out[inference] = list(zip(inference.blocks, self.kept[inference]))
        return inference.computed

    def before_plan(self, now: float) -> None:
        """Recompute the tokens that a failed iteration may not have copied to the host."""
        for inference in self._out:
            inference.computed = 0
            self._pool.free(self.kept.pop(inference))
        self._out = {}

    def admit(self, inference: Inference, now: float) -> None:
        if inference in self.kept:
            self._back[inference] = list(zip(self.kept[inference], inference.blocks))

    def sampled(self, inferences: Sequence[Inference], now: float) -> None:
        for inference in self._back:
            self._pool.free(self.kept.pop(inference))
        self._out, self._back = {}, {}

    def end(self, inference: Inference, now: float) -> None:
        self._pool.free(self.kept.pop(inference, ()))
        self._out.pop(inference, None)
        self._back.pop(inference, None)
