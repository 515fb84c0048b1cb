"""The scheduler that takes over when a user's own policy or order has failed."""

from __future__ import annotations

from scheduling.inference import Inference, State
from scheduling.policies import Dynamic
from scheduling.scheduler import Scheduler
from scheduling.swap import give_up


class Successor(Scheduler):
    """Scheduler of the requests in flight at another one whose policy failed: `dynamic`, first come
    first served, with KV blocks on demand.

    Running requests are computed again from their first token, as after a preemption, since no
    effect of the failed plans is relied on; texts stay the same. `finished`: to be answered now.
    """

    def __init__(self, failed: Scheduler, now: float):
        super().__init__(
            Dynamic(kv_reservation="demand"),
            limits=failed.limits,
            n_blocks=failed.pool.n_blocks,
            max_in_flight=failed.max_in_flight,
            decoder_batch_sizes=failed.decoder_batch_sizes,
            adapters=failed.adapters,
            padded=failed.padded,
        )
        self.prompt_tokens = failed.prompt_tokens
        self.completion_tokens = failed.completion_tokens
        self.finished: list[Inference] = []
        for inference in sorted(failed.in_flight(), key=lambda inference: inference.id):
            inference.blocks = []
            if inference.answered_at is not None:  # its idle row is no longer needed
                continue
            if inference.is_over:
                self._end(inference, State.FINISHED, now)
                self.finished.append(inference)
            else:
                self._restart(inference, now)

    def _restart(self, inference: Inference, now: float) -> None:
        inference.interruptions.end(now)
        if inference.state is State.RUNNING:
            give_up(inference, 0, now)
        inference.computed = inference.num_cached_blocks = inference.standing.bin = 0
        self.queue.add(inference, now)
        if inference.deadline is not None:
            self._deadlines.add(inference.deadline, inference)
