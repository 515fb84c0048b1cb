"""Numbers of the host, copied to the device and back without making the host wait."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

# by array's type code
DTYPES = {"i": torch.int32, "q": torch.int64, "f": torch.float32, "d": torch.float64}
ALIGNED = 16  # bytes at which Triton may take a tensor to begin, as it compiles a kernel

# takes integers of 4 or 8 bytes; returns the tensor that will hold them
Put = Callable[["array[int] | np.ndarray[Any, Any]"], Tensor]


def to_device(values: array[Any], device: torch.device) -> Tensor:
    """Return a new tensor of an array that is not empty: 1-D, of the array's type."""
    tensor = torch.frombuffer(values, dtype=DTYPES[values.typecode])
    return pinned(tensor, device).to(device, non_blocking=True)


def pinned(values: Tensor, device: torch.device) -> Tensor:
    """Return values that a copy to the device may read beside the host: for a GPU page-locked
    ones, which PyTorch keeps until the copy is over.
    """
    return values.pin_memory() if device.type == "cuda" else values


class Buffer:
    """Memory that stays in place on the device, since a captured graph reads it, for integers that
    change. What is put there within a `with` is sent at its end, in one copy; where it lies depends
    on the sizes alone. The host's side is page-locked once.
    """

    def __init__(self, n_bytes: int, device: torch.device):
        on_gpu = device.type == "cuda"
        self._tensor = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
        self._host = torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._bytes = self._host.numpy()
        self._end = 0  # the end of what was put, in bytes
        self._copied = torch.cuda.Event() if on_gpu else None

    def __enter__(self) -> Put:
        if self._copied is not None:  # the last copy may run still, if nothing waited for its pass
            self._copied.synchronize()
        self._end = 0
        return self._put

    def _put(self, values: array[int] | np.ndarray[Any, Any]) -> Tensor:
        data = np.frombuffer(values, np.uint8)
        first, end = self._end, self._end + len(data)
        self._bytes[first:end] = data  # raises ValueError where there is no room
        self._end = end + -end % ALIGNED
        dtype = torch.int32 if values.itemsize == 4 else torch.int64
        return self._tensor[first:end].view(dtype)

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self._tensor[: self._end].copy_(self._host[: self._end], non_blocking=True)
            if self._copied is not None:
                self._copied.record()


class SampledIds:
    """Memory on the device for the ids of an iteration, `size` at most: the next one reads them
    there before the host knows them (scheduling/asynchronous.py).
    """

    def __init__(self, size: int, device: str | torch.device, triton: bool = False):
        self.ids = torch.zeros(size, dtype=torch.int64, device=device)
        self._into = _into
        if triton:
            from generate.kernels.known import known

            self._into = known

    @torch.inference_mode()
    def keep(self, ids: Tensor) -> None:
        if ids.data_ptr() != self.ids.data_ptr():  # else they were drawn there
            self.ids[: len(ids)] = ids

    def into(self, ids: Tensor) -> Tensor:
        """Return ids, int64 [T], with the kept ones in the places of ~0, ~1, …"""
        return self._into(ids, self.ids)


def _into(ids: Tensor, kept: Tensor) -> Tensor:
    return torch.where(ids < 0, kept[(~ids).clamp(min=0)], ids)


def reader(values: Tensor) -> Callable[[], list[Any]]:
    """Begin to copy a tensor to the host; return a call that waits for the copy alone, and not for
    what the device is given to do after it.
    """
    if not values.is_cuda:
        known = values.tolist()  # now: the next iteration's may take their place
        return lambda: known
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[Any]:
        copied.synchronize()
        return host.tolist()

    return read
