"""vLLM pull request 56455, "[Perf]Support Support bounded prefill admission for scheduler." (open).

Read: its description in part, and its code and tests (prefill_admission.py). Taken: when a wave
begins, its size, and that rows which it displaces keep their KV blocks. There as many requests more
than `max_num_seqs` run as there are slots. Here no more run than `--max-batch-size`, so that all
but the slots are `max_num_seqs`: the same rows as of another policy need that many more. The
description's example has 25 slots for 128 rows; chosen here: a share.
"""

from dataclasses import dataclass, replace

from scheduling.inference import Inference
from scheduling.policies.base import Plan, View, setting
from scheduling.policies.dynamic import Dynamic


@dataclass(frozen=True)
class PrefillWaves(Dynamic):
    """`dynamic`, but when all rows but a `wave_share` decode, they do so alone. Once fewer do, as
    many prompts as that share go before them, and the rows that they displace are paused.
    """

    wave_share: float = setting(0.2, "share of rows for prompts, one at least", ge=0, le=1)

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        most = view.limits.max_batch_size
        slots = min(max(1, int(self.wave_share * most)), most - 1)
        if not slots or plan.preempt:
            return plan
        rows = most - slots
        decoding = [row for row in plan.run if row[0].decodes]
        if len(decoding) >= rows:
            return Plan(run=decoding[:rows])
        prompts = [row for row in plan.run if not row[0].decodes]
        running = sum(not inference.decodes for inference in view.running)
        admit = plan.admit[: max(0, slots - running)]
        left_out = {inference.id for inference, _ in plan.admit[len(admit) :]}
        wave = [row for row in prompts if row[0].id not in left_out][:rows]
        run: list[tuple[Inference, int]] = decoding[: rows - len(wave)] + wave
        return replace(plan, run=run, admit=admit, reason="join" if admit else "")
