"""From logits to ids on a GPU in one launch, in which a program takes a row. Written in Triton.

Run on an H200 (PyTorch 2.11, Triton 3.6, 2026-11-27): the ids of all 5,120 rows tried were those of
`sample`, alone or together. It comes with `--linear triton`.

No row is sorted. The smallest logit that top-k or top-p keeps is found bit by bit, from the highest
bit of its key on: a bit is set if enough is kept with it. To know that, a program counts, or
weighs, the logits that are not smaller. All sums of a row are formed in one order, in float64, so
an id depends on its own row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 8192  # logits that a program reads at once
WARPS = 16


@triton.jit
def mixed(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def uniform(seed, index):
    """Return the number of a draw, as generate/sampling.py defines it: float64. Both: int64."""
    GAMMA: tl.constexpr = 0x9E3779B97F4A7C15
    begin = mixed(seed.to(tl.uint64, bitcast=True) + GAMMA)
    bits = mixed(begin + (index.to(tl.uint64, bitcast=True) + 1) * GAMMA)
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2⁻⁵³


@triton.jit
def weigh(row, start, n_vocab, best, temperature, least, COUNT: tl.constexpr, TILE: tl.constexpr):
    """Return a tile's weights, or with COUNT ones, and 0 where a key is below `least`: float64.

    Keys are integers in the order of the logits, in which 0 and -0 are equal.
    """
    at = start + tl.arange(0, TILE)
    x = tl.load(row + at, mask=at < n_vocab, other=float("-inf")).to(tl.float32)
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    key = bits ^ tl.where(x < 0, 0xFFFFFFFF, 0x80000000)
    weight = 1.0 if COUNT else tl.exp((x - best) / temperature)
    return tl.where(key >= least, weight, 0.0).to(tl.float64)


@triton.jit
def held(row, n_vocab, best, temperature, least, COUNT: tl.constexpr, TILE: tl.constexpr):
    """Return the sum of `weigh` over a row."""
    total = tl.zeros([TILE], tl.float64)
    for start in range(0, n_vocab, TILE):
        total += weigh(row, start, n_vocab, best, temperature, least, COUNT, TILE)
    return tl.sum(total, 0)


@triton.jit
def edge(
    row, n_vocab, best, temperature, kept, wanted,
    COUNT: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the largest key from which on the keys hold `wanted`; `kept` if that is larger."""
    least = tl.full([], 0, tl.uint32)
    for bit in range(BITS):
        trial = least | (1 << (31 - bit))
        above = tl.maximum(trial, kept)
        enough = held(row, n_vocab, best, temperature, above, COUNT, TILE) >= wanted
        least = tl.where(enough, trial, least)
    return tl.maximum(least, kept)


@triton.jit
def draw_kernel(logits, stride, settings, ids, n_vocab, BITS: tl.constexpr, TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    row, settings, lanes = logits + program * stride, settings + program * 5, tl.arange(0, TILE)
    most = tl.full([TILE], float("-inf"), tl.float32)
    where = tl.zeros([TILE], tl.int32)
    for start in range(0, n_vocab, TILE):
        at = start + lanes
        x = tl.load(row + at, mask=at < n_vocab, other=float("-inf")).to(tl.float32)
        where = tl.where(x > most, at, where)
        most = tl.maximum(most, x)
    best = tl.max(most, 0)
    temperature = tl.load(settings).to(tl.float64, bitcast=True).to(tl.float32)
    if temperature == 0:
        lowest = tl.min(tl.where(most == best, where, n_vocab - 1), 0)
        tl.store(ids + program, lowest.to(tl.int64))
        return
    top_p = tl.load(settings + 1).to(tl.float64, bitcast=True)
    top_k = tl.load(settings + 2)
    least = tl.full([], 0, tl.uint32)
    if top_k < n_vocab:
        wanted = top_k.to(tl.float64)
        least = edge(row, n_vocab, best, temperature, least, wanted, True, BITS, TILE)
    if top_p < 1:
        wanted = held(row, n_vocab, best, temperature, least, False, TILE) * top_p
        least = edge(row, n_vocab, best, temperature, least, wanted, False, BITS, TILE)
    total = held(row, n_vocab, best, temperature, least, False, TILE)
    target = uniform(tl.load(settings + 3), tl.load(settings + 4)) * total
    # the tile in which the running sum passes the target, and the sum before it
    chosen, base = tl.full([], 0, tl.int32), tl.full([], 0, tl.float64)
    before = tl.full([], 0, tl.float64)
    for start in range(0, n_vocab, TILE):
        mass = tl.sum(weigh(row, start, n_vocab, best, temperature, least, False, TILE), 0)
        # the last such tile: rounding may keep the whole sum below the target
        here = (before <= target) & (mass > 0)
        chosen = tl.where(here, start, chosen)
        base = tl.where(here, before, base)
        before += mass
    weight = weigh(row, chosen, n_vocab, best, temperature, least, False, TILE)
    last = tl.max(tl.where(weight > 0, lanes, 0), 0)
    passed = (tl.cumsum(weight, 0) > target - base) & (weight > 0)
    place = tl.min(tl.where(passed, lanes, last), 0)
    tl.store(ids + program, (chosen + place).to(tl.int64))


def draw(logits: Tensor, settings: Tensor, n_vocab: int) -> Tensor:
    """Return an id below n_vocab for each row of logits: [N, V] -> int64 [N].

    settings: int64 [N × 5], of each row temperature and top_p, which are float64 by their bits,
    top_k, seed and index; n_vocab for no top_k, 1 for no top_p.
    """
    ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    bits = 16 if logits.dtype == torch.bfloat16 else 32  # the others are alike in each logit
    tile = min(TILE, triton.next_power_of_2(n_vocab))
    draw_kernel[(len(logits),)](
        logits, logits.stride(0), settings, ids, n_vocab, BITS=bits, TILE=tile, num_warps=WARPS
    )
    return ids
