"""The oracle: no KV cache, no batching; the whole sequence is computed again for every token.

What the engine must agree with, and the measured cost of having no cache. Rows run one by one.
"""

from __future__ import annotations

import torch

from generate import memory_for
from generate.sampling import sample
from model import GPT2, causal_attention
from scheduling.inference import Generator, Inference, Iteration


class NaiveGenerator(Generator):
    def __init__(self, model: GPT2, n_vocab: int):
        self._model = model
        self._n_vocab = n_vocab

    @torch.inference_mode()
    def generate(self, iteration: Iteration) -> list[int]:
        """Return an id for each row that samples; a prompt's chunk that does not costs nothing."""
        rows = [row for row in iteration.rows if row.samples]
        with memory_for(f"an iteration of {len(rows)} rows"):
            logits = [self.logits(row.inference, row.start + row.n_tokens) for row in rows]
            draws = [(row.inference.sampling, len(row.inference.tokens)) for row in rows]
            return sample(torch.cat(logits), draws, self._n_vocab) if rows else []

    def logits(self, inference: Inference, length: int) -> torch.Tensor:
        """The logits after the first `length` tokens of prompt + completion: [1, V]."""
        device = self._model.wte.weight.device
        ids = torch.tensor([inference.token(position) for position in range(length)], device=device)
        positions = torch.arange(length, device=device)
        return self._model(ids, positions, causal_attention, positions[-1:])
