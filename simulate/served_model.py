"""What a vLLM server of a model is on a GPU: its defaults, and the KV blocks that its memory holds.

Defaults are those of `vllm serve` 0.24.0 (vllm/engine/arg_utils.py, get_batch_defaults; async
scheduling is on since 0.14).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KERNELS = "kernels:"  # before a GPU and a model, whose costs `simulate.kernels` makes
GIB = 2**30
UTILIZATION = 0.9  # --gpu-memory-utilization
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model on its GPUs. Bytes are those of each GPU."""

    gpu: str
    gpus: int  # --tensor-parallel-size
    max_model_len: int  # positions of the model
    memory: int  # as CUDA reports it
    weights: int
    kv_per_token: int
    activations_per_token: int  # at their peak, which vLLM measures with a whole budget of tokens

    @property
    def is_large(self) -> bool:
        """Return whether vLLM takes it for one of the GPUs with larger defaults."""
        return self.memory >= 70 * GIB and self.gpu != "a100"

    def settings(self) -> dict[str, Any]:
        """Return the settings of its server, without KV blocks, in our names."""
        return {
            "model": "fake",
            "device": "cpu",
            "max_batch_size": 1024 if self.is_large else 256,
            "token_budget": 8192 if self.is_large else 2048,
            "max_model_len": self.max_model_len,
            "block_size": BLOCK_SIZE,
            "kv_reservation": "demand",
            "budget_counts": "all",
            "max_waiting": 10**9,
        }

    def fill_in(self, given: Mapping[str, Any], utilization: float) -> dict[str, Any]:
        """Return the KV blocks of a server with these settings. Raises ValueError for settings that
        the model or its GPUs cannot have.
        """
        if (asked := int(given["max_model_len"])) > self.max_model_len:
            raise ValueError(
                f"max_model_len {asked} is beyond the {self.max_model_len:,} positions of the "
                "model; lower it"
            )
        blocks = self.blocks(given, utilization)
        if blocks <= 0:
            raise ValueError(
                f"a share of {utilization:g} of {self.gpus} × {self.memory / GIB:.0f} GiB holds no "
                "KV block beside the weights; raise --gpu-memory-utilization or take more GPUs"
            )
        return {"kv_cache": f"{blocks}blocks"}

    def blocks(self, settings: Mapping[str, Any], utilization: float = UTILIZATION) -> int:
        """Return the KV blocks that fit beside weights and activations; 0 or less: none fit."""
        used = self.weights + self.activations_per_token * int(settings["token_budget"])
        free = utilization * self.memory - used
        return int(free // (int(settings["block_size"]) * self.kv_per_token))
