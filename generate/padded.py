"""BATON's re-batching (arXiv 2410.18701): no ragged kernel, but rectangles of tokens, of keys and
of values, in which padding stands for what a row is shorter. PyTorch's attention; any device.

    apart       decode rows are a rectangle one token wide, and prompts another, as wide as the
                longest; a prompt's keys and values are then embedded in those of the decode rows
    together    all rows are one rectangle, as wide as the longest: an Orca whose prefills pad

The model computes the flat list of all tokens, padding too; only attention knows of rectangles.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from generate.buffers import to_device
from generate.memory import memory_for
from generate.sampling import Sample
from generate.scoring import ids_after
from model import GPT2, Attend
from scheduling.inference import Generator, Inference, Iteration, Row
from scheduling.padding import rectangles
from scheduling.sampling import Sampling

ROOM = 64  # columns for the tokens to come, in a new rectangle
COMPACT = 0.5


@dataclass(slots=True)
class Placement:
    """An inference's place in a rectangle: column of its first token, and how many it has."""

    number: int
    first: int
    n: int


class Rectangle:
    """Keys and values, a line for each inference: [layers, lines, 2, H, columns, D].

    Lines are aligned on the right, where each iteration appends columns; `live` says which columns
    of a line are its tokens. kept: keys and values of each inference, [layers, 2, H, n, D].
    """

    def __init__(self, model: GPT2, kept: Mapping[Inference, Tensor], room: int):
        shape, weight = model.shape, model.wte.weight
        self.end = max((kv.shape[-2] for kv in kept.values()), default=0)
        size = len(kept), 2, shape.n_head, self.end + room, shape.head_size
        # finite, since attention multiplies what is masked by zero
        self.kv = weight.new_zeros(shape.n_layer, *size)
        self.live = weight.new_zeros(len(kept), self.end + room, dtype=torch.bool)
        self.lines: dict[Inference, Placement] = {}
        self.embed(kept)

    @property
    def first(self) -> int:
        """The first column that any line needs; those before it are cut off."""
        return min((line.first for line in self.lines.values()), default=self.end)

    @property
    def free(self) -> list[int]:
        return [*{*range(len(self.live))} - {line.number for line in self.lines.values()}]

    def embed(self, kept: Mapping[Inference, Tensor]) -> None:
        """Copy keys and values to free lines, so that they end in the last column."""
        for number, (inference, kv) in zip(self.free, kept.items()):
            line = self.lines[inference] = Placement(number, self.end - kv.shape[-2], kv.shape[-2])
            self.kv[:, number, :, :, line.first : self.end] = kv
            self.live[number] = False
            self.live[number, line.first : self.end] = True

    def of(self, inference: Inference) -> Tensor:
        """Return keys and values of an inference: a view, or a copy if padding is among them."""
        line = self.lines[inference]
        kv = self.kv[:, line.number]
        if line.first + line.n == self.end:
            return kv[..., line.first : self.end, :]
        return kv[..., self.live[line.number], :]

    def fits(self, joining: Mapping[Inference, Tensor], width: int, compact: float) -> bool:
        """Return whether there is room for those that join and for `width` columns, and a copy
        would save no more than the share `compact`.
        """
        lengths = [kv.shape[-2] for kv in joining.values()]
        longest = max([*lengths, *(line.n for line in self.lines.values())])
        tight = (len(self.lines) + len(joining)) * longest
        if tight < (1 - compact) * len(self.live) * (self.end - self.first):
            return False
        has_room = self.live.shape[1] - self.end >= width and max(lengths, default=0) <= self.end
        return has_room and len(self.free) >= len(joining)

    def append(self, inferences: Sequence[Inference], n: Sequence[int]) -> Attend:
        """Return attention of n new tokens of each, in columns after the last, to their lines.

        Padding is on their left, and attends to itself alone.
        """
        device, width, first, start = self.live.device, max(n), self.first, self.end
        lines = [self.lines[inference] for inference in inferences]
        self.end = end = start + width
        for line, tokens in zip(lines, n):
            line.first = line.first if line.n else end - tokens
            line.n += tokens
        numbers = to_device(array("q", [line.number for line in lines]), device)
        columns = torch.arange(first, end, device=device)
        at = columns[start - first :, None]  # [T, 1]
        self.live[numbers, start:end] = at[:, 0] >= end - to_device(array("q", n), device)[:, None]
        visible = self.live[:, None, first:end] & (columns <= at) | (columns == at)  # [lines, T, L]
        mask = self.kv.new_zeros(visible.shape).masked_fill_(~visible, -torch.inf)[:, None]

        def attend(layer: int, qkv: Tensor) -> Tensor:
            qkv = qkv.unflatten(0, (len(n), width))  # [rows, T, 3, H, D]
            kv = self.kv[layer]
            kv[numbers, :, :, start:end] = qkv[:, :, 1:].permute(0, 2, 3, 1, 4)
            queries = kv.new_zeros(len(kv), width, *qkv.shape[3:])
            queries[numbers] = qkv[:, :, 0]
            keys, values = kv[:, :, :, first:end].unbind(1)  # 2 × [lines, H, L, D]
            y = F.scaled_dot_product_attention(queries.transpose(1, 2), keys, values, mask)
            return y.transpose(1, 2)[numbers].flatten(0, 1)  # [rows × T, H, D]

        return attend


def flat(
    rows: Sequence[Row], groups: Sequence[Sequence[int]]
) -> tuple[array[int], array[int], list[int]]:
    """Return ids and positions of all tokens, group by group, with padding on the left of rows that
    are shorter than the longest of their group; and the index at which each row ends.
    """
    ids, positions, ends = array("q"), array("q"), [0] * len(rows)
    for group in groups:
        width = max(rows[i].n_tokens for i in group)
        for i in group:
            start, n = rows[i].start, rows[i].n_tokens
            padding, span = [0] * (width - n), range(start, start + n)
            ids.extend(padding + [rows[i].inference.token(position) for position in span])
            positions.extend([*padding, *span])
            ends[i] = len(ids)
    return ids, positions, ends


class PaddedGenerator(Generator):
    """The model with keys and values in rectangles. padded: see scheduling.padding. compact: of
    keys and values, the share that a copy to a tight rectangle must save.
    """

    def __init__(
        self, model: GPT2, n_vocab: int, sample: Sample, padded: str, compact: float = COMPACT
    ):
        self._model, self._n_vocab, self._sample = model, n_vocab, sample
        self._padded, self._compact = padded, compact
        self._running = self._prompts = Rectangle(model, {}, 0)
        self._kept: dict[Inference, Tensor] = {}  # the keys and values of prompts without a line

    def generate(self, iteration: Iteration) -> list[int]:
        """Return the ids of rows that sample. Raises OutOfMemory."""
        rows = iteration.rows
        with memory_for(f"an iteration of {len(rows)} rows"):
            return ids_after(rows, self.logits, self._n_vocab, self._sample).tolist()

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row], every: bool = False) -> Tensor:
        """Compute the rows' tokens; return the logits, [N, V], after rows that sample, or after
        every token.
        """
        # rows that are over, and those without a request, have no keys and values of their own
        own = [
            row.inference if row.blocks and not row.idle else Inference([], 0, is_over=True)
            for row in rows
        ]
        self._forget({inference: row.start for inference, row in zip(own, rows)})
        groups, parts, sizes = rectangles(rows, self._padded), list[Attend](), list[int]()
        for group in groups:
            inferences, n = [own[i] for i in group], [rows[i].n_tokens for i in group]
            runs = self._padded == "together" or rows[group[0]].decodes
            rectangle = self._place(inferences, max(n), runs)
            for inference, i in zip(inferences, group):
                are_there = rectangle.lines[inference].n == rows[i].start
                assert are_there or inference.is_over, "keys and values of a row are missing"
            parts.append(rectangle.append(inferences, n))
            sizes.append(len(n) * max(n))

        def attend(layer: int, qkv: Tensor) -> Tensor:
            return torch.cat([part(layer, x) for part, x in zip(parts, qkv.split(sizes))])

        ids, positions, ends = flat(rows, groups)
        wanted = [row.n_tokens if every else int(row.samples) for row in rows]
        samples = [at for end, n in zip(ends, wanted) for at in range(end - n, end)]
        device = self._model.wte.weight.device
        at = torch.tensor(samples, dtype=torch.int64, device=device)
        return self._model(to_device(ids, device), to_device(positions, device), attend, at)

    def _forget(self, starts: Mapping[Inference, int]) -> None:
        """Drop what is over, preempted, or computed again from its first token. starts: of rows."""
        for places in (self._running.lines, self._prompts.lines, self._kept):
            for each in [*places]:
                if not starts.get(each, bool(each.blocks) and not each.is_over):
                    del places[each]
        self._kept |= {each: self._prompts.of(each) for each in self._prompts.lines}
        self._prompts = Rectangle(self._model, {}, 0)

    def _place(self, inferences: Sequence[Inference], width: int, runs: bool) -> Rectangle:
        """Return the rectangle with a line for each inference, and room for `width` columns: the
        running one, or one of prompts alone.
        """
        shape, old = self._model.shape, self._running
        none = old.kv.new_zeros(shape.n_layer, 2, shape.n_head, 0, shape.head_size)
        joining = [each for each in inferences if not runs or each not in old.lines]
        kept = {each: self._kept.pop(each, none) for each in joining}
        if not runs:
            self._prompts = Rectangle(self._model, kept, width)
            return self._prompts
        if old.fits(kept, width, self._compact):
            old.embed(kept)
        else:
            lines = {each: old.of(each) for each in old.lines}
            self._running = Rectangle(self._model, lines | kept, max(width, ROOM))
        return self._running

    def warm_up(self, max_batch_size: int, prompt_tokens: int) -> None:
        """Run a prompt, and as many rows as there may be, so that no request pays for it."""
        sampling = Sampling(temperature=1.0, top_k=50, top_p=0.9)
        prompt = Inference([0] * prompt_tokens, 1, sampling)
        for rows in (
            [Row(prompt, 0, prompt_tokens, [], samples=True, idle=False)],
            [Row(prompt, 0, 1, [], samples=True, idle=True)] * max_batch_size,
        ):
            self.generate(Iteration(rows, running=len(rows), waiting=0, blocks_used=0))
