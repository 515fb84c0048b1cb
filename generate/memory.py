"""What happens where a GPU's memory is too small. Importing this loads no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class OutOfMemory(Exception):
    """A GPU's memory is too small; the message names the settings to lower."""


@contextlib.contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Raise OutOfMemory, with a sentence, where the GPU's memory does not hold `what`."""
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        if isinstance(error, torch.AcceleratorError) and "out of memory" not in str(error):
            raise
        raise OutOfMemory(
            f"this GPU's memory does not hold {what}; lower --token-budget, --max-batch-size or "
            "--kv-cache, or end what else runs on the GPU"
        ) from None
