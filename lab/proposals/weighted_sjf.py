"""vLLM RFC 29406, a shortest-job-first policy that ages, and its pull request 29366, "[Feat][Sched]
Add SJF Scheduling Policy" (closed).

Read: the description of 29366 in part, and its scorer (policy/shortest_job_first.py). The RFC
itself was not found. Taken: the score, its medians and weights. Not said: the order of equal
scores, which is that of arrival here. A prompt is the longest of its request.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from scheduling.inference import Inference
from scheduling.policies.base import View, setting
from scheduling.policies.orders import Order, oldest_sorted
from scheduling.queue import Queue


def sigmoid(x: float) -> float:
    """Return the logistic function of x, which never overflows in this form."""
    return (1 + math.tanh(x / 2)) / 2


@dataclass(frozen=True)
class WeightedSjf(Order):
    """The highest score first: a weighted sum of one for a short prompt and one for a long wait,
    each from 0 to 1 and a half at its median.
    """

    in_order: ClassVar[bool] = False
    sjf_length_median: int = setting(32768, "prompt tokens that score a half", ge=1)
    sjf_time_median_s: float = setting(5.0, "seconds of waiting that score a half", gt=0)
    sjf_length_weight: float = setting(0.5, "weight of the prompt's score", ge=0, le=1)
    sjf_time_weight: float = setting(0.5, "weight of the wait's score", ge=0, le=1)

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        def score(members: Sequence[Inference]) -> float:
            prompt = max(len(member.prompt_ids) for member in members) / self.sjf_length_median
            waited = (view.now - members[0].arrived_at) / self.sjf_time_median_s
            short, long_wait = sigmoid(1 - prompt), sigmoid(waited - 1)
            return self.sjf_length_weight * short + self.sjf_time_weight * long_wait

        return oldest_sorted(queue, len(queue), lambda members: -score(members))
