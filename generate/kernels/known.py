"""The ids of tokens, of which some were sampled on a GPU and not read since: one launch where
PyTorch has five (generate/buffers.py: SampledIds). Written in Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 256  # tokens that a program looks up


@triton.jit(do_not_specialize=["n_tokens"])
def known_kernel(ids, kept, out, n_tokens, TOKENS: tl.constexpr):
    at = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    given = tl.load(ids + at, mask=at < n_tokens, other=0)
    place = tl.maximum(-1 - given, 0)
    known = tl.load(kept + place, mask=given < 0, other=0)
    tl.store(out + at, tl.where(given < 0, known, given), mask=at < n_tokens)


def known(ids: Tensor, kept: Tensor) -> Tensor:
    """Return ids, int64 [T], with those of `kept`, int64, in the places of ~0, ~1, …"""
    out = torch.empty_like(ids)
    grid = (triton.cdiv(len(ids), TOKENS),)
    known_kernel[grid](ids, kept, out, len(ids), TOKENS=TOKENS)
    return out
