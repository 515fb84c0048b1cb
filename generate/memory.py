"""What happens where memory is too small. Importing this loads no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class OutOfMemory(Exception):
    """Memory is too small; the message names the settings to lower."""


@contextlib.contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Raise OutOfMemory, with a sentence, where memory does not hold `what`: a GPU's, or on a CPU
    what the system lets one process have.
    """
    import torch

    try:
        yield
    except RuntimeError as error:
        full = isinstance(error, torch.AcceleratorError) and "out of memory" in str(error)
        on_gpu = full or isinstance(error, torch.OutOfMemoryError)
        if not on_gpu and "DefaultCPUAllocator" not in str(error):
            raise
        raise OutOfMemory(
            f"this {'GPU' if on_gpu else 'machine'}'s memory does not hold {what}; lower "
            "--token-budget, --max-batch-size or --kv-cache (with adapters --max-loras), or end "
            "what else uses it"
        ) from None
