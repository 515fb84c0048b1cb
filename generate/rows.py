"""The rows of an iteration as arrays: their tokens in one list, and tables of their KV blocks."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from itertools import accumulate, compress
from operator import ne
from typing import Any, NamedTuple

import numpy as np
import torch

from generate.buffers import pinned
from scheduling.inference import Inference, Row


class Tokens(NamedTuple):
    """All tokens of the rows. samples: indices of those whose logits are wanted. counts, blocks: of
    each row. sampled: the inferences of rows that sample.
    """

    ids: array[int]
    positions: array[int]
    samples: array[int]
    counts: tuple[int, ...]
    blocks: tuple[list[int], ...]
    sampled: Sequence[Inference]


def flat(rows: Sequence[Row], every: bool = False) -> Tokens:
    """Return the tokens of rows, of one at least. Logits are wanted of `every` token, or of the
    last of each row that samples, and of those before its drafts.
    """
    columns: Any = zip(*rows)
    inferences, starts, counts, blocks, sampling, _, _, drafts = columns
    ids = [  # `token` as an expression, which is faster
        i.prompt_ids[at] if (n := at - len(i.prompt_ids)) < 0 else i.tokens[n]
        for i, at in zip(inferences, starts)
    ]
    positions = [*starts]
    lasts: Sequence[int] = range(len(rows))
    if sum(counts) > len(rows):  # insert all but each row's first; few rows have more
        lasts = [end - 1 for end in accumulate(counts)]
        for i in reversed([i for i, n in enumerate(counts) if n > 1]):
            start, end = starts[i] + 1, starts[i] + counts[i]
            positions[i + 1 : i + 1] = range(start, end)
            ids[i + 1 : i + 1] = [*_known(inferences[i], start, end - len(drafts[i])), *drafts[i]]
    sampled = inferences if (whole := all(sampling)) else [*compress(inferences, sampling)]
    if every or (whole and len(ids) == len(rows)):
        samples = _numbers(len(ids))
    elif any(drafts):
        each = zip(lasts, drafts, sampling)
        samples = array("q", [i for at, d, s in each for i in range(at - len(d), at + s)])
    else:
        samples = array("q", compress(lasts, sampling))
    return Tokens(array("q", ids), array("q", positions), samples, counts, blocks, sampled)


@functools.lru_cache(16)
def _numbers(n: int) -> array[int]:
    """0 … n − 1, which nothing changes: most iterations have as many tokens as the one before."""
    return array("q", range(n))


def _known(inference: Inference, start: int, end: int) -> list[int]:
    """Return the ids at positions start … end − 1 of prompt + completion."""
    n = len(inference.prompt_ids)
    return inference.prompt_ids[start:end] + inference.tokens[max(0, start - n) : max(0, end - n)]


class Tables:
    """KV blocks of rows, on the device. Those of a row have a place there, which they keep from one
    iteration to the next, so that only what changed is sent (vLLM's persistent batch).

    A list's identity tells where its blocks may be. Then they are compared with what was sent, the
    same objects, which takes a nanosecond a block: so nothing depends on who changes a list, or
    how. n_rows: of an iteration at most; longest: blocks of a row.
    """

    def __init__(self, n_rows: int, longest: int, device: torch.device):
        self.tensor = torch.zeros(n_rows * longest, dtype=torch.int32, device=device)
        self._host = np.zeros((n_rows, longest), np.int32)
        self._free = [*reversed(range(n_rows))]  # places, the next one last
        self._most = 0  # rows of an iteration so far
        # by a list's id: what was sent of it, and where that begins in `tensor`; −1: it is empty
        self._sent: dict[int, list[int]] = {}
        self._begins: dict[int, int] = {}
        self._last: tuple[list[int], ...] = ()  # what was sent of each row
        self._result = np.empty(0, np.int32)

    def begins(self, blocks: tuple[list[int], ...]) -> np.ndarray[Any, Any]:
        """Return where in `tensor` the blocks of each row begin: int32 [rows]; −1: it has none."""
        if blocks != self._last:
            keys = [*map(id, blocks)]
            differ = map(ne, map(self._sent.get, keys), blocks)
            if changed := dict(compress(zip(keys, blocks), differ)):
                self._send(changed, keys)
            self._result = np.array([*map(self._begins.__getitem__, keys)], np.int32)
            self._last = tuple(map(self._sent.__getitem__, keys))
        return self._result

    def _send(self, changed: dict[int, list[int]], keys: Sequence[int]) -> None:
        """Write lists to their places, or to new ones, and send these. keys: of all rows."""
        n_rows, longest = self._host.shape
        self._most = max(self._most, len(keys))
        for key in changed:  # to be sent by the next iteration if an error comes in between
            self._sent.pop(key, None)
        # rows that are not in this iteration keep their places for a while
        if len(self._begins) + len(changed) > min(n_rows, 2 * self._most):
            self._forget_all_but({*keys})
        free, begins, written = self._free.copy(), dict.fromkeys(changed, -1), list[int]()
        for key, each in changed.items():
            begin = self._begins.get(key, -1)
            if each:
                place = free.pop() if begin < 0 else begin // longest
                self._host[place, : len(each)] = each
                begins[key] = place * longest
                written.append(place)
            elif begin >= 0:  # it was emptied, or has the id of one that is gone
                free.append(begin // longest)
        if written:
            first, end = min(written), max(written) + 1
            part = torch.from_numpy(self._host[first:end].reshape(-1))
            there = self.tensor[first * longest : end * longest]
            there.copy_(pinned(part, there.device), non_blocking=True)
        self._free = free
        self._begins |= begins
        self._sent |= {key: each.copy() for key, each in changed.items()}

    def _forget_all_but(self, keys: set[int]) -> None:
        n_rows, longest = self._host.shape
        for key in self._begins.keys() - keys:
            del self._begins[key]
            self._sent.pop(key, None)
        taken = {begin // longest for begin in self._begins.values()}
        self._free = [place for place in reversed(range(n_rows)) if place not in taken]
