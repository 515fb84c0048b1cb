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
from generate.buffers import Buffer, SampledIds, reader
from generate.memory import memory_for
from generate.sampling import Sample
from generate.scoring import ids_after
from model import GPT2
from scheduling.inference import Generator, Inference, Iteration, Row
from scheduling.sampling import Sampling

Pass = Callable[[], Tensor]  # a forward pass over what the buffers hold, to logits
# a row without a request: it has no blocks and attends to itself alone
PADDING = Row(Inference([0], 1), 0, 1, [], samples=False, idle=True)


def flat(rows: Sequence[Row], every: bool = False) -> tuple[array[int], array[int], array[int]]:
    """Return ids and positions of all tokens, and the indices of those whose logits are wanted: of
    `every` token, or the last of each row that samples, and those before its drafts.
    """
    ids, positions, samples = array("q"), array("q"), array("q")
    for row in rows:
        if row.n_tokens == 1:  # most rows, and a GPU waits meanwhile
            ids.append(row.inference.token(row.start))
            positions.append(row.start)
        else:
            span, n_drafts = range(row.start, row.start + row.n_tokens), len(row.drafts)
            known = span[:-n_drafts] if n_drafts else span
            ids.extend([row.inference.token(position) for position in known])
            ids.extend(row.drafts)
            positions.extend(span)
            samples.extend(range(len(ids) - 1 - n_drafts, len(ids) - 1))
        if row.samples:
            samples.append(len(ids) - 1)
    return ids, positions, array("q", range(len(ids))) if every else samples


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
        self._inputs = Buffer(3 * max_tokens, "q", model.wte.weight.device)
        self._sampled = sampled
        self._captured: dict[int, Pass] = {}
        self._sizes: list[int] = []  # of the captured ones, in tokens, ascending

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
        n_tokens = sum(row.n_tokens for row in rows) + padding
        i = bisect.bisect_left(self._sizes, n_tokens)
        size = self._sizes[i] if i < len(self._sizes) else n_tokens
        forward = self._prepare([*rows, *[PADDING] * (padding + size - n_tokens)], every)
        # a captured pass also for prompts that fit: padding should cost less than more launches
        wanted = n_tokens if every else sum(row.samples + len(row.drafts) for row in rows)
        return self._captured.get(size, forward)()[:wanted]

    def _prepare(self, rows: list[Row], every: bool = False) -> Pass:
        """Put the rows into the buffers; return the forward pass over them."""
        ids, positions, samples = flat(rows, every)
        n, n_samples = len(ids), len(samples)
        # a captured pass samples every token
        samples.frombytes(bytes(samples.itemsize * (n - n_samples)))
        inputs = self._inputs.load(ids + positions + samples)
        attend = self.attention.prepare(rows)
        tokens, places, sampled = inputs[:n], inputs[n : 2 * n], inputs[2 * n : 2 * n + n_samples]
        known = self._sampled.into if self._sampled is not None else lambda ids: ids
        return lambda: self.model(known(tokens), places, attend, sampled)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], capture: Callable[[Pass], Pass]) -> None:
        """Replace the forward pass over each of `sizes` tokens by a captured one, largest first."""
        for size in sorted(sizes, reverse=True):
            self._captured[size] = capture(self._prepare([PADDING._replace(samples=True)] * size))
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
