"""KV blocks that are found by the hash of their content, so that a prefix is computed once (vLLM's
prefix caching; Kwon et al., SOSP 2023, section 4.4).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from scheduling.inference import Inference
from scheduling.memory import BlockPool


def next_key(key: bytes, ids: Sequence[int]) -> bytes:
    """What names the blocks that `key` names and one more, which holds `ids`.

    SHA-256: nobody can make two prompts whose blocks are taken for each other's.
    """
    return hashlib.sha256(key + array("q", ids).tobytes()).digest()


def block_keys(ids: Sequence[int], block_size: int, salt: str = "") -> list[bytes]:
    """What names the first 0, 1, 2, … full blocks of a prompt (vLLM's chain of hashes).

    Equal keys mean equal tokens from the first on, and equal salts.
    """
    first = hashlib.sha256(salt.encode()).digest()
    keys = [hashlib.sha256(first).digest()]  # of 32 bytes, which no block's is: nor can a salt be
    for end in range(block_size, len(ids) + 1, block_size):
        keys.append(next_key(keys[-1], ids[end - block_size : end]))
    return keys


class PrefixCache(BlockPool):
    """A pool that knows whose its blocks are.

    Who has keys shares full blocks, and only reads those (vLLM's prefix caching; Kwon et al., SOSP
    2023, section 4.4).
    """

    def __init__(self, n_blocks: int, block_size: int):
        super().__init__(n_blocks)
        self.block_size = block_size

    def found_for(self, inference: Inference) -> list[int]:
        """The blocks that hold what it would compute next. Its last token is not looked for, since
        who samples computes.
        """
        keys, first = inference.keys, inference.num_cached_blocks
        if keys is None or inference.computed != first * self.block_size:
            return []  # it is in the middle of a block of its own
        most = (inference.computed + inference.uncomputed - 1) // self.block_size
        return self.find(keys[first + 1 : most + 1])

    def share_found(self, inference: Inference, found: Sequence[int]) -> int:
        """Give it the blocks that were found for it, in place of its own if it has those; return
        how many tokens of its prompt are thereby computed that never were for it.
        """
        first, start = (
            inference.num_cached_blocks,
            max(inference.computed, inference.interruptions.recompute_until),
        )
        end = first + len(found)
        self.share(found)
        own, inference.blocks[first:end] = inference.blocks[first:end], found
        self.free(own)
        inference.num_cached_blocks, inference.computed = end, end * self.block_size
        inference.decodes = bool(inference.tokens) and inference.uncomputed == 1
        new = max(0, min(inference.computed, len(inference.prompt_ids)) - start)
        inference.cached_tokens += new
        return new

    def hold(self, inference: Inference, n: int) -> None:
        """Give it blocks until it has n; in place, since its row has the list."""
        inference.blocks += self.allocate(max(0, n - len(inference.blocks)))

    def release(self, inference: Inference) -> None:
        """Take all of its blocks; a row that is being computed keeps its list."""
        self.free(inference.blocks)
        inference.blocks = []

    def cache_computed(self, inference: Inference, keys: list[bytes]) -> None:
        """Let the blocks that it has filled be found: now that they are computed and not before, so
        that an iteration that fails leaves nothing behind.
        """
        size = self.block_size
        for i in range(inference.num_cached_blocks, inference.computed // size):
            if len(keys) == i + 1:  # its completion's; its prompt's came with it
                ids = [inference.token(position) for position in range(i * size, (i + 1) * size)]
                keys.append(next_key(keys[i], ids))
            self.cache(inference.blocks[i], keys[i + 1])
            inference.num_cached_blocks = i + 1
