"""Speculative decoding: draft tokens are guesses at an inference's next tokens, which one iteration
verifies all at once (Leviathan et al., ICML 2023).

Texts do not depend on it: a draft token is accepted if it is the very token that is sampled in its
place, with that token's own draw.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from scheduling.extensions import Extension
from scheduling.inference import Drafter, Inference, Row
from scheduling.memory import BlockPool
from scheduling.prefix_cache import Account

# tokens for which an inference gets KV blocks, by its id
Reservations = dict[int, tuple[Inference, int]]
log = logging.getLogger("effective_batching")


def read_draft(text: str) -> tuple[str, str]:
    """Return the kind of a drafter, and its folder or rates. Raises ValueError with a sentence."""
    kind, colon, value = text.partition(":")
    if (kind, colon) == ("ngram", "") or (kind == "model" and value):
        return kind, value
    if kind == "acceptance" and read_rates(value):
        return kind, value
    raise ValueError(
        "must be ngram, model:FOLDER, or acceptance:0.7 (with a chance from 0 to 1 that a draft "
        "token is right; acceptance:0.5,0.9 has another one for those after the first)"
    )


def read_rates(text: str) -> list[float]:
    """Return the chances of draft tokens by their place; none where one is no chance."""
    try:
        rates = [float(rate) for rate in text.split(",")]
    except ValueError:
        return []
    return rates if all(0 <= rate <= 1 for rate in rates) else []


def kept(drafts: Sequence[int], sampled: Iterator[int]) -> list[int]:
    """Return a row's new tokens among the 1 + len(drafts) ids sampled for it: those up to the first
    that differs from its draft token. Later ids were computed from that draft token.
    """
    ids = list(islice(sampled, 1 + len(drafts)))
    for n, (id_, draft) in enumerate(zip(ids, drafts), 1):
        if id_ != draft:
            return ids[:n]
    return ids


class Speculation(Extension):
    """Draft tokens of rows that decode; n_drafts: of a row at most."""

    def __init__(self, n_drafts: int):
        self._n_drafts = n_drafts

    def draft(self, rows: Collection[Inference], drafter: Drafter) -> None:
        """Propose draft tokens for the rows of the next iteration, which verifies them.

        A drafter that raises proposes nothing: requests need it for their speed alone.
        """
        wanted = self.wanted(rows)
        try:
            proposed = drafter.propose(wanted) if wanted else []
        except Exception:
            log.exception("no draft tokens were proposed; requests are served without them")
            return
        for (inference, _), ids in zip(wanted, proposed):
            inference.drafts.ids = ids

    def wanted(self, rows: Collection[Inference]) -> list[tuple[Inference, int]]:
        """Return how many draft tokens to propose for each row that decodes."""
        decoding = [each for each in rows if each.decodes and not each.is_over]
        # none for the last token, after which nothing is sampled
        left = [(each, each.num_tokens - len(each.tokens) - 1) for each in decoding]
        return [(each, min(self._n_drafts, n)) for each, n in left if n > 0]

    def add(self, rows: list[Row], reserved: Reservations, account: Account, budget: int) -> None:
        """Add the drafts that were proposed to rows that decode: as many as the rest of the token
        budget, and the KV blocks that are left free, allow. reserved: is extended.
        """
        size = account.block_size
        for i, row in enumerate(rows):
            inference, drafts = row.inference, row.inference.drafts
            if not drafts.ids or not row.decodes or row.idle:
                continue
            _, tokens = reserved.get(inference.id, (inference, len(row.blocks) * size))
            drafts.blocks = -(-tokens // size)
            free = (drafts.blocks + account.free) * size - row.start - 1
            k = min(len(drafts.ids), budget, free)
            if k <= 0:
                continue
            budget -= k
            end = row.start + 1 + k
            if end > drafts.blocks * size:
                reserved[inference.id] = inference, end
                account.free -= -(-end // size) - drafts.blocks
            rows[i] = row._replace(n_tokens=1 + k, drafts=drafts.ids[:k])

    def stop_running(self, inference: Inference, now: float) -> None:
        inference.drafts.ids = []

    def verified(self, row: Row, pool: BlockPool) -> int:
        """Count accepted drafts, and free the blocks of others; return how many tokens it keeps."""
        inference, drafts = row.inference, row.inference.drafts
        n = len(inference.prompt_ids) + len(inference.tokens) - 1 - row.start
        kept_blocks = max(drafts.blocks, -(-(row.start + n) // pool.block_size))
        pool.free(inference.blocks[kept_blocks:])
        del inference.blocks[kept_blocks:]
        if inference.scores is not None:  # those of tokens after the one that ended it
            inference.scores.cut(row.start + n + 1)
        drafts.verified += len(row.drafts)
        drafts.accepted += n - 1
        return n
