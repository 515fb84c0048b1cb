"""The engine: one forward pass over the tokens of all rows, attention per row over its own cache.

Knows tensors; knows neither the policy nor the clock. An `Iteration` of integers becomes a flat
list of tokens with a position each, and one id is returned for each row that samples.

On a GPU a forward pass is captured once for each decoder batch size (generate/graphs.py): it reads
its input from buffers that stay where they are, so that only their content changes.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from generate.attention import Attention
from generate.buffers import ALIGNED, Buffer, SampledIds, reader
from generate.memory import memory_for
from generate.rows import flat
from generate.sampling import SETTINGS, PassSampler, Sample, by_logits_alone, sample_on_gpu
from generate.scoring import ids_after
from model import GPT2
from scheduling.inference import Generator, Inference, Iteration, Row
from scheduling.sampling import Sampling

Pass = Callable[[], Tensor]  # a forward pass over what the buffers hold, to logits
# a row without a request: it has no blocks and attends to itself alone
PADDING = Row(Inference([0], 1), 0, 1, [], samples=False, idle=True)


class CachedGenerator(Generator):
    """The model with a KV cache.

    `max_tokens`: of an iteration at most. `sampled`: of an engine that launches iterations before
    the host knows the ids of the one before. `one_call` computes the logits of rows instead of the
    model's modules.
    """

    def __init__(
        self,
        model: GPT2,
        n_vocab: int,
        attention: Attention,
        sample: Sample,
        max_tokens: int,
        sampled: SampledIds | None = None,
    ):
        self.model = model
        self.one_call: Callable[[list[Row], bool], Tensor] | None = None
        self._n_vocab = n_vocab
        self.attention = attention
        self.sample = sample
        # for each token an id, a position and a sample of 8 bytes, and what the sampler is told
        n_bytes = (3 * 8 + SETTINGS.size + attention.put_bytes) * max_tokens + 3 * ALIGNED
        self._inputs = Buffer(n_bytes, device := model.wte.weight.device)
        self._sampled = sampled
        self._in_pass: PassSampler | None = None
        if sample is sample_on_gpu:
            self._in_pass = PassSampler(n_vocab, (sampled or SampledIds(max_tokens, device)).ids)
        self._captured: dict[int, Pass] = {}
        self._sizes: list[int] = []  # tokens of the captured passes, ascending

    def generate(self, iteration: Iteration) -> list[int]:
        """Return the ids of rows that sample. Raises OutOfMemory."""
        return self.ids(iteration).tolist()

    def launch(self, iteration: Iteration) -> Callable[[], list[int]]:
        """Begin to compute an iteration; return a call that waits for its ids. Ids below 0 are
        those that the last one sampled. Raises OutOfMemory.
        """
        assert self._sampled is not None, "an engine that launches has a place for its ids"
        ids = self.ids(iteration)
        with memory_for(f"an iteration of {len(iteration.rows)} rows"):
            self._sampled.keep(ids)
            return reader(ids)

    def ids(self, iteration: Iteration) -> Tensor:
        """Return the ids of rows that sample, on the device: int64 [N]. Raises OutOfMemory."""
        rows, padding = iteration.rows, iteration.padding
        with memory_for(f"an iteration of {len(rows)} rows"):
            if self._in_pass and by_logits_alone(rows):
                return self._in_pass.ids[: len(self.logits(rows, padding))]
            return ids_after(
                rows,
                lambda part, every: self.logits(part, 0 if every else padding, every),
                self._n_vocab,
                self.sample,
            )

    def logits(self, rows: Sequence[Row], padding: int = 0, every: bool = False) -> Tensor:
        """Compute the rows' tokens into the cache; return the logits, [N, V], after rows that
        sample, or after every token. padding: rows without a request to compute besides.
        """
        if self.one_call is not None:
            return self.one_call([*rows, *[PADDING] * padding], every)
        return self._by_modules(rows, padding, every)

    @torch.inference_mode()
    def _by_modules(self, rows: Sequence[Row], padding: int, every: bool) -> Tensor:
        n_tokens = sum([row.n_tokens for row in rows]) + padding
        i = bisect.bisect_left(self._sizes, n_tokens)
        size = self._sizes[i] if i < len(self._sizes) else n_tokens
        forward, n_wanted = self.prepare([*rows, *[PADDING] * (padding + size - n_tokens)], every)
        # a captured pass also for prompts that fit: padding should cost less than more launches
        return self._captured.get(size, forward)()[: n_tokens if every else n_wanted]

    def prepare(self, rows: list[Row], every: bool = False) -> tuple[Pass, int]:
        """Send the rows to where the device reads them; return the forward pass over them, and of
        how many tokens it is to have logits.
        """
        tokens = flat(rows, every)
        n, n_wanted = len(tokens.ids), len(tokens.samples)
        rest = array("q", bytes(8 * (n - n_wanted)))  # a captured pass samples every token
        with self._inputs as put:
            inputs = put(tokens.ids + tokens.positions + tokens.samples + rest)
            how = put(self._in_pass.settings(tokens.sampled, n)) if self._in_pass else None
            attend = self.attention.prepare(rows, tokens, put)

        def forward() -> Tensor:
            ids, places, sampled = inputs[:n], inputs[n : 2 * n], inputs[2 * n : 2 * n + n_wanted]
            if self._sampled is not None:
                ids = self._sampled.into(ids)
            logits = self.model(ids, places, attend, sampled)
            if self._in_pass and how is not None:
                self._in_pass.draw(logits, how)
            return logits

        return forward, n_wanted

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], capture: Callable[[Pass], Pass]) -> None:
        """Replace the forward pass over each of `sizes` tokens by a captured one, largest first."""
        for size in sorted(sizes, reverse=True):
            forward, _ = self.prepare([PADDING._replace(samples=True)] * size)
            self._captured[size] = capture(forward)
        self._sizes = sorted(self._captured)

    def warm_up(
        self, max_batch_size: int, token_budget: int, prompt_tokens: int, block_size: int
    ) -> None:
        """Run what serving will run once, so that the first request does not pay for it.

        This includes the largest iteration, which shows that memory suffices. prompt_tokens: of a
        prompt at most. Most rows have no blocks and so leave the cache alone; a prompt and a token
        after it use the first blocks, which no request has yet.
        """
        prompt_tokens = min(prompt_tokens, token_budget)
        blocks = list(range(-(-(prompt_tokens + 1) // block_size)))
        prompt = Inference(
            [0] * prompt_tokens, 1, Sampling(temperature=1.0, top_k=50, top_p=0.9), tokens=[0]
        )
        prefill = [
            Row(prompt, 0, min(prompt_tokens, token_budget - at), [] if at else blocks, True, False)
            for at in range(0, token_budget, prompt_tokens)
        ][:max_batch_size]
        decode = Row(prompt, prompt_tokens, 1, blocks, samples=True, idle=False)
        idle = Row(prompt, 0, 1, [], samples=True, idle=True)
        largest = [*prefill, *[idle] * (max_batch_size - len(prefill))]
        for rows in (largest, [decode], [idle] * max_batch_size):
            self.generate(Iteration(rows, running=len(rows), waiting=0, blocks_used=0))
