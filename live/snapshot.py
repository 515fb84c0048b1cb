"""The pool's blocks and the waiting requests at one instant."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from scheduling.inference import Inference
from scheduling.scheduler import Scheduler


class QueueSnapshot(NamedTuple):
    """Blocks of the pool, and the first waiting requests in the order."""

    free_blocks: int  # with those whose content can still be found
    shared_blocks: int  # that several requests have
    cached_blocks: int  # of the free ones, those whose content can still be found
    queue: list[Inference]
    n_blocks: int  # in the pool


def snapshot_of(scheduler: Scheduler, n: int, now: float) -> QueueSnapshot:
    """Return the blocks and the first n waiting requests. Changes nothing."""
    pool = scheduler.pool
    queue = list(islice(scheduler.view(now).waiting, n))
    blocks = pool.free_blocks, pool.shared_blocks, pool.cached_blocks
    return QueueSnapshot(*blocks, queue, pool.n_blocks)
