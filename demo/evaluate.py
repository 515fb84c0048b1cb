"""How good `demo` is."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from model import GPT2


def causal_logits(model: GPT2, ids: Tensor, positions: Tensor) -> Tensor:
    """Return the logits after every token of equally long sequences. ids, positions: int64 [B, T] -> [B × T, V]."""
    b, t = ids.shape

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(b, t, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))  # [B, H, T, D]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)

    return model(ids.flatten(), positions.flatten(), attend, torch.arange(b * t))


@torch.inference_mode()
def bits_per_byte(model: GPT2, text: bytes, context: int) -> float:
    """Return −log₂ of the probability of each byte after the first, on average.

    Windows of `context` bytes start every half window, and a byte counts in the first that has it: all but the first half
    window are predicted from at least half a window.
    """
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    nats, counted = 0.0, 1
    for start in range(0, max(len(ids) - context // 2 - 1, 1), context // 2):
        window = ids[start : start + context + 1]
        logits = causal_logits(model, window[None, :-1], torch.arange(len(window) - 1)[None])
        new = start + len(window) - counted
        nats += F.cross_entropy(logits[-new:], window[-new:], reduction="sum").item()
        counted += new
    return nats / math.log(2) / (len(ids) - 1)
