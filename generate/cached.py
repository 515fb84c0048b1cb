"""The engine: one forward pass over the tokens of all rows, attention per row against its own KV cache.

Knows tensors; knows neither the policy nor the clock. An `Iteration` comes in as integers, becomes a flat
list of tokens with a position each, and one id per sampled row goes out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from generate.attention import Attention
from generate.sampling import Sample
from inference import Inference, Iteration, Row, Sampling
from model import GPT2


class CachedGenerator:
    def __init__(self, model: GPT2, n_vocab: int, attention: Attention, sample: Sample):
        self.model = model
        self._n_vocab = n_vocab
        self.attention = attention
        self.sample = sample
        self._device = model.wte.weight.device

    def generate(self, iteration: Iteration) -> list[int]:
        rows = [row for row in iteration.rows if row.samples]
        logits = self.logits(iteration.rows)
        draws = [(row.inference.sampling, len(row.inference.tokens)) for row in rows]
        return self.sample(logits, draws, self._n_vocab) if rows else []

    @torch.inference_mode()
    def logits(self, rows: list[Row]) -> Tensor:
        """Compute the rows' tokens into the cache; return the logits after each row that samples: [N, V]."""
        ids: list[int] = []
        positions: list[int] = []
        samples: list[int] = []
        for row in rows:
            span = range(row.start, row.start + row.n_tokens)
            ids += [row.inference.token(position) for position in span]
            positions += span
            if row.samples:
                samples.append(len(ids) - 1)
        attend = self.attention.prepare(rows)
        return self.model(self._tensor(ids), self._tensor(positions), attend, self._tensor(samples))

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def warm_up(self, max_batch_size: int, prompt_tokens: int, block_size: int) -> None:
        """Run what serving will run once, so that the first request does not pay for it.

        The rows have no blocks and so leave the cache alone, but for one prompt and one token in the first blocks,
        which nobody owns yet.
        """
        blocks = list(range(-(-(prompt_tokens + 1) // block_size)))
        prompt = Inference([0] * prompt_tokens, 1, Sampling(temperature=1.0), tokens=[0])
        prefill = Row(prompt, 0, prompt_tokens, blocks, samples=True, idle=False)
        decode = Row(prompt, prompt_tokens, 1, blocks, samples=True, idle=False)
        idle = Row(prompt, 0, 1, [], samples=True, idle=True)
        for rows in ([prefill], [decode], [idle] * max_batch_size):
            self.generate(Iteration(rows, running=len(rows), waiting=0, blocks_used=0))
