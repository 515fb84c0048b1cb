"""How many KV blocks a GPU holds beside the weights, CUDA graphs and the largest iteration.

That is tried, not estimated.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from generate import OutOfMemory

if TYPE_CHECKING:
    from config import Config


def fitting_blocks(config: Config, trial: Callable[[int], object]) -> int:
    """Return the KV blocks that fit into kv_cache's share of the GPU; without prefix_caching at
    most as many as the rows can use.

    trial(n_blocks): builds an engine on a pool of that size and runs its largest iterations; it is
    thrown away. Raises OutOfMemory if a request of max_model_len does not fit.
    """
    least = config.blocks_per_request
    _release()  # what an earlier engine of this process held
    engine = trial(least)
    free, total = torch.cuda.mem_get_info()  # with the trial's memory still held
    del engine
    _release()
    room = free - (1 - config.pool.amount / 100) * total
    fitting = least + int(room // config.block_bytes)
    if fitting < least:
        raise OutOfMemory(
            f"{config.model}, its largest iteration and a request of {config.max_model_len} tokens "
            f"need {-room / 1e9:.2f} GB more than {config.pool} of this GPU's "
            f"{total / 1e9:.1f} GB; lower --max-batch-size, --token-budget or --max-model-len, "
            "raise --kv-cache, or end what else runs on the GPU"
        )
    return fitting if config.prefix_caching else min(fitting, config.n_blocks)


def _release() -> None:
    """Give memory that nobody uses back to the GPU: captured passes lie in cycles of references."""
    gc.collect()
    torch.cuda.empty_cache()
