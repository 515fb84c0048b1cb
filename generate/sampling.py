"""From logits to ids.

    sample            PyTorch's operations; any device
    sample_on_cpu     kernels/sampling.cpp: without sorting for top-p; 10 to 30 times faster
    sample_on_gpu     kernels/draw.py: one launch, without sorting
    penalized         the logits from which each chooses
    uniforms          the random numbers, which both kernels compute themselves

A draw depends on (request seed, token index) and on the row's own logits alone. Sums that could
depend on the batch's shape are taken in blocks with float64 partials: a float32 running sum over
50,257 entries flips about one draw in a thousand.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from generate import kernels
from generate.buffers import to_device
from scheduling.inference import Inference, Row
from scheduling.sampling import Sampling

Draws = Sequence[tuple[Sampling, int]]  # for each row, with its token's index in the completion
Sample = Callable[[Tensor, Draws, int], Tensor]
BLOCK = 256
ALL = 2.0  # a top_p that no sum of probabilities reaches
MIN_TEMPERATURE = 1e-6  # below it float32 quotients are greedy but for exact ties
# a row as the kernels take it: temperature (0: greedy), top_p, top_k, seed, index
SETTINGS = struct.Struct("ddqQq")
GAMMA = 0x9E3779B97F4A7C15  # the golden ratio's fraction, of 64 bits


def sample(logits: Tensor, draws: Draws, n_vocab: int) -> Tensor:
    """Return an id below `n_vocab` for each row: int64 [N], on the device of the logits.

    logits: [N, V], V ≥ n_vocab: ids that the tokenizer could not decode are left out. temperature 0
    takes the largest logit, the lowest id of equals.
    """
    logits, device = logits[:, :n_vocab], logits.device
    ids = logits.argmax(-1)
    rows = [i for i, (sampling, _) in enumerate(draws) if sampling.temperature > 0]
    if rows:
        chosen = [draws[i] for i in rows]
        at = to_device(array("q", rows), device)
        temperature = to_device(
            array("f", [max(s.temperature, MIN_TEMPERATURE) for s, _ in chosen]), device
        )
        # largest first at 0, so that no temperature, however small, overflows
        scaled = logits[at].float()
        scaled = (scaled - scaled.amax(-1, keepdim=True)) / temperature[:, None]  # [R, V]
        cut = [i for i, (s, _) in enumerate(chosen) if (s.top_k, s.top_p) != (None, None)]
        if cut:
            limits = [(chosen[i][0].top_k or n_vocab, chosen[i][0].top_p or 1) for i in cut]
            top_k = array("q", [min(k, n_vocab) for k, _ in limits])
            top_p = array("d", [ALL if p == 1 else p for _, p in limits])
            which = to_device(array("q", cut), device)
            kept = scaled[which]
            if min(top_k) < n_vocab:
                kept = _largest(kept, to_device(top_k, device), max(top_k))
            if min(top_p) < ALL:
                kept = _nucleus(kept, to_device(top_p, device))
            scaled[which] = kept
        u = to_device(uniforms(chosen), device)
        ids[at] = _invert(scaled.softmax(-1), u)
    return ids


def sample_on_cpu(logits: Tensor, draws: Draws, n_vocab: int) -> Tensor:
    """`sample` in C++; a draw that lands within rounding of an id's edge may differ.

    logits: [N, V] on the CPU. Raises kernels.KernelUnavailable where the kernel cannot be loaded.
    """
    kernel = kernels.function("sample", logits.dtype)
    ids = array("q", bytes(8 * len(draws)))
    size = logits.stride(0), len(draws), n_vocab
    at, settings = ids.buffer_info()[0], _packed(draws, n_vocab)
    kernel(logits.data_ptr(), *size, settings, at, torch.get_num_threads())
    return torch.frombuffer(ids, dtype=torch.int64)


def sample_on_gpu(logits: Tensor, draws: Draws, n_vocab: int) -> Tensor:
    """`sample` in Triton; a draw that lands within rounding of an id's edge may differ."""
    ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    settings = to_device(array("q", _packed(draws, n_vocab)), logits.device)
    _draw_into(ids, logits, settings, n_vocab)
    return ids


def _draw_into(ids: Tensor, logits: Tensor, settings: Tensor, n_vocab: int) -> None:
    """Put an id for each row of logits at the beginning of ids: int64. settings: SETTINGS."""
    from generate.kernels.draw import draw

    if len(logits):
        draw(logits, settings, n_vocab, ids)


def _packed(draws: Draws, n_vocab: int) -> bytes:
    rows = [
        (
            s.temperature and max(s.temperature, MIN_TEMPERATURE),
            s.top_p or 1.0,
            s.top_k or n_vocab,
            s.seed,
            index,
        )
        for s, index in draws
    ]
    return b"".join([SETTINGS.pack(*row) for row in rows])


class PassSampler:
    """`sample_on_gpu` as a part of the pass: what it is told of each row is sent with the tokens.
    A request's part of it changes in the index alone. ids: int64, where it puts the ids.
    """

    def __init__(self, n_vocab: int, ids: Tensor):
        self.ids, self._n_vocab = ids, n_vocab
        self._inferences: Sequence[Inference] = ()  # the requests of the last rows
        self._rows = dict[Inference, bytes]()  # what was sent of each
        self._packed = np.zeros((0, 5), np.int64)

    def settings(self, inferences: Sequence[Inference], n: int) -> NDArray[np.int64]:
        """Return SETTINGS of inferences, as if none had drafts, and zeros up to n rows: [5 n]."""
        if inferences != self._inferences:
            rows, n_vocab = self._rows, self._n_vocab
            packed = [rows.get(i) or _packed([(i.sampling, 0)], n_vocab) for i in inferences]
            self._packed = np.frombuffer(b"".join(packed), np.int64).reshape(-1, 5)
            self._rows, self._inferences = dict(zip(inferences, packed)), inferences
        settings = np.zeros((n, 5), np.int64)
        settings[: len(inferences)] = self._packed
        settings[: len(inferences), 4] = [len(each.tokens) for each in inferences]
        return settings.reshape(-1)

    def draw(self, logits: Tensor, settings: Tensor) -> None:
        _draw_into(self.ids, logits, settings, self._n_vocab)


def by_logits_alone(rows: Sequence[Row]) -> bool:
    """Return whether nothing but its logits chooses the id of a row, as a pass that draws does."""
    return not any(
        row.drafts or (own := row.inference).scores is not None or own.sampling.penalizes
        for row in rows
    )


def penalized(logits: Tensor, places: Sequence[tuple[Inference, Sequence[int]]]) -> Tensor:
    """Return the logits from which ids are chosen: [N, V], the same tensor if no row's change.

    places: the inference of each, and the drafts after which it is.

    OpenAI's formula: a token that the completion has n times loses presence_penalty + n ×
    frequency_penalty; ids that may not come yet lose all. float32 logits are changed in place.
    """
    if not any(inference.sampling.penalizes for inference, _ in places):
        return logits
    rows, ids, lost = array("q"), array("q"), array("f")
    for row, (inference, drafts) in enumerate(places):
        if not (how := inference.sampling).penalizes:
            continue
        tokens = [*inference.tokens, *drafts]
        if how.presence_penalty or how.frequency_penalty:
            for id_, n in Counter(tokens).items():
                ids.append(id_)
                lost.append(how.presence_penalty + n * how.frequency_penalty)
        if len(tokens) < how.min_tokens:
            ids.extend(how.stop_ids)
            lost.extend([math.inf] * len(how.stop_ids))
        rows.extend([row] * (len(ids) - len(rows)))
    if rows:
        device = logits.device
        with torch.inference_mode():
            logits = logits.float()
            logits[to_device(rows, device), to_device(ids, device)] -= to_device(lost, device)
    return logits


def uniforms(draws: Draws) -> array[float]:
    """Return for each a number in [0, 1) that depends on the seed and the token's index alone.

    SplitMix64 (Steele et al. 2014, "Fast Splittable Pseudorandom Number Generators"), whose numbers
    can be computed in any order: a request's begin at its seed's first one. The upper 53 bits of
    each make a float64, the same in C++ and in Triton.
    """
    seeds = np.array([sampling.seed for sampling, _ in draws], np.uint64)
    places = np.array([index + 1 for _, index in draws], np.uint64)
    bits = _mixed(_mixed(seeds + GAMMA) + places * GAMMA)
    return array("d", ((bits >> 11) / 2**53).tobytes())


def _mixed(z: NDArray[Any]) -> NDArray[Any]:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


def _largest(logits: Tensor, top_k: Tensor, most: int) -> Tensor:
    """Mask each row of [R, V] to its top_k largest: int64 [R], from 1 to `most`, at most V.

    Here and below equals of the last one kept are kept too, so that the result does not depend on
    the order of a sort.
    """
    values = logits.topk(most).values
    return logits.masked_fill(logits < values.gather(-1, top_k[:, None] - 1), -torch.inf)


def _nucleus(logits: Tensor, top_p: Tensor) -> Tensor:
    """Mask each row of [R, V] to the fewest that hold top_p of the probability.

    Holtzman et al. 2020, section 3.1. top_p: float64 [R].
    """
    largest = logits.sort(-1, descending=True).values
    below = largest.double().softmax(-1).cumsum(-1) < top_p[:, None]
    # rounding may keep the sum below a top_p of almost 1
    last = below.sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    return logits.masked_fill(logits < largest.gather(-1, last), -torch.inf)


def _invert(probabilities: Tensor, u: Tensor) -> Tensor:
    """Return the id at which each row's cumulative distribution passes u: [R, V], [R] -> [R]."""
    n_rows, n_vocab = probabilities.shape
    # [R, V / 256, 256]
    blocks = F.pad(probabilities, (0, -n_vocab % BLOCK)).view(n_rows, -1, BLOCK).double()
    ends = blocks.sum(-1).cumsum(-1)  # [R, V / 256]
    target = u * ends[:, -1]  # float32 probabilities need not add up to 1
    block = torch.searchsorted(ends, target[:, None], right=True)[:, 0].clamp(max=ends.shape[1] - 1)
    row = torch.arange(n_rows, device=u.device)
    before = torch.where(block > 0, ends[row, block - 1], 0.0)
    inside = blocks[row, block].cumsum(-1)  # [R, 256]
    offset = torch.searchsorted(inside, (target - before)[:, None], right=True)[:, 0]
    # rounding may carry the target past the last id that has any probability: step back to it
    last = BLOCK - 1 - (blocks[row, block].flip(-1) > 0).int().argmax(-1)
    # the clamp holds also where the logits are no numbers
    return (block * BLOCK + torch.minimum(offset, last)).clamp(max=n_vocab - 1)
