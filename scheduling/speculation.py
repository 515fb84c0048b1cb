"""Speculative decoding: how many draft tokens each row verifies in an iteration.

Texts do not depend on it: a draft token is accepted if it is the very token that is sampled in its
place, with that token's own draw.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Sequence

from scheduling.drafts import Drafter
from scheduling.extensions import Extension
from scheduling.inference import Inference, Row
from scheduling.memory import BlockPool
from scheduling.past import Past
from scheduling.prefix_cache import Account
from scheduling.worth import MOST, Shares, Worth

log = logging.getLogger("effective_batching")


def read_speculate(text: str) -> list[tuple[int, int]]:
    """Return pairs: up to so many rows, so many draft tokens each; none for auto.

    Raises ValueError, with a sentence.
    """
    if text == "auto":
        return []
    pairs = [pair.partition(":") for pair in text.split(",")]
    try:
        table = [(int(rows) if colon else sys.maxsize, int(k)) for k, colon, rows in pairs]
    except ValueError:
        table = [(0, 0)]
    rows = [most for most, _ in table]
    if min(rows) < 1 or min(k for _, k in table) < 0 or rows != sorted(set(rows)):
        raise ValueError(
            "must be a number of draft tokens (4), numbers each with the most rows for which it "
            "holds, fewest rows first (4:8,2:16), or auto"
        )
    return table


def most_drafts(text: str) -> int:
    """Return the most draft tokens of a row."""
    return max((k for _, k in read_speculate(text)), default=MOST)


def speculation_of(text: str, draft: str, past: Past | None) -> Speculation | None:
    """Return the rule that the settings state; None for no speculation."""
    return Speculation(text, past, costly=draft.startswith("model:")) if text != "0" else None


class Speculation(Extension):
    """The rule of `--speculate`. costly: to propose a draft token takes time, so that it should not
    be in vain.
    """

    def __init__(self, text: str, past: Past | None, costly: bool):
        self._table = read_speculate(text)
        self._costly, self._rows = costly, 0
        self._worth = Worth(past, costly) if past and not self._table else None

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

    def wanted(self, rows: Collection[Inference]) -> Shares:
        """Return how many draft tokens to propose for each row that decodes."""
        if self._worth is not None and not self._worth.proposes:
            return []
        decoding = [each for each in rows if each.decodes and not each.is_over]
        most = self._by_rows(len(decoding))
        # none for the last token, after which nothing is sampled
        wanted = [(each, min(most, each.num_tokens - len(each.tokens) - 1)) for each in decoding]
        if self._worth is not None and self._costly:
            wanted = self._worth.of(wanted, len(decoding))
        return [(each, k) for each, k in wanted if k > 0]

    def add(
        self,
        rows: list[Row],
        reserved: dict[int, tuple[Inference, int]],
        account: Account,
        budget: int,
        size: int,
    ) -> None:
        """Add the drafts that were proposed to rows that decode: as many as are worth their time,
        as the rest of the token budget, and as the KV blocks that are left free allow.

        reserved: tokens for which each inference gets blocks, by id; extended. size: of a block.
        """
        places = {
            row.inference.id: i
            for i, row in enumerate(rows)
            if row.inference.drafts.ids and row.decodes and not row.idle
        }
        if not places:
            return
        drafted = [(rows[i].inference, len(rows[i].inference.drafts.ids)) for i in places.values()]
        if self._worth is not None:
            drafted = self._worth.of(drafted, [row.decodes for row in rows].count(True))
        for inference, k in drafted:
            i, drafts = places[inference.id], inference.drafts
            row = rows[i]
            _, tokens = reserved.get(inference.id, (inference, len(row.blocks) * size))
            drafts.blocks = -(-tokens // size)
            k = min(k, budget, (drafts.blocks + account.free) * size - row.start - 1)
            if k <= 0:
                continue
            budget -= k
            end = row.start + 1 + k
            if end > drafts.blocks * size:
                reserved[inference.id] = inference, end
                account.free -= -(-end // size) - drafts.blocks
            rows[i] = row._replace(n_tokens=1 + k, drafts=drafts.ids[:k])

    def planned(self, rows: Sequence[Row], now: float) -> None:
        self._rows = len(rows)
        if self._worth is not None:
            self._worth.planned()

    def sampled(self, inferences: Sequence[Inference], now: float) -> None:
        if self._worth is not None:
            self._worth.sampled(self._rows, len(inferences))

    def stop_running(self, inference: Inference, now: float) -> None:
        inference.drafts.ids = []

    def verified(self, row: Row, pool: BlockPool) -> int:
        """Count the accepted drafts of a row that has its tokens, and give back what the others
        took; return how many of the row's tokens are kept.
        """
        inference, drafts = row.inference, row.inference.drafts
        n = len(inference.prompt_ids) + len(inference.tokens) - 1 - row.start
        kept_blocks = max(drafts.blocks, -(-(row.start + n) // pool.block_size))
        pool.free(inference.blocks[kept_blocks:])
        del inference.blocks[kept_blocks:]
        if inference.scores is not None:  # those of tokens after the one that ended it
            inference.scores.cut(row.start + n + 1)
        drafts.verified += len(row.drafts)
        drafts.accepted += n - 1
        if self._worth is not None:
            self._worth.verified(drafts, len(row.drafts), n - 1)
        return n

    def _by_rows(self, n: int) -> int:
        return next((k for rows, k in self._table if n <= rows), 0) if self._table else MOST
