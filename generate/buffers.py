"""Numbers of the host, copied to the device and back without making the host wait."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# by array's type code
DTYPES = {"i": torch.int32, "q": torch.int64, "f": torch.float32, "d": torch.float64}


def to_device(values: array[Any], device: torch.device) -> Tensor:
    """Return a new tensor of an array that is not empty: 1-D, of the array's type."""
    return _on_host(values, device).to(device, non_blocking=True)


class Buffer:
    """A tensor that stays in place for values that change: a captured graph reads its memory."""

    def __init__(self, size: int, typecode: str, device: torch.device):
        self._tensor = torch.zeros(size, dtype=DTYPES[typecode], device=device)

    def load(self, values: array[Any]) -> Tensor:
        """Overwrite the first len(values) elements; return the whole buffer."""
        assert len(values) <= len(self._tensor), (
            f"{len(values)} values for a buffer of {len(self._tensor)}"
        )
        self._tensor[: len(values)].copy_(_on_host(values, self._tensor.device), non_blocking=True)
        return self._tensor


class SampledIds:
    """Memory on the device for the ids of an iteration, `size` at most: the next one reads them
    there before the host knows them (scheduling/asynchronous.py).
    """

    def __init__(self, size: int, device: str):
        self._ids = torch.zeros(size, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def keep(self, ids: Tensor) -> None:
        self._ids[: len(ids)] = ids

    def into(self, ids: Tensor) -> Tensor:
        """Return ids, int64 [T], with the kept ones in the places of -1, -2, …"""
        return torch.where(ids < 0, self._ids[(-1 - ids).clamp(min=0)], ids)


def reader(values: Tensor) -> Callable[[], list[Any]]:
    """Begin to copy a tensor to the host; return a call that waits for the copy alone, and not for
    what the device is given to do after it.
    """
    if not values.is_cuda:
        return values.tolist
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[Any]:
        copied.synchronize()
        return host.tolist()

    return read


def _on_host(values: array[Any], device: torch.device) -> Tensor:
    """Return a tensor of an array's memory; for a GPU page-locked, and kept by PyTorch until the
    copy, which runs beside the host, is over.
    """
    tensor = torch.frombuffer(values, dtype=DTYPES[values.typecode])
    return tensor.pin_memory() if device.type == "cuda" else tensor
