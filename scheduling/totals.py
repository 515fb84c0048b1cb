"""What a scheduler has seen since its start, and how full it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from scheduling.inference import Inference, Row


class Snapshot(NamedTuple):
    """How full a scheduler is, and how many tokens it has seen computed since the start."""

    waiting: int
    running: int  # held ones too, but not those whose row is idle and who have their answer
    blocks_used: int
    n_blocks: int
    prompt_tokens: int  # those found in the prefix cache, too
    completion_tokens: int
    prefix_queries: int  # prompt tokens that were looked for in the prefix cache
    prefix_hits: int  # those found


class Scene(NamedTuple):
    """What there is to see at one instant."""

    free_blocks: int  # those whose content can still be found, too
    shared_blocks: int  # that several requests have
    cached_blocks: int  # of the free ones, those whose content can still be found
    queue: list[Inference]  # the first of those that wait, in the order
    n_blocks: int  # in the pool


@dataclass(slots=True)
class Totals:
    """Tokens since the start. Completions of one prompt count it once."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0

    @property
    def processed(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def looked_for(self, inference: Inference) -> None:
        """Its prompt, in the prefix cache."""
        if inference.keys is not None and inference.leader is None:
            self.prefix_queries += len(inference.prompt_ids)

    def found(self, inference: Inference, tokens: int) -> None:
        """So many tokens of its prompt, in the prefix cache."""
        if inference.leader is None:
            self.prompt_tokens += tokens
            self.prefix_hits += tokens

    def computed(self, row: Row) -> None:
        """A row that does not decode."""
        if row.inference.leader is None:
            end = min(row.start + row.n_tokens, len(row.inference.prompt_ids))
            self.prompt_tokens += max(0, end - row.start - row.recomputed)
