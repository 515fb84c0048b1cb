"""The engine: one forward pass over the tokens of all rows, attention per row against its own KV cache.

Knows tensors; knows neither the policy nor the clock. An `Iteration` comes in as integers, becomes a flat
list of tokens with a position and a cache slot each, and one id per sampled row goes out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from generate.sampling import sample
from inference import Inference, Iteration, Row, Sampling
from model import GPT2, KVCache


@dataclass(frozen=True, slots=True)
class _Span:
    """Where a row's tokens lie: queries in the flat list, keys and values in the cache."""

    first: int
    end: int
    live: slice | Tensor | None  # slots of all tokens up to the last query; None: the row has no blocks any more
    mask: Tensor | None  # which live tokens each query sees, for a chunk that is not the first; bool [T, L]


class CachedGenerator:
    def __init__(self, model: GPT2, n_vocab: int, n_blocks: int, block_size: int):
        weight = model.wte.weight
        self._model = model
        self._n_vocab = n_vocab
        self._device = weight.device
        self._cache = KVCache(model.shape, n_blocks, block_size, weight.dtype, str(weight.device))

    def generate(self, iteration: Iteration) -> list[int]:
        rows = [row for row in iteration.rows if row.samples]
        logits = self.logits(iteration.rows)
        draws = [(row.inference.sampling, len(row.inference.tokens)) for row in rows]
        return sample(logits, draws, self._n_vocab) if rows else []

    @torch.inference_mode()
    def logits(self, rows: list[Row]) -> Tensor:
        """Compute the rows' tokens into the cache; return the logits after each row that samples: [N, V]."""
        ids: list[int] = []
        positions: list[int] = []
        stored: list[int] = []  # indices into the flat list of the tokens that have a slot
        slots: list[int] = []
        samples: list[int] = []
        spans: list[_Span] = []
        for row in rows:
            first, end = len(ids), row.start + row.n_tokens
            ids += [row.inference.token(position) for position in range(row.start, end)]
            positions += range(row.start, end)
            if row.blocks:
                stored += range(first, len(ids))
                slots += self._cache.slots(row.blocks, row.start, end)
            spans.append(_Span(first, len(ids), self._live(row, end), self._mask(row, end)))
            if row.samples:
                samples.append(len(ids) - 1)
        write_to = self._tensor(slots)
        write_from = None if len(stored) == len(ids) else self._tensor(stored)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if write_from is None:
                self._cache.write(layer, write_to, k, v)
            else:
                self._cache.write(layer, write_to, k[write_from], v[write_from])
            q, v = q.transpose(0, 1)[None], v.transpose(0, 1)[None]  # [1, H, T, D]
            answers = []
            for span in spans:
                queries = q[:, :, span.first : span.end]
                if span.live is None:  # an idle row whose cache was given back attends to itself alone
                    answers.append(v[:, :, span.first : span.end])
                    continue
                keys, values = self._cache.read(layer, span.live)
                causal = span.mask is None and span.end - span.first > 1
                answers.append(F.scaled_dot_product_attention(queries, keys, values, span.mask, is_causal=causal))
            return torch.cat(answers, 2)[0].transpose(0, 1)  # [T, H, D]

        return self._model(self._tensor(ids), self._tensor(positions), attend, self._tensor(samples))

    def _live(self, row: Row, end: int) -> slice | Tensor | None:
        blocks, size = row.blocks, self._cache.block_size
        if not blocks:
            return None
        used = -(-end // size)
        if blocks[used - 1] - blocks[0] == used - 1:  # consecutive (they come in ascending order): no gathering
            return slice(blocks[0] * size, blocks[0] * size + end)
        return self._tensor(self._cache.slots(blocks, 0, end))

    def _mask(self, row: Row, end: int) -> Tensor | None:
        if row.n_tokens == 1 or row.start == 0:
            return None
        queries = torch.arange(row.start, end, device=self._device)[:, None]
        return torch.arange(end, device=self._device)[None] <= queries

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def warm_up(self, max_batch_size: int, prompt_tokens: int) -> None:
        """Run what serving will run once, so that the first request does not pay for it.

        The rows have no blocks and so leave the cache alone, but for one prompt and one token in block 0, which
        nobody owns yet.
        """
        blocks = list(range(-(-(prompt_tokens + 1) // self._cache.block_size)))
        prompt = Inference([0] * prompt_tokens, 1, Sampling(temperature=1.0), tokens=[0])
        prefill = Row(prompt, 0, prompt_tokens, blocks, samples=True, idle=False)
        decode = Row(prompt, prompt_tokens, 1, blocks, samples=True, idle=False)
        idle = Row(prompt, 0, 1, [], samples=True, idle=True)
        for rows in ([prefill], [decode], [idle] * max_batch_size):
            self.generate(Iteration(rows, running=len(rows), waiting=0, blocks_used=0))
