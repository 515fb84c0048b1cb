"""vLLM pull request 33392, "[Feature] EWSJF: Adaptive Scheduler for Mixed-Workloads" (open), and
the RFC before it, 24484, "Enhancing the Pluggable Scheduler with a Workload-Aware Adaptive Policy".

Read: both descriptions in part, the abstract of arXiv 2601.21758, and the code of the pull request
(ewsjf_scheduler/scoring.py, scheduler.py). Taken: queues of equal ranges of prompt lengths, the
score and its defaults, one queue an iteration. Left out: ranges that are made and removed as
prompts come (Refine-and-Prune), and weights that tune themselves (Bayesian Meta-Optimizer).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from scheduling.inference import Inference
from scheduling.policies.base import View, setting
from scheduling.policies.orders import Order
from scheduling.queue import Queue


@dataclass(frozen=True)
class Ewsjf(Order):
    """A queue for each range of prompt lengths, first come, first served. The queue whose head has
    the highest score is the only one served: waited · (1 + w · ln(prompt + 1)) ÷ (range + 1).
    """

    in_order: ClassVar[bool] = False
    ewsjf_range: int = setting(200, "prompt tokens of a range", ge=1)
    ewsjf_weight: float = setting(0.5, "weight w of a long prompt", ge=0, allow_inf_nan=False)

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        def score(head: Inference) -> float:
            prompt = len(head.prompt_ids)
            urgency = (view.now - head.arrived_at) * (1 + self.ewsjf_weight * math.log(prompt + 1))
            return urgency / (prompt // self.ewsjf_range + 1)

        ranges: dict[int, list[Inference]] = {}
        group = place = -1
        for inference in queue.by_arrival.values():
            if inference.group != group:  # members stay with the first
                group, place = inference.group, len(inference.prompt_ids) // self.ewsjf_range
            ranges.setdefault(place, []).append(inference)
        for inferences in ranges.values():  # preempted ones return to the front
            inferences.sort(key=lambda i: i.interruptions.preempted_at is None)
        return iter(max(ranges.values(), key=lambda each: score(each[0]), default=()))
