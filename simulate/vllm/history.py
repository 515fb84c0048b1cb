"""A recording as the live page shows it. What it does not hold stays unknown: a number below 0."""

from __future__ import annotations

from pathlib import Path

from scheduling.inference import Inference
from server.live.history import PAUSED, History, QueueSnapshot, Skipped
from simulate.vllm.recording import read

NAME = "vllm"
SETTINGS = {  # as the page names them, and as vLLM does
    "model": "model",
    "order": "policy",
    "max_batch_size": "max_num_seqs",
    "token_budget": "max_num_batched_tokens",
    "block_size": "block_size",
}
MISSING = (
    "Not in vLLM's recording: which KV blocks are shared or cached, and why a running request is "
    "not computed (drawn as paused)."
)


def history(path: Path, zero: float = 0.0) -> str:
    """Return the history, as JSON. zero: time on the page's clock of the first arrival. Raises
    RunError.
    """
    recording = read(path)
    head, note = recording.head, f"vLLM: {path.name}"
    about = {"name": head.engine, "simulated": None, "note": note, "missing": MISSING}
    shown = History(about, keep=None)
    shown.about |= {name: getattr(head, theirs) for name, theirs in SETTINGS.items()}
    until = 0.0
    asked = (each.arrived_at for step in recording.steps() for each in step.new)
    shown.zero = min(asked, default=0.0) - zero
    over: list[Inference] = []
    for step, begin, iteration, _ in recording.run():
        for number in step.aborted:
            shown.answered(recording.requests[number])
        for inference in over:
            shown.answered(inference)
        computed = {row.inference.id for row in iteration.rows}
        skipped = [
            Skipped(i, PAUSED, i.computed)
            for id_, i in recording.running.items()
            if id_ not in computed
        ]
        queue = [recording.requests[number] for number in step.queue]
        free = head.num_blocks - step.blocks_used
        shown.snapshot(QueueSnapshot(free, -1, -1, queue, head.num_blocks))
        shown.iteration(begin, step.until - begin, iteration, skipped)
        over, until = [recording.requests[number] for number in step.finished], step.until
    for inference in over:
        shown.answered(inference)
    if recording.is_cut:
        shown.about["note"] += ", whose last line was cut off and is left out"
    return shown.since(None, until)
