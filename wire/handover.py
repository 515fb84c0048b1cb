"""The answer of a prefill server to a decode server: a line of JSON with what the keys and values
are of and the first tokens, then the keys and values of one inference after another.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scheduling.handover import Handover, begin
from scheduling.inference import Inference
from wire.messages import Answer, to_json
from wire.refusals import Refused

if TYPE_CHECKING:
    from config import Config

BYTES = "application/octet-stream"
LIKE = ("model_name", "weights", "weights_seed", "kept_as", "block_size")  # of both servers


def packed(config: Config, group: Sequence[Inference], goes_on: bool) -> Answer:
    """Return the answer for a group that has its first tokens. goes_on: they want more."""
    firsts = [
        (member.tokens[0], member.sampling.seed, (member.admitted_at or 0.0) - member.arrived_at)
        for member in group
    ]
    head = {"of": {name: getattr(config, name) for name in LIKE}, "firsts": firsts}
    data = [member.handed.data for member in group if goes_on and not member.stopped]
    return Answer(b"".join((to_json(head).encode(), b"\n", *data)), content_type=BYTES)


def unpack(
    config: Config, body: bytes, group: Sequence[Inference], arrived_at: float, now: float
) -> None:
    """Begin a group, which is not queued, by such an answer. arrived_at: at this server.

    Raises Refused for keys and values of another model or form, and ValueError, KeyError or
    TypeError for what is no such answer.
    """
    line, _, data = body.partition(b"\n")
    head: dict[str, Any] = json.loads(line)
    for name in LIKE:
        if (theirs := head["of"][name]) != (ours := getattr(config, name)):
            message = (
                f"The prefill server has {name} {theirs!r} and this one {ours!r}; start both with "
                "the same settings."
            )
            raise Refused(502, "prefill_server_differs", message)
    at = 0
    for member, (token, seed, queue_s) in zip(group, head["firsts"], strict=True):
        end = at + -(-len(member.prompt_ids) // config.block_size) * config.block_bytes
        handover = Handover(bytearray(data[at:end]), arrived_at)
        begin(member, token, seed, handover, queue_s, now)
        at = at if member.is_over else end
    if at != len(data):
        raise ValueError(f"{len(data)} bytes of keys and values instead of {at}")
