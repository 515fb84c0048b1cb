"""Prompts that another server has computed: their first tokens, and their keys and values, come
with the requests (DistServe: Zhong et al., OSDI 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduling.extensions import Extension
from scheduling.inference import Inference, State


@dataclass(slots=True)
class Handover:
    """Contents of a handover. data: keys and values of the prompt's KV blocks, as the engine copies
    them (generate/handover.py); empty once they are copied.
    """

    data: bytearray
    arrived_at: float = 0.0  # at the server that had the prompt computed


def begin(
    inference: Inference, token: int, seed: int, handover: Handover, queue_s: float, now: float
) -> None:
    """Give an inference that is not queued its first token, which was drawn with `seed`; it is
    FINISHED if that is its last one.

    queue_s: time that it waited where its prompt was computed.
    """
    inference.sampling = replace(inference.sampling, seed=seed)
    inference.arrived_at = handover.arrived_at
    inference.admitted_at = inference.arrived_at + queue_s
    inference.tokens, inference.token_times = [token], [now]
    inference.stopped = inference.stop is not None and inference.stop(token)
    if inference.stopped or inference.num_tokens == 1:
        inference.state, inference.answered_at, inference.is_over = State.FINISHED, now, True
        return
    # what comes is a copy for this one alone, also of a prompt with several completions
    inference.handed, inference.keys = handover, None
    inference.computed, inference.decodes = len(inference.prompt_ids), True


class HandedOver(Extension):
    """Extension that counts the times of such a request from its arrival at this server."""

    def end(self, inference: Inference, now: float) -> None:
        if inference.handed is not None:
            inference.arrived_at = inference.handed.arrived_at
