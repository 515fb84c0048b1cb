"""Models that requests may name: the base model, and LoRA adapters, which may come and go."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from scheduling.errors import ModelNotFound
from scheduling.extensions import Extension
from scheduling.inference import Inference

if TYPE_CHECKING:
    from config import Config


class UnloadAdapterRequest(BaseModel):
    """The body of POST /v1/unload_lora_adapter."""

    model_config = ConfigDict(strict=True)

    lora_name: str = Field(min_length=1, description="name of the adapter")


class LoadAdapterRequest(UnloadAdapterRequest):
    """The body of POST /v1/load_lora_adapter."""

    lora_path: str = Field(min_length=1, max_length=4096, description="whole path of its folder")


class Models(Extension):
    """Models of a server; as an extension, refuses requests whose adapter has gone meanwhile."""

    def __init__(self, config: Config):
        self.base = config.model_name
        self._facts = {"object": "model", "created": int(time.time())}
        self._facts |= {"owned_by": "effective-batching", "max_model_len": config.max_model_len}
        # the folder of each model, if it has one; threads of HTTP change it, by one call each
        self.roots = {self.base: config.model}
        self.roots |= {name: source.folder or name for name, source in config.adapters.items()}

    def adapter_of(self, name: str | None) -> str:
        """Return the adapter that a request names; "" for the base model. Raises ModelNotFound."""
        if name is None or name == self.base:
            return ""
        if name in self.roots:
            return name
        known = ", ".join(map(repr, [*self.roots]))
        message = f"There is no model {name[:100]!r} here; this server has {known}."
        raise ModelNotFound(message, param="model")

    def check(self, group: Sequence[Inference], now: float) -> None:
        self.adapter_of(group[0].adapter or None)

    def cards(self) -> dict[str, Any]:
        """Return what OpenAI's routes say of each model, in vLLM's form."""
        return {
            name: {"id": name, "root": root, "parent": None if name == self.base else self.base}
            | self._facts
            for name, root in self.roots.copy().items()
        }
