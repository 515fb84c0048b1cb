"""KV blocks that are found by their content, so that prompts which begin alike compute their
beginning once (vLLM's prefix caching; Kwon et al., SOSP 2023, section 4.4).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from itertools import groupby

from scheduling.inference import CachedPrefix, Inference
from scheduling.memory import BlockPool

# returns the cached blocks of the tokens that an inference would compute next
Find = Callable[[Inference], Sequence[int]]


def next_key(key: bytes, ids: Sequence[int]) -> bytes:
    """Return the key of a block that holds `ids` after those of `key`. By SHA-256, no user can make
    two prompts whose blocks are mistaken for each other's.
    """
    return hashlib.sha256(key + array("q", ids).tobytes()).digest()


def block_keys(
    ids: Sequence[int], block_size: int, salt: str = "", adapter: str = ""
) -> list[bytes]:
    """Return the keys of the first 0, 1, 2, … full blocks of a prompt (vLLM's chain of hashes).

    Equal keys mean equal tokens from the first on, equal salts, and the same adapter.
    """
    first = hashlib.sha256(salt.encode()).digest()
    if adapter:
        first += hashlib.sha256(adapter.encode()).digest()
    # a seed of 32 bytes, or of 64 that are no small ids: no salt is one, and no block
    keys = [hashlib.sha256(first).digest()]
    for end in range(block_size, len(ids) + 1, block_size):
        keys.append(next_key(keys[-1], ids[end - block_size : end]))
    return keys


class PrefixCache(BlockPool):
    """Blocks with reference counts. A full block can be found by its key, even when nothing refers
    to it, until it is evicted, the one unused for longest first.

    Inferences with keys share full blocks, which nothing writes to any more.
    """

    def __init__(self, n_blocks: int, block_size: int):
        super().__init__(n_blocks, block_size)
        self.shared_blocks = 0  # those that several inferences have
        self.queries = 0  # prompt tokens looked up
        self.hits = 0  # prompt tokens found
        self.references = [0] * n_blocks  # each block's references
        self._blocks: dict[bytes, int] = {}  # by key
        self._keys: dict[int, bytes] = {}  # by block
        self._unused: OrderedDict[int, None] = OrderedDict()  # free ones with a key, oldest first

    def limit(self, n_blocks: int) -> None:
        """Have so many blocks from now on; none may be in use yet."""
        self.n_blocks = self.free_blocks = n_blocks
        self.references, self._ranges = [0] * n_blocks, [(0, n_blocks)]

    def allocate(self, n: int) -> list[int]:
        short = n - (self.free_blocks - len(self._unused))
        if short > 0 and n <= self.free_blocks:
            evicted = [self._unused.popitem(last=False)[0] for _ in range(short)]
            for block in evicted:
                del self._blocks[self._keys.pop(block)]
            self._insert(evicted)
        taken = super().allocate(n)
        for block in taken:
            self.references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more reference to blocks that were found."""
        for block in blocks:
            if not self.references[block]:
                del self._unused[block]
                self.free_blocks -= 1
            self.references[block] += 1
            self.shared_blocks += self.references[block] == 2

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back, the last first: a prompt's end is evicted before its beginning."""
        without_key = []
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block]:
                self.shared_blocks -= self.references[block] == 1
            elif block in self._keys:
                self.free_blocks += 1
                self._unused[block] = None
            else:
                without_key.append(block)
        if without_key:
            super().free(without_key)

    @property
    def cached_blocks(self) -> int:
        """Number of free blocks whose content can still be found."""
        return len(self._unused)

    def cache(self, block: int, key: bytes) -> None:
        """Make a full, computed block findable by its key, unless another block is already."""
        if key not in self._blocks:
            self._blocks[key], self._keys[block] = block, key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks of these keys, up to the first key without a block."""
        blocks = []
        for key in keys:
            if (block := self._blocks.get(key)) is None:
                break
            blocks.append(block)
        return blocks

    def forget_all(self) -> None:
        """Forget the keys of all blocks; those in use stay in use."""
        self._blocks.clear()
        self._keys.clear()
        self._unused.clear()
        self._ranges.clear()  # rebuilt, since merging a whole pool into them takes long
        for used, blocks in groupby(range(self.n_blocks), key=lambda b: self.references[b] > 0):
            if not used:
                first, *others = blocks
                self._ranges.append((first, first + 1 + len(others)))

    def finder(self) -> Find:
        """Return a `found_for` that looks each inference up once, so that a plan is consistent."""
        found_by_id: dict[int, Sequence[int]] = {}

        def find(inference: Inference) -> Sequence[int]:
            if inference.prefix is None:
                return ()
            if inference.id not in found_by_id:
                found_by_id[inference.id] = self.found_for(inference)
            return found_by_id[inference.id]

        return find

    def found_for(self, inference: Inference) -> list[int]:
        """Return the blocks of what it would compute next, without the token that it samples."""
        prefix = inference.prefix
        if prefix is None or inference.computed != prefix.n_blocks * self.block_size:
            return []  # it is in the middle of a block of its own
        most = (inference.computed + inference.uncomputed - 1) // self.block_size
        return self.find(prefix.keys[prefix.n_blocks + 1 : most + 1])

    def count_query(self, inference: Inference) -> None:
        """Count a prompt that is looked up; completions of one prompt count once."""
        if inference.prefix is not None and inference.leader is None:
            self.queries += len(inference.prompt_ids)

    def share_found(self, inference: Inference, found: Sequence[int]) -> int:
        """Give it the blocks found, in place of its own; return how many prompt tokens it saves."""
        prefix = inference.prefix
        assert prefix is not None
        first, end = prefix.n_blocks, prefix.n_blocks + len(found)
        start = max(inference.computed, inference.interruptions.recompute_until)
        self.share(found)
        own, inference.blocks[first:end] = inference.blocks[first:end], found
        self.free(own)
        prefix.n_blocks, inference.computed = end, end * self.block_size
        inference.decodes = bool(inference.tokens) and inference.uncomputed == 1
        saved = max(0, min(inference.computed, len(inference.prompt_ids)) - start)
        prefix.found_tokens += saved
        if inference.leader is not None:
            return 0
        self.hits += saved
        return saved

    def cache_computed(self, inference: Inference, prefix: CachedPrefix) -> None:
        """Make the blocks that an inference has filled findable: once they are computed, so that an
        iteration that fails leaves nothing behind.
        """
        size, keys = self.block_size, prefix.keys
        for i in range(prefix.n_blocks, inference.computed // size):
            if len(keys) == i + 1:  # a block of the completion; the prompt's keys are there
                ids = [inference.token(position) for position in range(i * size, (i + 1) * size)]
                keys.append(next_key(keys[i], ids))
            self.cache(inference.blocks[i], keys[i + 1])
            prefix.n_blocks = i + 1


class Account:
    """Free blocks as a plan would leave them. Below 0 the plan cannot be carried out."""

    def __init__(self, pool: PrefixCache, find: Find):
        self.free = pool.free_blocks
        self.block_size, self._references, self._find = pool.block_size, pool.references, find
        self._change: defaultdict[int, int] = defaultdict(int)  # the change of references, by block

    def copy(self) -> Account:
        other = copy(self)
        other._change = self._change.copy()
        return other

    def take(self, inference: Inference, tokens: int) -> None:
        """Reserve blocks for so many tokens: those found for an inference, and new ones."""
        found, replaced, new = self._needs(inference, tokens)
        self._refer(found)
        self._drop(replaced)
        self.free -= new

    def undo(self, inference: Inference, tokens: int) -> None:
        found, replaced, new = self._needs(inference, tokens)
        self.free += new
        self._refer(replaced)
        self._drop(found)

    def release(self, inference: Inference) -> None:
        """Give all blocks of an inference back."""
        self._drop(inference.blocks)

    def _needs(self, inference: Inference, tokens: int) -> tuple[Sequence[int], Sequence[int], int]:
        """Return the blocks found, its own that they replace, and how many new ones it needs."""
        found = self._find(inference)
        first = inference.prefix.n_blocks if inference.prefix else 0
        end = first + len(found)
        new = max(0, -(-tokens // self.block_size) - max(len(inference.blocks), end))
        return found, inference.blocks[first:end], new

    def _refer(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.free -= self._references[block] + self._change[block] == 0
            self._change[block] += 1

    def _drop(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._change[block] -= 1
            self.free += self._references[block] + self._change[block] == 0
