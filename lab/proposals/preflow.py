"""vllm-ascend pull request 16360, PREFLOW: short prompts first, and none waits for ever.

Taken: of all prompts, waiting or begun, the highest of 2^(age ÷ D) ÷ (P × R) is computed; P and R
are the work of its prompt at first and now, n (n + 1) ÷ 2 less what was cached. Not said in what
was read: D; chosen here: 1 s. Prompts that have begun go as they came, and a request of several
prompts goes by its first.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from math import log2
from typing import ClassVar

from scheduling.inference import Inference
from scheduling.policies.base import Order, Plan, View, setting
from scheduling.policies.dynamic import Dynamic
from scheduling.policies.orders import oldest_sorted
from scheduling.policies.prefill import Prefill
from scheduling.queue import Queue


def work(begin: int, end: int) -> int:
    """Return the pairs of tokens that attention computes of positions begin … end − 1."""
    return max(1, end * (end + 1) // 2 - begin * (begin + 1) // 2)


def score(inference: Inference, view: View, half_s: float) -> float:
    n, done = len(inference.prompt_ids), inference.computed + view.cached_tokens(inference)
    first = work(inference.cached_tokens or view.cached_tokens(inference), n)
    left = work(min(done, n - 1), n)
    return (view.now - inference.arrived_at) / half_s - log2(first * left)


@dataclass(frozen=True)
class HighestFirst(Order):
    in_order: ClassVar[bool] = False
    half_s: float = 1.0

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        return oldest_sorted(queue, len(queue), lambda m: -score(m[0], view, self.half_s))


class Best(Prefill):
    """Both, but a prompt that has begun waits while a waiting one has a higher score."""

    def chunk(self, view: View, inference: Inference, prompts: int, left: int) -> int:
        joins = len(view.running) < view.limits.max_batch_size
        best = next(iter(view.waiting), None) if joins else None
        if best is None or inference.admitted_at is None:
            return left
        return left if score(inference, view, self.k) >= score(best, view, self.k) else 0


@dataclass(frozen=True)
class Preflow(Dynamic):
    """`dynamic`, but prompts go by age and by the work that they are."""

    in_order: ClassVar[bool] = False
    preflow_half_s: float = setting(1.0, "age that doubles the score of a prompt", gt=0)

    @cached_property
    def prefill_rule(self) -> Prefill:
        return Best("mixed", self.preflow_half_s)

    def plan(self, view: View) -> Plan:
        plan = super().plan(view._replace(order=HighestFirst(self.preflow_half_s)))
        # what waits may not fit beside what has begun
        plain = {each.name: getattr(self, each.name) for each in fields(Dynamic)}
        return plan if plan.run else Dynamic(**plain).plan(view)
