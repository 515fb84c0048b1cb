"""The oracle of the engine, and the cost of having no KV cache: rows run one by one, and the whole
sequence is computed again for every token.
"""

from __future__ import annotations

import torch

from generate.memory import memory_for
from generate.sampling import sample
from generate.scoring import choose, record
from model import GPT2, causal_attention
from scheduling.inference import Generator, Inference, Iteration, Row


class NaiveGenerator(Generator):
    def __init__(self, model: GPT2, n_vocab: int):
        self._model = model
        self._n_vocab = n_vocab

    @torch.inference_mode()
    def generate(self, iteration: Iteration) -> list[int]:
        """Return an id for each row that samples; other chunks of a prompt cost nothing."""
        rows = [row for row in iteration.rows if row.samples]
        with memory_for(f"an iteration of {len(rows)} rows"):
            logits = [self._last_logits(row) for row in rows]
            if not rows:
                return []
            return choose(torch.cat(logits), rows, self._n_vocab, sample).tolist()

    def _last_logits(self, row: Row) -> torch.Tensor:
        """Return the logits after the row's last token: [1, V]; score its prompt besides."""
        inference, end = row.inference, row.start + row.n_tokens
        scores = inference.scores
        if scores is None or row.idle or scores.next >= end:
            return self.logits(inference, end)
        logits = self.logits(inference, end, scores.next)
        wanted = [(scores, inference.token(position)) for position in range(scores.next, end)]
        record(logits[:-1], wanted, self._n_vocab)
        return logits[-1:]

    def logits(self, inference: Inference, length: int, first: int | None = None) -> torch.Tensor:
        """Return the logits after the first `length` tokens of prompt + completion: [1, V]; or
        after the first `first`, `first` + 1, … `length`: [N, V].
        """
        device = self._model.wte.weight.device
        ids = torch.tensor([inference.token(position) for position in range(length)], device=device)
        positions = torch.arange(length, device=device)
        wanted = positions[(first or length) - 1 :]
        return self._model(ids, positions, causal_attention, wanted)
