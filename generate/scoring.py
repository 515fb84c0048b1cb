"""Log-probabilities of tokens, for the requests that want them: of the model's logits before
penalties, temperature, top-k and top-p (vLLM's raw_logprobs), over the ids of the tokenizer.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import compress

import torch
from torch import Tensor

from generate.buffers import to_device
from generate.sampling import Sample, penalized
from scheduling.inference import Row
from scheduling.sampling import Score, Scores

PASS = 128  # prompt tokens that are scored at once: of GPT-2 their logits are 26 MB
LEAST = -9999.0  # minus infinity in JSON, as in OpenAI's and vLLM's answers


def ids_after(
    rows: Sequence[Row],
    logits: Callable[[Sequence[Row], bool], Tensor],
    n_vocab: int,
    sample: Sample,
) -> Tensor:
    """Compute rows, prompts that are to be scored first; return the ids of those that sample:
    int64 [N].

    logits: computes rows and returns what follows those that sample, or every token.
    """
    if any(row.inference.scores is not None for row in rows):
        rows, passes = split(rows)
        for prompts in passes:
            record_prompts(logits(prompts, True), prompts, n_vocab)
    found = logits(rows, False) if rows else None
    sampled = [row for row in rows if row.samples]
    if found is None or not sampled:
        return torch.empty(0, dtype=torch.int64)
    return choose(found, sampled, n_vocab, sample)


def choose(logits: Tensor, rows: Sequence[Row], n_vocab: int, sample: Sample) -> Tensor:
    """Return an id for each row, and one after each of its drafts: int64 [N]; append scores where
    they are wanted. logits: [N, V], one for each id.
    """
    places = [(row, row.drafts[:n]) for row in rows for n in range(len(row.drafts) + 1)]
    inferences = [(row.inference, drafts) for row, drafts in places]
    draws = [(each.sampling, len(each.tokens) + len(drafts)) for each, drafts in inferences]
    scored = [
        (i, row.inference.scores, list(drafts))
        for i, (row, drafts) in enumerate(places)
        if row.inference.scores is not None and not row.idle
    ]
    raw = logits[[i for i, _, _ in scored]] if scored else logits  # a copy, before penalties
    ids = sample(penalized(logits, inferences), draws, n_vocab)
    if scored:  # but for what follows a rejected draft
        known = ids.tolist()
        right = [known[i - len(drafts) : i] == drafts for i, _, drafts in scored]
        wanted = [(scores, known[i]) for i, scores, _ in compress(scored, right)]
        record(raw[right], wanted, n_vocab)
    return ids


@torch.inference_mode()
def record(logits: Tensor, wanted: Sequence[tuple[Scores, int]], n_vocab: int) -> None:
    """Append the score of an id to each Scores. logits: [N, V], those from which it came."""
    logprobs = logits[:, :n_vocab].float().log_softmax(-1)  # [N, n_vocab]
    logprobs.nan_to_num_(nan=LEAST, neginf=LEAST)
    ids = to_device(array("q", [id_ for _, id_ in wanted]), logits.device)
    own = logprobs.gather(-1, ids[:, None])[:, 0].tolist()
    values, likeliest = logprobs.topk(min(max(scores.top for scores, _ in wanted), n_vocab))
    tops = zip(likeliest.tolist(), values.tolist())
    for (scores, _), logprob, top in zip(wanted, own, tops):
        scores.of.append(Score(logprob, [*zip(*top)][: scores.top]))


def split(rows: Sequence[Row]) -> tuple[list[Row], list[list[Row]]]:
    """Take the prompt tokens that are to be scored out of an iteration's rows.

    Return the remaining rows, and passes to compute before them, in order: of at most PASS tokens,
    so that memory does not grow with the prompts. Logits are wanted after each of their tokens.
    """
    remaining: list[Row] = []
    passes: list[list[Row]] = [[]]
    room = PASS
    for row in rows:
        scores, start = row.inference.scores, row.start
        # the token after the last one is sampled, and so are those of drafts
        end = start + row.n_tokens - len(row.drafts) - row.samples
        if scores is None or row.idle or scores.next > end:
            remaining.append(row)
            continue
        while start < end:
            if not room:
                passes.append([])
                room = PASS
            n = min(end - start, room)
            passes[-1].append(row._replace(start=start, n_tokens=n, samples=False))
            start, room = start + n, room - n
        if row.samples:
            remaining.append(row._replace(start=end, n_tokens=1))
    return remaining, [rows for rows in passes if rows]


def record_prompts(logits: Tensor, rows: Sequence[Row], n_vocab: int) -> None:
    """Append the scores of the tokens after all of the rows' tokens. logits: [T, V].

    A token that is computed again after preemption has its score already.
    """
    at: list[int] = []
    wanted: list[tuple[Scores, int]] = []
    before = 0  # tokens of the rows before this one
    for row in rows:
        inference, scores = row.inference, row.inference.scores
        assert scores is not None
        for position in range(max(row.start + 1, scores.next), row.start + row.n_tokens + 1):
            at.append(before + position - row.start - 1)
            wanted.append((scores, inference.token(position)))
        before += row.n_tokens
    if wanted:
        record(logits[at], wanted, n_vocab)
