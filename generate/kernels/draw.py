"""From logits to ids on a GPU in one launch, in which a program takes a row. Written in Triton.

It comes with `--linear triton`. Run on an H200 (PyTorch 2.11, Triton 3.6, 2026-11-27): all of 2,134
ids were those of `sample`; 256 rows take 16 us drawn, 37 with top-k 50 and top-p 0.9.

A row is read as CHUNKS parts side by side, each by one warp, so that warps wait for each other only
at the end of a pass. No row is sorted. The smallest logit that top-k or top-p keeps is found bit by
bit, from the highest bit of its key on: a bit is set if enough is kept with it. To know that, a
program weighs the logits that are not smaller: those of a few fours of neighbours, which it
collects first, or of the whole row if those are too many or may not hold enough.

A four's weights are added in float32, all else in float64, and all sums of a row are formed in one
order: so an id depends on its own row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNKS = tl.constexpr(32)
TILE = 4096  # logits that a program reads at once, of all chunks
ROOM = 512  # fours that are collected
WARPS = 8


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
def number(key):
    """Return the float32 of a key, or the least finite one. Keys have the order of their floats."""
    bits = tl.where(key >= 0x80000000, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return tl.where(key < 0x00800000, -3.4028234663852886e38, bits.to(tl.float32, bitcast=True))


@triton.jit
def read(row, start, N: tl.constexpr, END: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """Return WIDTH logits of each chunk, from `start` on: float32 [CHUNKS, WIDTH / 4, 4]."""
    lanes = start + tl.arange(0, WIDTH)[None, :]
    at = tl.arange(0, CHUNKS)[:, None] * CHUNK + lanes
    if start + WIDTH <= N - (CHUNKS - 1) * CHUNK:
        x = tl.load(row + at).to(tl.float32)
    else:
        x = tl.load(row + at, mask=(lanes < CHUNK) & (at < END), other=float("-inf"))
        x = tl.where(at < N, x.to(tl.float32), float("-inf"))
    return tl.reshape(x, [CHUNKS, WIDTH // 4, 4])


@triton.jit
def held(
    row, best, scale, least,
    N: tl.constexpr, END: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return what those of each chunk weigh that are not below `least`: float64 [CHUNKS].

    Without a scale each weighs 1.
    """
    total = tl.zeros([CHUNKS, WIDTH // 4], tl.float64)
    for start in range(0, CHUNK, WIDTH):
        x = read(row, start, N, END, CHUNK, WIDTH)
        weight = 1.0 if scale is None else tl.exp2((x - best) * scale)
        total += tl.sum(tl.where(x >= least, weight, 0.0), 2).to(tl.float64)
    return tl.sum(total, 1)


@triton.jit
def edge_of_all(
    row, best, scale, kept, wanted, BITS: tl.constexpr,
    N: tl.constexpr, END: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the largest number from which on a row holds `wanted`; `kept` if that is larger."""
    key = tl.full([], 0, tl.uint32)
    for bit in range(BITS):
        trial = key | (1 << (31 - bit))
        least = tl.maximum(number(trial), kept)
        enough = tl.sum(held(row, best, scale, least, N, END, CHUNK, WIDTH), 0) >= wanted
        key = tl.where(enough, trial, key)
    return tl.maximum(number(key), kept)


@triton.jit
def edge(x, weight, wanted, BITS: tl.constexpr):
    """Return the largest number from which on x, in registers, holds `wanted`."""
    key = tl.full([], 0, tl.uint32)
    for bit in range(BITS):
        trial = key | (1 << (31 - bit))
        enough = tl.sum(tl.where(x >= number(trial), weight, 0)) >= wanted
        key = tl.where(enough, trial, key)
    return number(key)


@triton.jit
def lane(weight, target, SIZE: tl.constexpr):
    """Return the lane at which the running sum of the weights passes the target: float64."""
    lanes = tl.arange(0, SIZE)
    # rounding may keep the whole sum below the target
    last = tl.max(tl.where(weight > 0, lanes, 0), 0)
    passed = (tl.cumsum(weight, 0) > target) & (weight > 0)
    return tl.min(tl.where(passed, lanes, last), 0)


@triton.jit
def draw_kernel(
    logits, settings, found, ids, STRIDE: tl.constexpr, BITS: tl.constexpr, ROOM: tl.constexpr,
    N: tl.constexpr, END: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row, settings, found = logits + program * STRIDE, settings + program * 5, found + program * ROOM
    chunks = tl.arange(0, CHUNKS)
    fours = chunks[:, None] * CHUNK + tl.arange(0, WIDTH // 4)[None, :] * 4
    most = tl.full([CHUNKS, WIDTH // 4], float("-inf"), tl.float32)
    where = fours
    for start in range(0, CHUNK, WIDTH):
        x = tl.max(read(row, start, N, END, CHUNK, WIDTH), 2)
        where = tl.where(x > most, fours + start, where)
        most = tl.maximum(most, x)
    best = tl.max(most)
    temperature = tl.load(settings).to(tl.float64, bitcast=True).to(tl.float32)
    if temperature == 0:
        at = tl.min(tl.where(most == best, where, N - 1)) + tl.arange(0, 4)
        x = tl.load(row + at, mask=at < N, other=float("-inf")).to(tl.float32)
        lowest = tl.min(tl.where((x == best) & (at < N), at, N - 1), 0)
        tl.store(ids + program, lowest.to(tl.int64))
        return
    top_p = tl.load(settings + 1).to(tl.float64, bitcast=True)
    top_k = tl.load(settings + 2)
    u = uniform(tl.load(settings + 3), tl.load(settings + 4))
    scale = 1.4426950408889634 / temperature  # logits as exponents of 2
    least = number(tl.full([], 0, tl.uint32))
    if (top_k < N) | (top_p < 1):
        # the k-th of the parts' largest logits: k or more logits are not below it
        bound = edge(most, 1, tl.where(top_k < N, top_k, ROOM // 2), BITS)
        counts = tl.zeros([CHUNKS, WIDTH // 4], tl.int32)
        for start in range(0, CHUNK, WIDTH):
            x = tl.max(read(row, start, N, END, CHUNK, WIDTH), 2)
            counts += (x >= bound).to(tl.int32)
        counts = tl.sum(counts, 1)
        n = tl.sum(counts, 0)
        if n <= ROOM:
            before = tl.cumsum(counts, 0) - counts
            for start in range(0, CHUNK, WIDTH):
                x = tl.max(read(row, start, N, END, CHUNK, WIDTH), 2)
                taken = (x >= bound).to(tl.int32)
                place = before[:, None] + tl.cumsum(taken, 1) - 1
                tl.store(found + place, fours + start, mask=x >= bound)
                before += tl.sum(taken, 1)
            tl.debug_barrier()
            lanes = tl.arange(0, ROOM * 4)
            at = tl.load(found + lanes // 4, mask=lanes // 4 < n, other=N) + lanes % 4
            x = tl.load(row + at, mask=at < N, other=float("-inf")).to(tl.float32)
            if top_k < N:
                bound = edge(x, 1, top_k, BITS)
            weight = tl.where(x >= bound, tl.exp2((x - best) * scale), 0.0).to(tl.float64)
            total = tl.sum(weight, 0)
            wanted = total * top_p
            if top_k >= N:  # the sum over the whole row
                wanted = tl.sum(held(row, best, scale, least, N, END, CHUNK, WIDTH), 0) * top_p
            if total >= wanted:
                if top_p < 1:
                    weight = tl.where(x >= edge(x, weight, wanted, BITS), weight, 0.0)
                place = lane(weight, u * tl.sum(weight, 0), ROOM * 4)
                id_ = tl.load(found + place // 4, mask=place // 4 < n, other=0) + place % 4
                tl.store(ids + program, id_.to(tl.int64))
                return
    if top_k < N:
        wanted = top_k.to(tl.float64)
        least = edge_of_all(row, best, None, least, wanted, BITS, N, END, CHUNK, WIDTH)
    if top_p < 1:
        wanted = tl.sum(held(row, best, scale, least, N, END, CHUNK, WIDTH), 0) * top_p
        least = edge_of_all(row, best, scale, least, wanted, BITS, N, END, CHUNK, WIDTH)
    masses = held(row, best, scale, least, N, END, CHUNK, WIDTH)
    target = u * tl.sum(masses, 0)
    # the chunk in which the running sum passes the target, and the sum before it
    before = tl.cumsum(masses, 0) - masses
    chosen = tl.max(tl.where((before <= target) & (masses > 0), chunks, 0), 0)
    target -= tl.sum(tl.where(chunks == chosen, before, 0.0), 0)
    lanes = tl.arange(0, SPAN)
    at = chosen * CHUNK + lanes
    x = tl.load(row + at, mask=(lanes < CHUNK) & (at < N), other=float("-inf")).to(tl.float32)
    weight = tl.where(x >= least, tl.exp2((x - best) * scale), 0.0).to(tl.float64)
    tl.store(ids + program, (chosen * CHUNK + lane(weight, target, SPAN)).to(tl.int64))


def constants(logits: Tensor, n_vocab: int) -> dict[str, int]:
    """Return what the kernel is compiled for."""
    chunk = triton.cdiv(n_vocab, 8 * CHUNKS.value) * 8
    return {
        "STRIDE": logits.stride(0),
        "BITS": 16 if logits.dtype == torch.bfloat16 else 32,  # the others are alike in each logit
        "ROOM": ROOM,
        "N": n_vocab,
        "END": min(triton.cdiv(n_vocab, 8) * 8, logits.shape[1]),  # eight are read at once
        "CHUNK": chunk,
        "WIDTH": TILE // CHUNKS.value,
        "SPAN": triton.next_power_of_2(chunk),
        "num_warps": WARPS,
        "maxnreg": 128,  # registers of a thread, so that two programs share a multiprocessor
    }


def draw(logits: Tensor, settings: Tensor, n_vocab: int, ids: Tensor) -> None:
    """Put an id below n_vocab for each row of logits, [N, V], at the beginning of ids: int64.

    settings: int64 [N × 5], of each row temperature and top_p, which are float64 by their bits,
    top_k, seed and index; n_vocab for no top_k, 1 for no top_p.
    """
    found = torch.empty(len(logits), ROOM, dtype=torch.int32, device=logits.device)
    draw_kernel[(len(logits),)](logits, settings, found, ids, **constants(logits, n_vocab))
