"""vLLM pull request 54145, "[Core][Scheduler] Batch small prefill chunks under decode load" (open).

Read: its description in part, and comments on it. Taken: which chunks are put off, and the two ways
in which they are let go. Not said in what was read: whether an age is counted from the request's
arrival. Chosen here: 32 tokens (there 0, off), and milliseconds since the arrival in place of
steps, which a policy without memory cannot count. None is put off when a row gives its blocks up.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from scheduling.policies.base import Plan, View, setting
from scheduling.policies.dynamic import Dynamic


@dataclass(frozen=True)
class SmallChunks(Dynamic):
    """`dynamic`, but while rows decode, prompt chunks of fewer than `small_chunk_tokens` wait until
    together they have as many, or one of their requests came `small_chunk_delay_ms` ago.
    """

    in_order: ClassVar[bool] = False
    small_chunk_tokens: int = setting(32, "tokens of a chunk that is computed at once", ge=1)
    small_chunk_delay_ms: float = setting(20.0, "longest wait since the arrival", gt=0)

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        small = [
            (inference, n)
            for inference, n in plan.run
            if not inference.decodes and n < self.small_chunk_tokens
        ]
        enough = sum(n for _, n in small) >= self.small_chunk_tokens
        put_off_since = view.now - self.small_chunk_delay_ms / 1e3
        aged = any(inference.arrived_at <= put_off_since for inference, _ in small)
        decoding = any(inference.decodes for inference, _ in plan.run)
        if enough or aged or plan.preempt or not decoding:
            return plan
        groups = {inference.group for inference, _ in small}  # whole requests are put off
        run = [row for row in plan.run if row[0].decodes or row[0].group not in groups]
        admit = [each for each in plan.admit if each[0].group not in groups]
        return replace(plan, run=run, admit=admit, reason="join" if admit else "")
